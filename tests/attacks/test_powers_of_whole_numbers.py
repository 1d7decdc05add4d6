"""Whole numbers in states from which a step computes a power.

A power of floats is one instruction. A power of whole numbers is exact: the step would take days and fill the memory,
in each start of the run.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from safepoint.checkpoint.pickles.optimizer_states import checked_optimizers
from safepoint.checkpoint.pickles.scheduler_states import checked_schedulers
from safepoint.errors import CheckpointError
from safepoint.training.state.data_only import load_data

_COUNT = 1 << 25
"""With whole numbers, a power of this many takes long enough to fail the test, and ends."""
_MAKE: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1]),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 1),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [1])], [1]
    ),
}


def _optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.AdamW([parameter], lr=0.1)


@pytest.mark.parametrize("kind", _MAKE)
def test_a_base_of_a_scheduler(kind: str, tmp_path: Path) -> None:
    scheduler = _MAKE[kind](_optimizer())
    state = scheduler.state_dict()
    (state["_schedulers"][1] if kind == "SequentialLR" else state)["gamma"] = 3
    torch.save(state, tmp_path / "scheduler.pt")
    with checked_schedulers("scheduler.pt", scheduler):
        scheduler.load_state_dict(load_data(tmp_path / "scheduler.pt"))
    inner = scheduler._schedulers[1] if kind == "SequentialLR" else scheduler
    assert type(inner.gamma) is float
    assert inner.gamma == 3


def test_a_step_ends(tmp_path: Path) -> None:
    optimizer = _optimizer()
    scheduler = lr_scheduler.MultiStepLR(optimizer, [1])
    state = {**scheduler.state_dict(), "gamma": 10**50, "milestones": Counter({1: 1000})}
    torch.save(state, tmp_path / "scheduler.pt")
    with (
        pytest.raises(CheckpointError, match="OverflowError"),
        checked_schedulers("scheduler.pt", scheduler),
    ):
        scheduler.load_state_dict(load_data(tmp_path / "scheduler.pt"))


@pytest.mark.parametrize("name", ["gamma", "last_epoch", "_step_count", "base_lrs"])
def test_a_number_larger_than_any_float(name: str) -> None:
    scheduler = lr_scheduler.StepLR(_optimizer(), 1)
    state = {**scheduler.state_dict(), name: [10**400] if name == "base_lrs" else 10**400}
    with pytest.raises(CheckpointError, match=name), checked_schedulers("scheduler.pt", scheduler):
        scheduler.load_state_dict(state)


def test_the_bases_of_an_optimizer() -> None:
    optimizer = _optimizer()
    state = optimizer.state_dict()
    state["param_groups"][0] |= {"betas": (3, 5), "lr": 1, "weight_decay": 0}
    with checked_optimizers("optimizer.pt", optimizer):
        optimizer.load_state_dict(state)
    group = optimizer.param_groups[0]
    assert (group["betas"], group["lr"], group["weight_decay"]) == ((3, 5), 1, 0)
    assert {type(one) for one in (*group["betas"], group["lr"], group["weight_decay"])} == {float}


@pytest.mark.parametrize("setting", [{"lr": 10**400}, {"betas": (10**400, 0.9)}, {"eps": -(10**400)}])
def test_a_setting_larger_than_any_float(setting: dict[str, Any]) -> None:
    optimizer = _optimizer()
    state = optimizer.state_dict()
    state["param_groups"][0] |= setting
    with pytest.raises(CheckpointError, match="the setting"), checked_optimizers("optimizer.pt", optimizer):
        optimizer.load_state_dict(state)


def test_numbers_of_the_script_stay() -> None:
    """So do its flags, and a whole number of the script stays one."""
    optimizer = torch.optim.AdamW(_optimizer().param_groups[0]["params"], lr=1)
    state = optimizer.state_dict()
    state["param_groups"][0]["amsgrad"] = True
    with checked_optimizers("optimizer.pt", optimizer):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["amsgrad"] is False
    assert type(optimizer.param_groups[0]["lr"]) is int
