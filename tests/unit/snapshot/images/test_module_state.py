"""The state of a module is computed again exactly when the module has changed."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.snapshot.images.module_state import ModuleState
from tests.support.snapshots import same


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("nothing", None)
        self.empty = torch.nn.Parameter(torch.empty(0))


def replaced_parameter(model: Model) -> None:
    model.first.weight = torch.nn.Parameter(torch.ones(4, 4))


def other_data(model: Model) -> None:
    model.inner[0].weight.data = torch.ones(4, 4)


def other_shape(model: Model) -> None:
    model.first.weight.data = model.first.weight.data[:2]


def turned(model: Model) -> None:
    model.first.weight.data = model.first.weight.data.t()


def other_buffer(model: Model) -> None:
    model.inner[1].running_mean = torch.ones(4)


def buffer_of_other_size(model: Model) -> None:
    model.table.resize_(3)


def buffer_at_last(model: Model) -> None:
    model.nothing = torch.ones(2)


def buffer_no_more(model: Model) -> None:
    model.table = None


def not_saved_any_more(model: Model) -> None:
    model.register_buffer("table", model.table, persistent=False)


def filled(model: Model) -> None:
    model.empty.data = torch.ones(3)


def new_buffer(model: Model) -> None:
    model.inner.register_buffer("new", torch.ones(1))


def new_module(model: Model) -> None:
    model.inner.append(torch.nn.Linear(4, 2))


def module_within(model: Model) -> None:
    model.first.inside = torch.nn.Linear(1, 1)


def replaced_module(model: Model) -> None:
    model.inner[0] = torch.nn.Linear(4, 4)


def removed_module(model: Model) -> None:
    del model.inner[1]


def removed_parameter(model: Model) -> None:
    model.first.bias = None


def renamed(model: Model) -> None:
    model.last = model.first
    del model.first


def tied(model: Model) -> None:
    model.inner[0].weight = model.first.weight


def with_hook(model: Model) -> None:
    model.inner.register_state_dict_post_hook(lambda module, state, prefix, local: state.update(added=torch.ones(1)))


def with_hook_before(model: Model) -> None:
    model.first.register_state_dict_pre_hook(
        lambda module, prefix, keep: module.register_parameter("bias", torch.nn.Parameter(torch.ones(4)))
    )


def with_own_state_dict(model: Model) -> None:
    model.state_dict = lambda: {"other": torch.ones(1)}  # type: ignore[method-assign]


CHANGES: list[Callable[[Model], None]] = [
    *(replaced_parameter, other_data, other_shape, turned, other_buffer, buffer_of_other_size, buffer_at_last),
    *(buffer_no_more, not_saved_any_more, filled, new_buffer, new_module, module_within, replaced_module),
    *(removed_module, removed_parameter, renamed, tied, with_hook, with_hook_before, with_own_state_dict),
]


def check(state: ModuleState, model: Model) -> None:
    ours = dict(state.state_dict())
    assert same(ours, dict(model.state_dict()))


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: Callable[[Model], None]) -> None:
    """Whatever is done to the module, its state is that of now."""
    model = Model()
    state = ModuleState(model)
    check(state, model)
    change(model)
    check(state, model)


@settings(max_examples=30, deadline=None)
@given(changes=st.permutations(CHANGES[:-1]).map(lambda changes: changes[:4]))
def test_changes_after_each_other_are_noticed(changes: list[Callable[[Model], None]]) -> None:
    """In any order, as far as one can follow the other."""
    model = Model()
    state = ModuleState(model)
    check(state, model)
    for change in changes:
        with contextlib.suppress(AttributeError, RuntimeError, IndexError, KeyError, TypeError):
            change(model)
        check(state, model)


def test_what_has_not_changed_is_not_made_again() -> None:
    """Steps of an optimizer change the content alone, which the state shares."""
    model = Model()
    state = ModuleState(model)
    first = state.state_dict()
    with torch.no_grad():
        model.first.weight += 1
    assert state.state_dict() is first
    assert torch.equal(first["first.weight"], model.first.weight)
    assert first._metadata == model.state_dict()._metadata


class WithExtraState(torch.nn.Linear):
    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def test_modules_with_ways_of_their_own_are_asked_each_time() -> None:
    """Extra state changes without anything that could be noticed."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), WithExtraState(2, 2))
    state = ModuleState(model)
    for count in range(3):
        model[1].count = count
        assert state.state_dict()["1._extra_state"] == {"count": count}
