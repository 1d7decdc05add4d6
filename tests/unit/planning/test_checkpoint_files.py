"""Single files of a checkpoint: what is computed is what the modules of a save write, for a model of many tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import Qwen2Config, Qwen2ForCausalLM

from safepoint.estimates.sizes import OPTIMIZERS, Strategy
from safepoint.planning.checkpoint_files import (
    Group,
    Training,
    archive_bytes,
    checkpoint_bytes,
    files_of,
    weights_file_bytes,
)
from safepoint.planning.model import of_config
from safepoint.snapshot.images.capture import Capture
from safepoint.snapshot.images.torch_image import TorchImages

_FIELDS: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _training(strategy: Strategy, num_ranks: int = 1, **more: Any) -> Training:
    model = of_config({"model_type": "qwen2", **_FIELDS}, name="m", where="config.json")
    values = {"dtype": "float32", "adapter": (), "optimizer": OPTIMIZERS["adamw"], **more}
    return Training(tensors=model.tensors, strategy=strategy, num_ranks=num_ranks, **values)


def _named(groups: list[Group], path: str) -> int:
    return sum(group.total_bytes for group in groups if group.path == path)


@pytest.fixture(scope="module")
def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = Qwen2ForCausalLM(Qwen2Config(**_FIELDS))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def test_the_file_of_an_optimizer(trained: tuple[torch.nn.Module, torch.optim.Optimizer]) -> None:
    real = TorchImages("optimizer.pt").compose(trained[1].state_dict()).size_bytes
    assert _named(files_of(_training(Strategy.DDP, 2)), "optimizer.pt") == pytest.approx(real, rel=0.002)


def test_the_file_of_a_whole_state_dict(trained: tuple[torch.nn.Module, torch.optim.Optimizer]) -> None:
    real = TorchImages("pytorch_model_fsdp.bin").compose(dict(trained[0].state_dict())).size_bytes
    planned = _named(files_of(_training(Strategy.FSDP_FULL, 2)), "pytorch_model_fsdp.bin")
    assert planned == pytest.approx(real, rel=0.002)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_files_of_dcp(trained: tuple[torch.nn.Module, torch.optim.Optimizer], tmp_path: Path) -> None:
    """Written by one process, so that each tensor is one shard."""
    state = {"model": dict(trained[0].state_dict())}  # as Accelerate passes it
    capture = Capture()
    with capture.below(tmp_path) as found:
        dcp.save(
            state, storage_writer=dcp.FileSystemWriter(tmp_path / "pytorch_model_fsdp_0", single_file_per_rank=True)
        )
    real = {image.path: image.size_bytes for image in capture.collect(found)}
    groups = files_of(_training(Strategy.FSDP))
    data = _named(groups, "pytorch_model_fsdp_0/__*_0.distcp")
    assert data == pytest.approx(real["pytorch_model_fsdp_0/__0_0.distcp"], rel=0.002)
    metadata = _named(groups, "pytorch_model_fsdp_0/.metadata")
    assert metadata == pytest.approx(real["pytorch_model_fsdp_0/.metadata"], rel=0.25)


def test_records_of_4_gib_and_more() -> None:
    """Their headers and directory are wider; the data are all there."""
    for size in ((1 << 32) - 1, 1 << 32, 1 << 40):
        assert size < archive_bytes("archive", [size], 100) < size + 1500


def test_a_large_model_has_several_files() -> None:
    """Transformers begins a new file after 50 GB; the headers of all of them, and the index, are small."""
    model = of_config(
        {"model_type": "llama", **_FIELDS, "hidden_size": 32_768, "intermediate_size": 131_072}, name="m", where="c"
    )
    data = 4 * model.num_parameters
    assert data > 150 * 10**9
    assert data < weights_file_bytes(model.tensors, "float32") < data + 100_000


@pytest.mark.parametrize("strategy", [one for one in Strategy if one is not Strategy.SINGLE])
def test_ranks_share_and_never_lose(strategy: Strategy) -> None:
    """More ranks write more small files; what they share stays the same, but for paddings."""
    sizes = [checkpoint_bytes(files_of(_training(strategy, count))) for count in (2, 4, 64)]
    assert sizes == sorted(sizes)


def test_mixed_precision_changes_what_is_trained_in_32_bits() -> None:
    """FSDP holds weights in 32 bits then; ZeRO computes in 16 beside them; DDP keeps the type of the model."""

    def size(strategy: Strategy, **more: Any) -> int:
        groups = files_of(_training(strategy, 2, **more))
        return sum(group.total_bytes for group in groups if group.what != "other")

    half = {"dtype": "bfloat16"}
    assert size(Strategy.DDP, **half) == size(Strategy.DDP, **half, is_mixed=True)
    assert size(Strategy.FSDP, **half, is_mixed=True) == size(Strategy.FSDP) > 1.5 * size(Strategy.FSDP, **half)
    assert size(Strategy.ZERO2, is_mixed=True) == size(Strategy.ZERO2, **half) < size(Strategy.ZERO2)
