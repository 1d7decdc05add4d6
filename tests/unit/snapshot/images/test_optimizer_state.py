"""An optimizer's state over many saves is what the optimizer itself gives, whatever is done to it in between."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from safepoint.snapshot.images.module_state import OptimizerState
from safepoint.snapshot.staging.guard import Guard
from tests.support.snapshots import piece_of


class Training:
    """Two layers under AdamW, one of them in a group of its own."""

    def __init__(self) -> None:
        self.first, self.second, self.third = (torch.nn.Linear(4, 4) for _ in range(3))
        groups = [{"params": list(self.first.parameters())}, {"params": list(self.second.parameters()), "lr": 0.5}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1)

    def step(self) -> None:
        for layer in (self.first, self.second, self.third):
            for parameter in layer.parameters():
                parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    @property
    def states(self) -> list[dict[str, Any]]:
        return list(self.optimizer.state.values())


def _same(one: Any, other: Any) -> bool:
    """Equal, with the very same tensors, in the same order."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other if isinstance(one, torch.Tensor) else type(one) is type(other) and one == other


def _reload(training: Training) -> None:
    state = training.optimizer.state_dict()
    copies = {key: {name: value.clone() for name, value in one.items()} for key, one in state["state"].items()}
    training.optimizer.load_state_dict({"state": copies, "param_groups": state["param_groups"]})


def _rename(training: Training) -> None:
    training.states[0]["other"] = training.states[0].pop("exp_avg_sq")


def _swap_names(training: Training) -> None:
    state = training.states[1]
    values = list(state.values())
    names = list(state)
    state.clear()
    state.update(zip([names[0], names[2], names[1]], values, strict=True))


def _move_parameter(training: Training) -> None:
    groups = training.optimizer.param_groups
    groups[1]["params"].append(groups[0]["params"].pop())


def _hook(training: Training) -> None:
    def more(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "more": 1}

    training.optimizer.register_state_dict_post_hook(more)


CHANGES: dict[str, Callable[[Training], object]] = {
    "another step": lambda training: training.step(),
    "another rate": lambda training: training.optimizer.param_groups[1].update(lr=0.25),
    "another option": lambda training: training.optimizer.param_groups[0].update(mine="x"),
    "a group more": lambda training: training.optimizer.add_param_group(
        {"params": list(training.third.parameters())}
    ),
    "parameters in another group": _move_parameter,
    "a state loaded": _reload,
    "a value more": lambda training: training.states[2].update(more=3.0),
    "a value of a kind of its own": lambda training: training.states[2].update(more=[torch.ones(2)]),
    "a state fewer": lambda training: training.optimizer.state.pop(training.first.weight),
    "a name changed": _rename,
    "names swapped": _swap_names,
    "no state": lambda training: training.optimizer.state.clear(),
    "a hook": _hook,
    "a state of no parameter": lambda training: training.optimizer.state.update(shared={"count": 1}),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_the_state_is_the_optimizers(change: str) -> None:
    """Before a change, after it, and after the next step."""
    training = Training()
    state = OptimizerState(training.optimizer)
    assert _same(state.state_dict(), training.optimizer.state_dict())
    training.step()
    for _ in range(2):
        assert _same(state.state_dict(), training.optimizer.state_dict())
    CHANGES[change](training)
    for _ in range(2):
        assert _same(state.state_dict(), training.optimizer.state_dict())
    if change not in {"a name changed", "names swapped"}:  # with which the optimizer cannot step
        training.step()
    assert _same(state.state_dict(), training.optimizer.state_dict())


def test_the_state_stays_the_same_object() -> None:
    """As long as only the content of tensors changes, because others compare by identity."""
    training = Training()
    state = OptimizerState(training.optimizer)
    training.step()
    before = state.state_dict()["state"]
    training.step()
    assert state.state_dict()["state"] is before
    _reload(training)
    assert state.state_dict()["state"] is not before


def test_what_optimizers_own_follows_their_states() -> None:
    """A state that was loaded has other tensors; parameters that were given a place elsewhere are found there."""
    training = Training()
    training.step()
    guard = Guard(lambda _: None, [training.optimizer])
    try:
        guard.refresh()
        before, epoch = training.states[0]["exp_avg"], guard.epoch
        assert guard.owner_of(piece_of(before)) is not None
        guard.refresh()
        assert guard.epoch == epoch
        _reload(training)
        guard.refresh()
        assert guard.epoch != epoch
        assert guard.owner_of(piece_of(before)) is None
        assert guard.owner_of(piece_of(training.states[0]["exp_avg"])) is not None
        old = training.first.weight.data
        training.first.weight.data = old.clone()
        # Also when nothing new is read: what lies at the old place is not the optimizer's.
        guard.refresh(has_new_pieces=False)
        assert guard.owner_of(piece_of(old)) is None
        assert guard.owner_of(piece_of(training.first.weight)) is not None
    finally:
        guard.close()
