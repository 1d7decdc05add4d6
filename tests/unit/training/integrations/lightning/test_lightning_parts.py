"""What reading Lightning's file may do: make tensors and plain values, and nothing else unless the script says so."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.errors import CheckpointError

pytest.importorskip("lightning.pytorch")
from safepoint.training.integrations.lightning.lightning_parts import DirectCheckpointIO


class Hostile:
    """Makes a folder as soon as it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("weights_only", [None, True])
def test_a_hostile_file_is_refused(weights_only: bool | None, tmp_path: Path) -> None:
    """Nothing of it is run, and the message names what to set."""
    path = tmp_path / "checkpoint-3" / "lightning.ckpt"
    DirectCheckpointIO().save_checkpoint({"hyper_parameters": Hostile(tmp_path / "ran")}, path)
    with pytest.raises(CheckpointError, match="checkpoint-3 was not loaded") as caught:
        DirectCheckpointIO().load_checkpoint(path, weights_only=weights_only)
    assert "weights_only=False" in str(caught.value.hint)
    assert not (tmp_path / "ran").exists()


def test_objects_that_the_script_trusts(tmp_path: Path) -> None:
    """They are made."""
    path = tmp_path / "lightning.ckpt"
    DirectCheckpointIO().save_checkpoint({"hyper_parameters": Path("data")}, path)
    assert DirectCheckpointIO().load_checkpoint(path, weights_only=False) == {"hyper_parameters": Path("data")}


@pytest.mark.parametrize("weights_only", [None, True, False])
def test_plain_state(weights_only: bool | None, tmp_path: Path) -> None:
    """Tensors and plain values are always read."""
    path = tmp_path / "lightning.ckpt"
    DirectCheckpointIO().save_checkpoint({"state_dict": {"w": torch.arange(3)}, "epoch": 2}, path)
    state = DirectCheckpointIO().load_checkpoint(path, weights_only=weights_only)
    assert torch.equal(state["state_dict"]["w"], torch.arange(3))
    assert state["epoch"] == 2
