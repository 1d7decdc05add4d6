"""States of schedulers with counts that no training has reached, and with values that a later step cannot use.

A function of the script computes with the count: `2 ** (count // 2)` would take days and fill the memory, in each
start of the run. With other values, each start would fail in a later step, with an error of torch that names no file.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from safepoint.checkpoint.pickles.scheduler_states import checked_schedulers
from safepoint.errors import CheckpointError
from safepoint.foundation.environment import Place
from safepoint.snapshot.checkpointer import load_state
from safepoint.training.plain.state.parts import NamedParts
from safepoint.training.state.data_only import only_data
from tests.support.checkpoints import commit, prepared

_STEP = 12
_META = torch.empty((), device="meta")


def _computed(count: int) -> float:
    """A function of a script, which a count without a limit would keep busy for days."""
    assert count < 1 << 40
    return 1.0 / 2 ** (count // 2)


_MAKE: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, _computed),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [5, 9]),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5, 2),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.LambdaLR(optimizer, _computed)], [5]
    ),
}
_PHASE = {"end_step": 1.0, "start_lr": "initial_lr", "end_lr": "x", "start_momentum": "m", "end_momentum": "m"}


def _scheduler(kind: str) -> Any:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    scheduler = _MAKE[kind](torch.optim.SGD([parameter], lr=0.1, momentum=0.9))
    for _ in range(_STEP):
        scheduler.optimizer.step()
        scheduler.step(*([1.0] if kind == "plateau" else []))
    return scheduler


def _load(way: str, folder: Path, scheduler: Any) -> None:
    if way == "a checkpointer":
        load_state(folder, {"scheduler": scheduler})
    elif way == "a session":
        NamedParts({"scheduler": scheduler}, Place.from_environment({})).load(folder)
    else:
        with only_data(folder, scheduler):
            scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))


@pytest.mark.parametrize("name", ["last_epoch", "_step_count"])
@pytest.mark.parametrize("kind", ["lambda", "sequence"])
@pytest.mark.parametrize("way", ["a checkpointer", "a session", "a framework"])
def test_counts_after_the_step_of_the_checkpoint(way: str, kind: str, name: str, tmp_path: Path) -> None:
    """The counts of a training are loaded."""
    scheduler = _scheduler(kind)
    for count in (_STEP, 10**12):
        state = scheduler.state_dict()
        (state["_schedulers"][1] if kind == "sequence" else state)[name] = count
        path = tmp_path / str(count)
        path.mkdir()
        torch.save(state, path / "scheduler.pt")
        folder = commit(prepared(path / "run"), _STEP, {0: {"scheduler.pt": (path / "scheduler.pt").read_bytes()}})
        if count == _STEP:
            _load(way, folder, _scheduler(kind))
        else:
            with pytest.raises(CheckpointError, match=f"'{name}' of its scheduler is larger than the step"):
                _load(way, folder, _scheduler(kind))


def test_a_checkpoint_without_a_manifest(tmp_path: Path) -> None:
    """Its name states its step."""
    scheduler = _scheduler("lambda")
    folder = tmp_path / f"checkpoint-{_STEP}"
    folder.mkdir()
    torch.save({**scheduler.state_dict(), "last_epoch": 10**12}, folder / "scheduler.pt")
    with pytest.raises(CheckpointError, match="'last_epoch' of its scheduler"):
        _load("a framework", folder, scheduler)


def test_a_count_for_which_the_function_fails() -> None:
    scheduler = _scheduler("lambda")
    state = {**scheduler.state_dict(), "last_epoch": 1 << 16}
    with (
        pytest.raises(CheckpointError, match="the script's function of the learning rate fails for step 65536"),
        checked_schedulers("scheduler.pt", scheduler),
    ):
        scheduler.load_state_dict(state)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("plateau", "best", _META), ("plateau", "best", torch.tensor(1j)), ("plateau", "best", float("nan")),
        ("plateau", "best", torch.tensor(1.0).to_sparse()), ("plateau", "num_bad_epochs", -(10**9)),
        ("plateau", "min_lrs", []), ("plateau", "patience", None), ("plateau", "factor", _META),
        ("steps", "milestones", {2: "x"}), ("steps", "milestones", {"x": 2}),
        ("steps", "milestones", Counter({2: 10**12})), ("steps", "milestones", {2: _META}),
        ("steps", "last_epoch", _META), ("steps", "last_epoch", float("inf")), ("steps", "last_epoch", None),
        ("cycle", "_schedule_phases", [{}]), ("cycle", "_schedule_phases", [{}, {}]),
        ("cycle", "_schedule_phases", [_PHASE, _PHASE]), ("cycle", "_schedule_phases", [5, 5]),
        ("cycle", "total_steps", 0),
        ("cyclic", "base_lrs", [_META]), ("cyclic", "max_lrs", []), ("cyclic", "total_size", 0.0),
        ("cyclic", "step_ratio", 0),
        ("restarts", "T_cur", _META), ("restarts", "T_i", 0), ("restarts", "T_mult", 0), ("restarts", "T_i", None),
        ("restarts", "T_mult", 10**200),
        ("sequence", "last_epoch", _META), ("sequence", "_milestones", []), ("sequence", "_milestones", [5, 6]),
    ],
)  # fmt: skip
def test_values_that_a_later_step_cannot_use(kind: str, name: str, value: Any) -> None:
    scheduler = _scheduler(kind)
    state = {**scheduler.state_dict(), name: value}
    with pytest.raises(CheckpointError, match=f"'{name}' of its scheduler"), checked_schedulers("a", scheduler):
        scheduler.load_state_dict(state)
    scheduler.optimizer.step()
    scheduler.step(*([1.0] if kind == "plateau" else []))


@pytest.mark.parametrize("kind", _MAKE)
def test_states_of_a_training(kind: str) -> None:
    scheduler = _scheduler(kind)
    saved, own = scheduler.state_dict(), _MAKE[kind](scheduler.optimizer)
    with checked_schedulers("a", own, most_steps=64):
        own.load_state_dict(saved)
    assert own.state_dict() == scheduler.state_dict()
