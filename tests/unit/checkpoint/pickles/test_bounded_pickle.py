"""The limits of pickles rise with the size of the pickle: they refuse no metadata that torch writes, of any size.

The tests lower the fixed limits, so that small metadata reach them. Metadata with a million parts take minutes.
"""

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from safepoint.checkpoint.pickles import bounded_pickle
from safepoint.checkpoint.weights import budget
from safepoint.checkpoint.weights.torch_file import Inert, read_inert
from safepoint.errors import CheckpointError
from safepoint.training.state import dcp_parts
from safepoint.training.state.data_only import load_data, only_data
from tests.attacks.test_calls_of_pickles import write

_NUM_TENSORS, _NUM_RANKS = 20, 64


def _metadata() -> Metadata:
    """As DCP writes them for tensors that are sharded across ranks."""
    described, stored = {}, {}
    for number in range(_NUM_TENSORS):
        name = f"model.layers.{number}.self_attn.q_proj.weight"
        offsets = [torch.Size([16 * rank, 0]) for rank in range(_NUM_RANKS)]
        described[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=torch.bfloat16),
            size=torch.Size([16 * _NUM_RANKS, 16384]),
            chunks=[ChunkStorageMetadata(offsets=one, sizes=torch.Size([16, 16384])) for one in offsets],
        )
        for rank, one in enumerate(offsets):
            place = _StorageInfo(f"__{rank}_0.distcp", number * 600_000, 525_000)
            stored[MetadataIndex(name, one, rank)] = place
    return Metadata(
        state_dict_metadata=described, planner_data={name: (name,) for name in described}, storage_data=stored
    )


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_pickle, "_MAX_INSTRUCTIONS", 1000)
    monkeypatch.setattr(bounded_pickle, "_MAX_VALUES_IN_KEYS", 100)
    monkeypatch.setattr(dcp_parts, "_MOST_PARTS", 100)


def test_metadata_of_dcp_are_read(tmp_path: Path) -> None:
    """They have many more instructions, keys and parts than the fixed limits."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_metadata()))
    with only_data(tmp_path):
        found = FileSystemReader(tmp_path).read_metadata()
    assert found.state_dict_metadata == _metadata().state_dict_metadata
    assert found.storage_data == _metadata().storage_data


def test_tools_read_metadata_of_dcp() -> None:
    """The tools load no class of torch."""
    found = read_inert(pickle.dumps(_metadata()))
    assert isinstance(found, Inert)
    assert len(found.get("storage_data")) == _NUM_TENSORS * _NUM_RANKS


def test_states_of_torch_are_read(tmp_path: Path) -> None:
    """A state with many numbers, for example the order of the samples."""
    order = [*range(2000)]
    torch.save(order, tmp_path / "state.pt")
    assert load_data(tmp_path / "state.pt") == order


@pytest.mark.parametrize("cost", [budget.Cost.CHUNKS, budget.Cost.PLACES])
def test_a_large_checkpoint_has_many_parts(cost: budget.Cost) -> None:
    """4 TB in five million parts. Without the size of the files, the fixed limit counts."""
    budget.Budget(4_000_000_000_000).spend(cost, 5_000_000)
    with pytest.raises(CheckpointError):
        budget.Budget().spend(cost, 5_000_000)


@pytest.mark.parametrize("code", [pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.NONE])
def test_an_object_for_every_byte_is_refused(code: bytes, tmp_path: Path) -> None:
    """torch writes no such pickle, and the objects take up to a hundred times the memory of the file."""
    hostile = code * 5000 + pickle.NONE + pickle.STOP
    (tmp_path / ".metadata").write_bytes(hostile)
    with pytest.raises(CheckpointError, match="instructions"), only_data(tmp_path):
        FileSystemReader(tmp_path).read_metadata()
    with pytest.raises(CheckpointError, match="instructions"):
        read_inert(hostile)
    with pytest.raises(CheckpointError) as caught:
        load_data(write(tmp_path / "state.pt", code * 5000 + pickle.NONE))
    assert "instructions" in str(caught.value.__cause__)
