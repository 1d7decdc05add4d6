"""States of schedulers with counts that no training has reached, and with values that a later step cannot use.

Other values make the learning rate NaN in a later step. The checkpoints that the run then saves could not be loaded.

A function of the script computes with the count: `2 ** (count // 2)` would take days and fill the memory, in each
start of the run. With other values, each start would fail in a later step, with an error of torch that names no file.
"""

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from safepoint.checkpoint.pickles.optimizer_states import checked_optimizers, with_own_groups
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


class Own(lr_scheduler.ExponentialLR):
    """A scheduler of a script."""

    def __init__(self, optimizer: Any) -> None:
        self.loss = 1.0
        super().__init__(optimizer, 0.9)


_MAKE: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, _computed),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [5, 9]),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5, 2),
    "ranges": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.1, mode="exp_range", gamma=0.99, cycle_momentum=False
    ),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=20),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "stairs": lambda optimizer: lr_scheduler.StepLR(optimizer, 5),
    "powers": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 50),
    "average": lambda optimizer: SWALR(optimizer, 0.05),
    "own": Own,
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.LambdaLR(optimizer, _computed)], [5]
    ),
}
_NAMES = {
    "start_lr": "initial_lr",
    "end_lr": "max_lr",
    "start_momentum": "base_momentum",
    "end_momentum": "max_momentum",
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


_INFINITE = float("inf")


@pytest.mark.parametrize("infinite", [_INFINITE, -_INFINITE])
@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("restarts", "eta_min", float), ("restarts", "T_i", float), ("restarts", "base_lrs", lambda one: [one]),
        ("cyclic", "max_lrs", lambda one: [one]), ("cyclic", "_last_lr", lambda one: [one]),
        ("cyclic", "gamma", float), ("own", "gamma", float), ("cosine", "eta_min", float),
        ("linear", "start_factor", float), ("linear", "end_factor", torch.tensor),
        ("exponential", "gamma", float), ("stairs", "gamma", float), ("powers", "power", float),
        ("plateau", "factor", float), ("plateau", "min_lrs", lambda one: [one]), ("plateau", "threshold", float),
        ("sequence", "_milestones", lambda one: [one]),
        ("cycle", "_schedule_phases", lambda one: [{"end_step": one, **_NAMES}, {"end_step": 99.0, **_NAMES}]),
    ],
)  # fmt: skip
def test_infinite_settings(kind: str, name: str, change: Callable[[float], Any], infinite: float) -> None:
    """The learning rate would be infinite or NaN, and the next checkpoints of the run could not be loaded."""
    scheduler = _scheduler(kind)
    state = {**scheduler.state_dict(), name: change(infinite)}
    with pytest.raises(CheckpointError, match=f"'{name}' of its scheduler"), checked_schedulers("a", scheduler):
        scheduler.load_state_dict(state)


def test_infinite_settings_of_an_inner_scheduler() -> None:
    scheduler = _scheduler("sequence")
    state = scheduler.state_dict()
    state["_schedulers"][0]["factor"] = _INFINITE
    with pytest.raises(CheckpointError, match="'factor' of its scheduler"), checked_schedulers("a", scheduler):
        scheduler.load_state_dict(state)


def test_infinite_values_of_a_training() -> None:
    """The best metric is infinite before the first one, and a scheduler of the script may keep an infinite loss."""
    saved = _MAKE["plateau"](_scheduler("plateau").optimizer).state_dict()
    assert saved["best"] == _INFINITE
    stepped = _scheduler("plateau")
    with checked_schedulers("a", stepped):
        stepped.load_state_dict(saved)
    own = _scheduler("own")
    saved = {**own.state_dict(), "loss": _INFINITE}
    with checked_schedulers("a", own):
        own.load_state_dict(saved)
    assert own.loss == _INFINITE


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("ranges", "gamma", 1e300), ("ranges", "cycle_momentum", True), ("cosine", "T_max", 1e-320),
        ("cycle", "_anneal_func_type", "zz"), ("cycle", "total_steps", 4), ("powers", "power", -1e308),
    ],
)  # fmt: skip
def test_values_with_which_the_next_step_fails(kind: str, name: str, value: Any) -> None:
    """The step is made by a copy."""
    scheduler = _scheduler(kind)
    state = {**scheduler.state_dict(), name: value}
    expected = r"a was not loaded: (its scheduler cannot|the next step of its scheduler)"
    with pytest.raises(CheckpointError, match=expected), checked_schedulers("a", scheduler):
        scheduler.load_state_dict(state)


