"""Metadata of DCP that list a part of a tensor many times, or not at all.

DCP reads a part as often as the metadata list it: some megabytes of metadata can keep a start busy for days. If a
part is missing, DCP leaves the tensor as it is, and the training would continue with initial weights.
"""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from safepoint.errors import CheckpointError
from safepoint.training.state.data_only import only_data

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def _again(of: TensorStorageMetadata, _: Any) -> None:
    of.chunks *= 40


def _at_one_place(of: TensorStorageMetadata, found: Any) -> None:
    place = next(iter(found.storage_data.values()))
    of.chunks = [ChunkStorageMetadata(torch.Size([one]), torch.Size([1])) for one in range(64)]
    for one in range(64):
        found.storage_data[MetadataIndex("weight", torch.Size([one]))] = place


def _none(of: TensorStorageMetadata, _: Any) -> None:
    of.chunks = []


def _a_piece(of: TensorStorageMetadata, _: Any) -> None:
    of.chunks[0].sizes = torch.Size([63])


def _of_another_kind(of: TensorStorageMetadata, _: Any) -> None:
    of.chunks[0].sizes = ([0] * 8, 8)  # pyright: ignore[reportAttributeAccessIssue]


def _below_zero(of: TensorStorageMetadata, _: Any) -> None:
    of.chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([-64])), *of.chunks, *of.chunks]


def _load(folder: Path) -> torch.Tensor:
    state = {"weight": torch.zeros(64)}
    with only_data(folder):
        load(state, checkpoint_id=str(folder))
    return state["weight"]


@pytest.mark.parametrize("change", [_again, _at_one_place, _none, _a_piece, _of_another_kind, _below_zero])
def test_it_is_refused(change: Callable[[TensorStorageMetadata, Any], None], tmp_path: Path) -> None:
    save({"weight": torch.ones(64)}, checkpoint_id=str(tmp_path))
    assert _load(tmp_path).sum() == 64
    path = tmp_path / ".metadata"
    found = copy.deepcopy(pickle.loads(path.read_bytes()))
    change(found.state_dict_metadata["weight"], found)
    path.write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match="was not loaded"):
        _load(tmp_path)


def test_empty_tensors_and_single_numbers(tmp_path: Path) -> None:
    saved = {"empty": torch.ones(0, 3), "one": torch.tensor(2.0), "text": "a"}
    save(saved, checkpoint_id=str(tmp_path))
    state = {"empty": torch.zeros(0, 3), "one": torch.tensor(0.0), "text": ""}
    with only_data(tmp_path):
        load(state, checkpoint_id=str(tmp_path))
    assert (state["one"], state["text"]) == (2.0, "a")
