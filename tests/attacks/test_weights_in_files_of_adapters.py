"""The file of an adapter has other weights than the adapter. PEFT loads weights by name, and ignores all other names.

A weight of the base model replaced the frozen weight, and later checkpoints stated the digest of the original base. A
file without weights of the adapter was loaded without a message: training went on with new weights.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    TaskType,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from safepoint.errors import ConflictError
from safepoint.training.integrations.transformers.resume.loaded_model import load_later_adapters, only_own_adapters

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

_FILE = "adapter_model.safetensors"
_LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
_CAUSAL: dict[str, Any] = {"task_type": TaskType.CAUSAL_LM}
_CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lambda: LoraConfig(**_LORA),
    "bias": lambda: LoraConfig(**_LORA, bias="all"),
    "dora": lambda: LoraConfig(**_LORA, use_dora=True),
    "modules to save": lambda: LoraConfig(**_LORA, modules_to_save=["lm_head"]),
    "embeddings": lambda: LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False),
    "tokens": lambda: LoraConfig(**_LORA, trainable_token_indices=[1, 2]),
    "adalora": lambda: AdaLoraConfig(r=2, init_r=2, total_step=9, target_modules=["q_proj"]),
    "ia3": lambda: IA3Config(target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False),
    "loha": lambda: LoHaConfig(r=2, target_modules=["q_proj"], init_weights=False),
    "vera": lambda: VeraConfig(r=2, target_modules=["q_proj"]),
    "prompt": lambda: PromptTuningConfig(num_virtual_tokens=2, **_CAUSAL),
    "prefix": lambda: PrefixTuningConfig(num_virtual_tokens=2, **_CAUSAL),
}


def make(config: Any, seed: int = 0, *, is_tied: bool = False) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    base = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, tie_word_embeddings=is_tied))
    torch.manual_seed(seed)
    return get_peft_model(base, config)


def load(model: Any, folder: Path, name: str = "default") -> None:
    with only_own_adapters(model):
        model.load_adapter(str(folder), name, is_trainable=True)


def load_later(model: Any, folder: Path) -> None:
    load_later_adapters(model, (), folder, step=4)


def change(folder: Path, edit: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    state = load_file(folder / _FILE)
    save_file(edit(state) or state, folder / _FILE, metadata={"format": "pt"})


_ATTACKS: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "an embedding": lambda state: state.update(
        {"base_model.model.model.embed_tokens.weight": torch.full((32, 16), 777.0)}
    ),
    "a weight below the adapter": lambda state: state.update(
        {"base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight": torch.full((16, 16), 777.0)}
    ),
    "another weight": lambda state: state.update({"base_model.model.model.norm.weight": torch.full((16,), 777.0)}),
    "an unknown weight": lambda state: state.update({"x": torch.zeros(1)}),
    "only an unknown weight": lambda _: {"x": torch.zeros(1)},
    "one weight less": lambda state: {name: state[name] for name in list(state)[1:]},
    "another shape": lambda state: state.update({"base_model.model.model.norm.weight": torch.ones(17)}),
}


@pytest.mark.parametrize("kind", [load, load_later])
@pytest.mark.parametrize("attack", _ATTACKS)
def test_other_weights(attack: str, kind: Callable[..., None], tmp_path: Path) -> None:
    make(LoraConfig(**_LORA)).save_pretrained(tmp_path)
    change(tmp_path, _ATTACKS[attack])
    model = make(LoraConfig(**_LORA), 1)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(ConflictError, match=r"the file of the adapter in .* (lacks|has) the weight"):
        kind(model, tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_module_to_save_is_missing(tmp_path: Path) -> None:
    make(_CONFIGS["modules to save"]()).save_pretrained(tmp_path)
    change(tmp_path, lambda state: {name: state[name] for name in state if "lm_head" not in name})
    with pytest.raises(ConflictError, match=r"lacks the weight .*lm_head"):
        load(make(_CONFIGS["modules to save"]()), tmp_path)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", [load, load_later])
@pytest.mark.parametrize("config", _CONFIGS)
def test_what_peft_saves(config: str, kind: Callable[..., None], tmp_path: Path, *, is_tied: bool) -> None:
    before, after = (make(_CONFIGS[config](), seed, is_tied=is_tied) for seed in (1, 2))
    before.save_pretrained(tmp_path)
    kind(after, tmp_path)
    expected = before.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in after.state_dict().items())


def test_frozen_weights_that_are_equal(tmp_path: Path) -> None:
    """A program may save the embeddings with the adapter. They are the embeddings of this model."""
    before, after = make(LoraConfig(**_LORA), 1), make(LoraConfig(**_LORA), 2)
    before.save_pretrained(tmp_path, save_embedding_layers=True)
    assert any("embed_tokens" in name for name in load_file(tmp_path / _FILE))
    load(after, tmp_path)
    expected = before.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in after.state_dict().items())


def test_a_resized_vocabulary(tmp_path: Path) -> None:
    """PEFT then saves the embeddings. New rows may have other values in each start, so the file decides."""
    origin = tmp_path / "origin"
    make(LoraConfig(**_LORA)).get_base_model().config.save_pretrained(origin)
    models: list[Any] = []
    for seed in (1, 2):
        model = make(LoraConfig(**_LORA), seed)
        model.peft_config["default"].base_model_name_or_path = str(origin)
        model.get_base_model().resize_token_embeddings(40, mean_resizing=False)
        models.append(model)
    before, after = models
    before.save_pretrained(tmp_path)
    load(after, tmp_path)
    name = "base_model.model.model.embed_tokens.weight"
    assert torch.equal(before.state_dict()[name], after.state_dict()[name])


def test_several_adapters(tmp_path: Path) -> None:
    models = [make(LoraConfig(**_LORA), seed) for seed in (1, 2)]
    for model in models:
        model.add_adapter("teacher", LoraConfig(**{**_LORA, "target_modules": ["k_proj"]}))
    before, after = models
    before.save_pretrained(tmp_path)
    load(after, tmp_path)
    load(after, tmp_path / "teacher", "teacher")
    expected = before.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in after.state_dict().items())


def test_a_model_without_adapters() -> None:
    with only_own_adapters(SimpleNamespace()):
        pass
