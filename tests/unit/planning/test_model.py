"""A model from a folder, from a configuration, or from a number of parameters; and its adapters."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from safepoint.errors import UsageError
from safepoint.estimates.sizes import OPTIMIZERS, Strategy
from safepoint.planning.architectures.fields import Tensor
from safepoint.planning.checkpoint_files import Training, adapter_file_bytes, weights_file_bytes
from safepoint.planning.model import adapter_of, dtype_of, of_config, of_count, read_model, short_count

_QWEN: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1_000_000, 10**12))
def test_a_number_of_parameters_is_exact(count: int) -> None:
    """The tensors have so many elements, and none of them is empty."""
    model = of_count(count)
    assert model.num_parameters == count
    assert all(size > 0 for one in model.tensors for size in one.sizes)
    assert not model.is_exact


@pytest.mark.parametrize("count", [0, -8, 9_999, 10**16])
def test_absurd_numbers_are_refused(count: int) -> None:
    with pytest.raises(UsageError, match="--params"):
        of_count(count)


def test_contradicting_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="is too little for 80 layers of width 8192"):
        of_count(1_000_000_000, layers=80, hidden=8192)


def test_a_model_of_several_files(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(4, 8, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors")
    save_file({"b.weight": torch.zeros(3), "c.weight": torch.zeros(2)}, tmp_path / "model-2.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("x" * 1000)
    model = read_model(tmp_path)
    assert {one.name: one.sizes for one in model.tensors} == {"a.weight": (4, 8), "b.weight": (3,), "c.weight": (2,)}
    assert (model.dtype, model.tokenizer_bytes, model.family) == ("bfloat16", 1000, None)
    assert model.is_exact


def test_weights_that_are_there_twice_count_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    save_file({"a.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    save_file({"the_same": torch.zeros(4, 8)}, tmp_path / "consolidated.safetensors")
    assert read_model(tmp_path).num_parameters == 32


def test_a_folder_with_a_part_of_the_model_is_refused(tmp_path: Path) -> None:
    """Its plan would be that of a smaller model."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    parts = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    for name in parts:
        save_file({name: torch.zeros(4, 8)}, tmp_path / name)
    assert read_model(tmp_path).num_parameters == 64
    (tmp_path / parts[0]).unlink()
    with pytest.raises(UsageError, match="holds 1 of 2 safetensors files"):
        read_model(tmp_path)
    (tmp_path / parts[1]).rename(tmp_path / "model-a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-a.safetensors", "b": "model-b.safetensors"}}))
    with pytest.raises(UsageError, match=r"'model-b.safetensors' is missing"):
        read_model(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": 1}}))
    with pytest.raises(UsageError, match="is damaged"):
        read_model(tmp_path)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.zeros(400)}, path)
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(UsageError, match="is cut off"):
        read_model(tmp_path)


