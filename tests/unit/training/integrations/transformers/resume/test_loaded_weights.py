"""Every weight of a checkpoint is loaded, or the start is refused."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from safepoint.errors import ConflictError
from safepoint.training.integrations.transformers.resume.loaded_model import complete_load, lost_weights

SHAPE: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def experts(seed: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    return Qwen3MoeForCausalLM(config).to(dtype)


def loaded_by_name(model: torch.nn.Module, folder: Path) -> list[str]:
    """As the Trainer does it; what it did not find."""
    return model.load_state_dict(load_file(folder / "model.safetensors"), strict=False).missing_keys


@pytest.mark.skipif(
    importlib.util.find_spec("transformers.conversion_mapping") is None,
    reason="transformers below 5.0 has one tensor for each expert in memory too",
)
@pytest.mark.parametrize("kinds", [("float32",), ("bfloat16",), ("bfloat16", "float32")])
def test_experts_that_are_saved_one_by_one_are_loaded(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Bit for bit, also where weights have several types."""
    dtype, *others = (getattr(torch, kind) for kind in kinds)
    saved, model = experts(1, dtype), experts(2, dtype)
    for one in (saved, model):
        one.model.layers[0].mlp.gate.to(others[0] if others else dtype)
    saved.save_pretrained(tmp_path)
    missing = loaded_by_name(model, tmp_path)
    assert lost_weights(model, missing), "transformers loads them itself now: this module is not needed any more"
    complete_load(model, missing, tmp_path, step=3)
    for (name, ours), theirs in zip(model.named_parameters(), saved.parameters(), strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("tied", [True, False])
def test_a_weight_with_another_name_is_refused(tied: bool, tmp_path: Path) -> None:
    """It is named; a second name of a weight that was found is no loss."""
    config = Qwen2Config(**SHAPE, tie_word_embeddings=tied)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    model = Qwen2ForCausalLM(config)
    missing = loaded_by_name(model, tmp_path)
    assert missing == (["lm_head.weight"] if tied else [])
    complete_load(model, missing, tmp_path, step=3)
    state = load_file(tmp_path / "model.safetensors")
    state["model.norm.scale"] = state.pop("model.norm.weight")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConflictError, match=r"step 3 lacks .* weight model\.norm\.weight.*; training was not started"
    ):
        complete_load(model, loaded_by_name(model, tmp_path), tmp_path, step=3)


def test_an_expert_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Where names are converted too."""
    experts(1).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state = {name: tensor for name, tensor in state.items() if "down_proj" not in name}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = experts(2)
    with pytest.raises(ConflictError, match=r"lacks the model.s weight .*down_proj"):
        complete_load(model, loaded_by_name(model, tmp_path), tmp_path, step=3)


def test_a_plain_module_is_refused_too(tmp_path: Path) -> None:
    """Buffers are not looked at: they come and go with releases."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    complete_load(model, ["1.running_mean"], tmp_path, step=3)
    with pytest.raises(ConflictError, match=r"lacks the model.s weight 0\.weight and 1 more"):
        complete_load(model, ["0.weight", "0.bias"], tmp_path, step=3)
