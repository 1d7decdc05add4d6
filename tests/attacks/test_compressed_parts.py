"""Metadata of torch.distributed.checkpoint (DCP) that names compressed parts: few bytes could become gigabytes."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from safepoint.checkpoint.foreign.contents import check_dcp
from safepoint.checkpoint.foreign.names import AllowedNames
from safepoint.checkpoint.weights.budget import Budget
from safepoint.checkpoint.weights.dcp_weights import dcp_weights
from safepoint.errors import CheckpointError
from safepoint.training.state.data_only import only_data

_DCP: Any = dcp


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _DCP.save({"model": {"w": torch.ones(4)}, "step": 4}, checkpoint_id=str(tmp_path))
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["stream.zstd/1"]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    return tmp_path


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_training(folder: Path) -> None:
    """The error is one of the checkpoint: DCP raises one that is no `Exception`."""
    with pytest.raises(CheckpointError, match="compressed"), only_data(folder):
        _DCP.load({"model": {"w": torch.zeros(4)}}, checkpoint_id=str(folder))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_export_and_an_examination(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="compressed"):
        dcp_weights(folder)
    with pytest.raises(CheckpointError, match="compressed"):
        check_dcp(folder, AllowedNames(), Budget(1 << 20))
