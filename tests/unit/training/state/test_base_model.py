"""What a checkpoint of adapters says of the model below them."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from safepoint.errors import ConflictError
from safepoint.training.state.base_model import base_entries, base_of, check_base, plain_key


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs))


def adapted(change: Callable[[Layers], None] = lambda _: None, *, seed: int = 0, rank: int = 2) -> Any:
    model = Layers()
    with torch.no_grad():
        change(model)
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=rank, target_modules=["first"]))


def test_a_model_without_adapters_has_no_base() -> None:
    """It is in the checkpoint itself."""
    assert base_of(Layers(), num_ranks=1) is None


def test_the_same_weights_are_the_same_base() -> None:
    """Whatever the adapters are, and however far they have been trained."""
    base = base_of(adapted(), num_ranks=1)
    assert base == base_of(adapted(seed=5, rank=3), num_ranks=2)
    check_base(base, base, step=3)


CHANGES: dict[str, Callable[[Layers], None]] = {
    "one bit": lambda model: model.second.weight.view(-1)[7].add_(1e-6),
    "another type": lambda model: model.second.to(torch.bfloat16),  # type: ignore[return-value]
    "two weights exchanged": lambda model: model.first.bias[:2].copy_(model.first.bias[:2].flip(0)),
    "below the adapters": lambda model: model.first.weight[0, 0].mul_(2),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_other_weights_are_refused(change: str) -> None:
    """With both called by their names."""
    saved, now = base_of(adapted(), num_ranks=1), base_of(adapted(CHANGES[change]), num_ranks=1)
    assert saved is not None
    with pytest.raises(ConflictError, match="the weights differ; training was not started"):
        check_base({**saved, "name": "acme/base", "revision": "0123456789abcdef"}, now, step=3)


def test_adapters_and_whole_models_are_not_exchanged() -> None:
    """In either direction."""
    base = base_of(adapted(), num_ranks=1)
    with pytest.raises(ConflictError, match="the checkpoint of step 3 holds adapters, this run trains the whole"):
        check_base(base, None, step=3)
    with pytest.raises(ConflictError, match="this run trains adapters, the checkpoint of step 3 has none"):
        check_base(None, base, step=3)
    check_base(None, None, step=3)


def test_a_frozen_adapter_is_no_base() -> None:
    """The reference of DPO is a second adapter, and the checkpoint holds it."""
    bases: list[dict[str, str] | None] = []
    for seed in (0, 1):
        model = adapted(seed=seed)
        model.add_adapter("ref", model.peft_config["default"])
        assert any(".ref." in name and not one.requires_grad for name, one in model.named_parameters())
        bases.append(base_of(model, num_ranks=1))
    assert bases[0] == bases[1] == base_of(adapted(), num_ranks=1)


def test_a_weight_made_of_others_is_read() -> None:
    """Quantized weights of torchao are such."""
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")

    def base(change: float) -> dict[str, str] | None:
        def make(model: Layers) -> None:
            weight = model.second.weight.detach()
            parts = two_tensor.TwoTensor(weight.clone(), weight + change)
            model.second.weight = torch.nn.Parameter(parts, requires_grad=False)

        return base_of(adapted(make), num_ranks=1)

    assert base(0.5) == base(0.5) != base(0.25)


def test_what_a_checkpoint_of_adapters_need_not_hold() -> None:
    """Frozen weights and nothing else: neither statistics, nor a second adapter, nor a module trained as a whole."""
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model: Any = get_peft_model(layers, LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"]))
    model.add_adapter("ref", LoraConfig(r=2, target_modules=["0"]))
    left = base_entries(model)
    held = {key for key in model.state_dict() if plain_key(key) not in left}
    inner = "base_model.model."
    assert left == {
        *(f"{inner}0.base_layer.{name}" for name in ("weight", "bias")),
        *(f"{inner}1.{name}" for name in ("weight", "bias")),
        *(f"{inner}2.original_module.{name}" for name in ("weight", "bias")),
    }
    assert held == {
        *(f"{inner}0.lora_{letter}.{adapter}.weight" for letter in "AB" for adapter in ("default", "ref")),
        *(f"{inner}1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
        *(f"{inner}2.modules_to_save.default.{name}" for name in ("weight", "bias")),
    }


def test_wrappers_do_not_hide_the_base() -> None:
    """torch.compile puts a word of its own into the keys."""
    model = adapted()
    plain = base_entries(model)
    model.base_model.model.second = torch.compile(model.base_model.model.second, backend="eager")
    assert any("_orig_mod" in key for key in model.state_dict())
    assert base_entries(model) == plain


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("is_resized", [False, True])
def test_embeddings_that_were_resized_are_held(is_resized: bool, tmp_path: Path) -> None:
    """Their new rows are random in each start; usual ones are the base's."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(2)
    config = transformers.Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    inner = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path)
    if is_resized:
        inner.resize_token_embeddings(40)
    model: Any = get_peft_model(inner, LoraConfig(r=2, target_modules=["q_proj"]))
    held = {key for key in model.state_dict() if plain_key(key) not in base_entries(model)}
    embeddings = {key for key in held if "lora_" not in key}
    names = {f"base_model.model.{name}.weight" for name in ("model.embed_tokens", "lm_head")}
    assert embeddings == (names if is_resized else set())


def quantized(bitsandbytes: Any, kind: str, change: Callable[[Any], None] = lambda _: None) -> Any:
    """A model with adapters whose first layer is quantized, after `change` of that layer."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1 + number, parameter.numel()).view_as(parameter))
    layer = (
        bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
        if kind == "8 bits"
        else bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4", compress_statistics=kind == "4 bits, nested")
    )
    layer.load_state_dict(model[0].state_dict())
    model[0] = layer.to("cpu")  # this is what quantizes
    assert model[0].weight.dtype in {torch.int8, torch.uint8}
    change(model[0])
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["0"]))


def _another_code(layer: Any) -> None:
    layer.weight.data.view(-1)[7] += 1


def _another_scale(layer: Any) -> None:
    if hasattr(layer.weight, "SCB"):
        layer.weight.SCB[3] *= 2
    else:
        layer.weight.quant_state.absmax[3] += 1


def _another_type(layer: Any) -> None:
    layer.weight.quant_state.dtype = torch.float16


@pytest.mark.long
@pytest.mark.parametrize("kind", ["4 bits", "4 bits, nested", "8 bits"])
def test_a_quantized_weight_is_its_codes_and_its_scales(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of either that differs is another base."""
    folder = Path(sys.prefix) / "bitsandbytes"
    if not folder.is_dir():
        pytest.skip(f"bitsandbytes is not in {folder}: run `make venv`")
    monkeypatch.syspath_prepend(folder)
    bitsandbytes = importlib.import_module("bitsandbytes")
    base = base_of(quantized(bitsandbytes, kind), num_ranks=1)
    assert base == base_of(quantized(bitsandbytes, kind), num_ranks=1)
    changes = [_another_code, _another_scale, *([] if kind == "8 bits" else [_another_type])]
    assert all(base_of(quantized(bitsandbytes, kind, change), num_ranks=1) != base for change in changes)
    model = quantized(bitsandbytes, kind)
    assert {plain_key(key) for key in model.state_dict()} - base_entries(model) == {
        f"base_model.model.0.lora_{letter}.default.weight" for letter in "AB"
    }, "scales are the base's, too"
