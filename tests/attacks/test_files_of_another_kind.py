"""Checkpoints with a folder in the place of a file, or with tensors that cannot be copied into a module.

The checkpoint is damaged, so a run ends with exit code 14. A model that differs from the script's is a conflict.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.checkpoint.pickles.loading import states_of
from safepoint.errors import CheckpointError, ConflictError, ExitCode
from safepoint.foundation.environment import Place
from safepoint.snapshot.checkpointer import load_state
from safepoint.training.plain.state.parts import NamedParts
from safepoint.training.state.data_only import load_data, only_data


def _into_checkpointer(folder: Path, module: torch.nn.Module) -> None:
    load_state(folder, {"model": module})


def _into_session(folder: Path, module: torch.nn.Module) -> None:
    NamedParts({"model": module}, Place.from_environment({})).load(folder)


def _by_framework(folder: Path, module: torch.nn.Module) -> None:
    with only_data(folder):
        module.load_state_dict(torch.load(folder / "model.pt", weights_only=True))


def _into_lightning(folder: Path, module: torch.nn.Module) -> None:
    pytest.importorskip("lightning")
    from safepoint.training.integrations.lightning.lightning_parts import DirectCheckpointIO

    with states_of(folder):
        module.load_state_dict(DirectCheckpointIO(is_mapped=False).load_checkpoint(folder / "model.pt"))


_WAYS: list[Callable[[Path, torch.nn.Module], None]] = [
    _into_checkpointer, _into_session, _by_framework, _into_lightning,
]  # fmt: skip


@pytest.mark.parametrize("way", _WAYS)
def test_a_folder_in_the_place_of_a_file(way: Any, tmp_path: Path) -> None:
    (tmp_path / "model.pt").mkdir()
    (tmp_path / "model.pt" / "x").write_text("x")
    with pytest.raises(CheckpointError, match="was not loaded: it is damaged") as raised:
        way(tmp_path, torch.nn.Linear(2, 2))
    assert raised.value.exit_code == ExitCode.NOTHING_VALID


@pytest.mark.parametrize("way", _WAYS)
def test_weights_without_memory(way: Any, tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    torch.save({**module.state_dict(), "weight": torch.empty(2, 2, device="meta")}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="could not be loaded: RuntimeError: Error") as raised:
        way(tmp_path, module)
    assert raised.value.exit_code == ExitCode.NOTHING_VALID


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("change", [{"weight": torch.ones(3, 3)}, {"other": torch.ones(1)}])
def test_a_model_that_differs(change: dict[str, torch.Tensor], way: Any, tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    torch.save({**module.state_dict(), **change}, tmp_path / "model.pt")
    with pytest.raises(ConflictError, match=r"differs from this script's: .*(weight|other)"):
        way(tmp_path, module)


def test_a_damaged_file_of_lightning(tmp_path: Path) -> None:
    """It is no invalid option."""
    (tmp_path / "model.pt").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="was not loaded") as raised:
        _into_lightning(tmp_path, torch.nn.Linear(2, 2))
    assert raised.value.exit_code == ExitCode.NOTHING_VALID


def test_a_folder_that_safepoint_reads(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it is a folder and not a file"):
        load_data(tmp_path)
