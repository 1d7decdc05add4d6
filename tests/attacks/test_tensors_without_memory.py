"""A checkpoint has tensors of the device `meta`, which have no values, where the script has tensors with values.

A training would keep them, and write them into all its next checkpoints.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.errors import CheckpointError
from safepoint.foundation.environment import Place
from safepoint.snapshot.checkpointer import load_state
from safepoint.training.plain.state.parts import NamedParts

_META = torch.ones(4, device="meta")
_STATES: dict[str, dict[str, Any]] = {
    "a value": {"ema": _META},
    "in a list": {"ema": [torch.ones(4), _META]},
    "in a tuple in a dictionary": {"ema": {"a": (1, _META)}},
    "a parameter": {"ema": torch.nn.Parameter(_META)},
}


class Part:
    """An object of the script that keeps what it loads."""

    def __init__(self, ema: Any) -> None:
        self.state: dict[str, Any] = {"ema": ema}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def in_a_dictionary(folder: Path, ema: Any) -> Any:
    values: dict[str, Any] = {"ema": ema}
    try:
        load_state(folder, {"part": values})
    finally:
        found = values["ema"]
    return found


def in_an_object(folder: Path, ema: Any) -> Any:
    part = Part(ema)
    load_state(folder, {"part": part})
    return part.state["ema"]


def in_a_session(folder: Path, ema: Any) -> Any:
    part = Part(ema)
    place = Place(rank=0, world_size=1, local_rank=0, local_world_size=1)
    NamedParts({"part": part}, place).load(folder)
    return part.state["ema"]


_WAYS = [in_a_dictionary, in_an_object, in_a_session]


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("state", _STATES)
def test_they_are_refused(state: str, way: Callable[[Path, Any], Any], tmp_path: Path) -> None:
    """The message names the file."""
    torch.save(_STATES[state], tmp_path / "part.pt")
    with pytest.raises(CheckpointError, match=r"part\.pt was not loaded: it has a tensor without memory"):
        way(tmp_path, torch.ones(4))


@pytest.mark.parametrize("way", _WAYS)
def test_those_of_the_script_are_loaded(way: Callable[[Path, Any], Any], tmp_path: Path) -> None:
    """A script may keep the shape of a tensor in this way."""
    torch.save({"ema": _META}, tmp_path / "part.pt")
    assert way(tmp_path, _META).is_meta


@pytest.mark.parametrize("way", _WAYS)
def test_usual_values_are_loaded(way: Callable[[Path, Any], Any], tmp_path: Path) -> None:
    torch.save({"ema": torch.full((4,), 2.0)}, tmp_path / "part.pt")
    assert way(tmp_path, torch.ones(4)).tolist() == [2.0] * 4