def test_the_files_are_those_of_from_pretrained(tmp_path: Path) -> None:
    """Neither an adapter beside the model counts, nor the parts of a model that is there as a whole."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **_QWEN}))
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"a.weight": torch.zeros(4, 8)}, tmp_path / "adapter_model.safetensors")
    assert read_model(tmp_path).num_parameters > 32
    save_file({"b.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    save_file({"c.weight": torch.zeros(4, 8)}, tmp_path / "model.fp16.safetensors")
    assert read_model(tmp_path).num_parameters == 32


def test_quantized_configurations_are_known(tmp_path: Path) -> None:
    config = {"model_type": "qwen2", **_QWEN, "quantization_config": {"load_in_4bit": True}}
    assert of_config(config, name="m", where="config.json").is_quantized
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="the model is quantized"):
        read_model(tmp_path)


@pytest.mark.parametrize(("kind", "text"), [("gemma3", "gemma3_text"), ("mistral3", "ministral3")])
def test_a_model_of_several_parts_names_its_text_model(kind: str, text: str) -> None:
    with pytest.raises(UsageError, match="a model of several parts") as raised:
        of_config({"model_type": kind, "text_config": {"model_type": text}}, name="m", where="config.json")
    assert f"text_config ({text})" in (raised.value.hint or "")
    assert "did you mean" not in (raised.value.hint or "")


def test_adapters_and_quantized_models_are_refused(tmp_path: Path) -> None:
    """With what to pass in their place."""
    save_file({"a.weight": torch.zeros(400, dtype=torch.uint8), "b": torch.zeros(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UsageError, match="the model is quantized"):
        read_model(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="holds no model") as raised:
        read_model(tmp_path)
    assert "its base model" in (raised.value.hint or "")


def test_a_model_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    """Whose files are links."""
    (tmp_path / "blobs").mkdir()
    save_file({"a.weight": torch.zeros(4, 8)}, tmp_path / "blobs" / "1")
    (tmp_path / "blobs" / "2").write_text(json.dumps({"model_type": "qwen2"}))
    folder = tmp_path / "snapshots"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to("../blobs/1")
    (folder / "config.json").symlink_to("../blobs/2")
    (tmp_path / "blobs" / "3").write_text("x" * 1000)
    (folder / "tokenizer.json").symlink_to("../blobs/3")
    model = read_model(folder)
    assert (model.family, model.num_parameters) == ("qwen2", 32)
    assert model.stored_bytes == (tmp_path / "blobs" / "1").stat().st_size
    assert model.tokenizer_bytes == 1000


def test_types_as_people_write_them() -> None:
    assert {dtype_of(text) for text in ("bf16", "BFloat16", "torch.bfloat16", " bf16 ")} == {"bfloat16"}
    for text in ("int4", "int8", "fp8", "float64", "", "bf", "float128", "x" * 5000):
        with pytest.raises(UsageError, match="--dtype"):
            dtype_of(text)


def test_short_counts() -> None:
    assert [short_count(one) for one in (8_030_261_248, 350_000_000, 999, 12_000)] == ["8.03B", "350M", "999", "12k"]
    borders = {999_499: "999k", 999_500: "1M", 999_600_000: "1B", 999_600_000_000: "1T", 10**15: "1000T", 1000: "1k"}
    assert {one: short_count(one) for one in borders} == borders


# ---- adapters ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own
@pytest.mark.parametrize("targets", [(), ("q_proj", "k_proj", "down_proj"), ("all-linear",)])
def test_an_adapter_is_that_of_peft(targets: tuple[str, ...], tmp_path: Path) -> None:
    """Names, shapes and the size of the file."""
    config = Qwen2Config(**_QWEN)
    names: Any = "all-linear" if targets == ("all-linear",) else list(targets) or None
    peft = get_peft_model(Qwen2ForCausalLM(config), LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM"))
    peft.save_pretrained(tmp_path)
    model = of_config({"model_type": "qwen2", **_QWEN}, name="m", where="config.json")
    adapter = adapter_of(model, rank=4, targets=targets)
    theirs = {
        name.replace(".default.", "."): tuple(value.shape)
        for name, value in peft.named_parameters()
        if "lora" in name
    }
    assert {one.name: one.sizes for one in adapter} == theirs
    assert weights_file_bytes(adapter, "float32") == (tmp_path / "adapter_model.safetensors").stat().st_size


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.parametrize("targets", [("embed_tokens",), ("q_proj", "lm_head"), ("embed_tokens", "lm_head")])
def test_peft_saves_the_embeddings_that_it_adapts(targets: tuple[str, ...], tmp_path: Path) -> None:
    """The whole weights, in their own type, beside the adapter."""
    base = Qwen2ForCausalLM(Qwen2Config(**_QWEN)).bfloat16()
    peft = get_peft_model(base, LoraConfig(r=4, target_modules=list(targets), task_type="CAUSAL_LM"))
    peft.save_pretrained(tmp_path)
    model = of_config({"model_type": "qwen2", **_QWEN}, name="m", where="config.json")
    training = Training(
        tensors=model.tensors,
        dtype="bfloat16",
        adapter=adapter_of(model, rank=4, targets=targets),
        strategy=Strategy.SINGLE,
        optimizer=OPTIMIZERS["adamw"],
        num_ranks=1,
    )
    theirs = (tmp_path / "adapter_model.safetensors").stat().st_size
    assert abs(adapter_file_bytes(training) - theirs) <= 64  # the order of the header differs


def test_missing_modules_are_named() -> None:
    model = of_config({"model_type": "qwen2", **_QWEN}, name="m", where="config.json")
    with pytest.raises(UsageError, match="--lora-targets nowhere") as raised:
        adapter_of(model, rank=4, targets=["q_proj", "nowhere"])
    assert "down_proj" in (raised.value.hint or "")
    phi = of_config({"model_type": "phi3", **_QWEN}, name="m", where="config.json")
    with pytest.raises(UsageError, match="PEFT has no default modules for phi3"):
        adapter_of(phi, rank=4, targets=[])


def test_experts_are_one_tensor_and_saved_one_by_one() -> None:
    one = Tensor("experts.gate_up_proj", (4, 96, 64), 8)
    size = weights_file_bytes([one], "float32")
    assert size > math.prod(one.sizes) * 4 + 8 * 60


# ---- files that are no models --------------------------------------------------------------------------------------


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no model"):
        read_model(tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_model(tmp_path / "gone")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unknown-kind"}))
    with pytest.raises(UsageError, match="unknown-kind"):
        read_model(tmp_path)


def test_only_files_of_the_tokenizer_count(tmp_path: Path) -> None:
    """Data, logs and configurations beside a model are no part of a checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **_QWEN}))
    for name in ("train.jsonl", "notes.txt", "generation_config.json", "trainer_state.json", "data.parquet"):
        (tmp_path / name).write_bytes(bytes(10_000))
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "merges.txt", "spiece.model"):
        (tmp_path / name).write_bytes(bytes(100))
    assert read_model(tmp_path).tokenizer_bytes == 500