def _with_gradient(group: dict[str, Any]) -> None:
    group["lr"] = torch.tensor(0.1, requires_grad=True)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("cycle", lambda group: group.update(max_lr=None)), ("cycle", lambda group: group.update(min_lr=_INFINITE)),
        ("average", lambda group: group.update(swa_lr=None)), ("linear", _with_gradient),
        ("linear", lambda group: group.update(lr=torch.tensor([[1]]))),
        ("linear", lambda group: group.update(lr=torch.tensor([[0.1]]))),
        ("linear", lambda group: group.update(lr=torch.tensor(1))),
        ("linear", lambda group: group.update(lr=_INFINITE)),
        ("linear", lambda group: group.update(lr=torch.tensor(_INFINITE))),
        ("linear", lambda group: group.update(initial_lr=None)),
    ],
)  # fmt: skip
def test_settings_with_which_a_scheduler_cannot_step(kind: str, change: Callable[[Any], None]) -> None:
    """The optimizer's own step would succeed."""
    optimizer: Any = _scheduler(kind).optimizer
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved["param_groups"][0])
    with (
        pytest.raises(CheckpointError, match=r"the setting '\w+' of its optimizer"),
        checked_optimizers("a", optimizer),
    ):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("name", ["swa_lr", "initial_lr", "lr"])
def test_a_setting_that_is_missing(name: str) -> None:
    """The script's own setting stays."""
    scheduler = _scheduler("average")
    optimizer: Any = scheduler.optimizer
    saved = copy.deepcopy(optimizer.state_dict())
    own = optimizer.param_groups[0][name]
    del saved["param_groups"][0][name]
    with checked_optimizers("a", optimizer):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0][name] == own
    scheduler.step()


def test_a_group_that_was_added() -> None:
    """It gets no setting of a scheduler that was created before."""
    optimizer: Any = _scheduler("average").optimizer
    groups = [dict(group) for group in optimizer.param_groups]
    added = {"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.2}
    with with_own_groups("a", optimizer):
        optimizer.param_groups = [*groups, added]
    assert optimizer.param_groups[0].keys() == groups[0].keys()
    assert "swa_lr" not in optimizer.param_groups[1]
    assert optimizer.param_groups[1]["nesterov"] is False


@pytest.mark.parametrize("way", ["a checkpointer", "a session"])
def test_a_scheduler_and_an_optimizer_that_do_not_fit(way: str, tmp_path: Path) -> None:
    """Each is valid alone. The scheduler comes first in the arguments of the session."""
    scheduler = _scheduler("exponential")
    optimizer: Any = scheduler.optimizer
    states = {"scheduler": scheduler.state_dict(), "optimizer": copy.deepcopy(optimizer.state_dict())}
    states["scheduler"] |= {"gamma": 1e300}
    states["optimizer"]["param_groups"][0]["lr"] = 1e30
    for name, state in states.items():
        torch.save(state, tmp_path / f"{name}.pt")
    parts = {"scheduler": scheduler, "optimizer": optimizer}
    with pytest.raises(CheckpointError, match=rf"{tmp_path} was not loaded: the next step of its scheduler sets"):
        NamedParts(parts, Place()).load(tmp_path) if way == "a session" else load_state(tmp_path, parts)


def test_the_last_checkpoint_of_a_run() -> None:
    """OneCycleLR makes no further step, and a function of the script may know no further one."""
    optimizer = _scheduler("cycle").optimizer
    ended = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=_STEP)
    rates = [0.1] * (_STEP + 1)
    listed = lr_scheduler.LambdaLR(optimizer, lambda count: rates[count])
    for scheduler in (ended, listed):
        for _ in range(_STEP):
            optimizer.step()
            scheduler.step()
    for own, saved in (
        (lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=_STEP), ended.state_dict()),
        (lr_scheduler.LambdaLR(optimizer, lambda count: rates[count]), listed.state_dict()),
    ):
        with checked_schedulers("a", own, most_steps=_STEP):
            own.load_state_dict(saved)
        assert own.last_epoch == _STEP


@pytest.mark.parametrize("kind", _MAKE)
def test_states_of_a_training(kind: str) -> None:
    scheduler = _scheduler(kind)
    saved, own = scheduler.state_dict(), _MAKE[kind](scheduler.optimizer)
    with checked_schedulers("a", own, most_steps=64):
        own.load_state_dict(saved)
    assert own.state_dict() == scheduler.state_dict()
