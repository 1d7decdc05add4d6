"""Checks the states of schedulers that are loaded from a checkpoint. An attacker may have written the checkpoint.

A scheduler of torch makes an attribute of itself from every entry of a loaded state. It does so even if the entry has
the name of a method, or of the attribute that holds the optimizer.
"""

import contextlib
import sys
from collections.abc import Generator, Iterable, Mapping
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler

from safepoint.checkpoint.pickles.loading import refusal
from safepoint.checkpoint.pickles.optimizer_states import as_float
from safepoint.checkpoint.pickles.temporary_attributes import temporarily
from safepoint.errors import printable

_OF_FUNCTIONS = {"lr_lambdas", "_scale_fn_custom"}
"""The entries with the attributes of the script's own objects that compute learning rates. torch sets these
attributes."""
_BASES = {"gamma"}
"""The numbers of which schedulers compute powers, see `as_float`. A script may give them as whole numbers."""
_OF_GROUPS = {"base_lrs", "_last_lr"}
"""The lists with a number for each group of the optimizer."""


@contextlib.contextmanager
def checked_schedulers(where: object, *schedulers: Any) -> Generator[None]:
    """While the block runs, check the states that these schedulers load.

    Args:
        where: the file or the checkpoint that the states come from; named in errors.
        schedulers: schedulers of torch, or wrappers of Accelerate around them. Other objects are ignored.

    Raises:
        CheckpointError: a state sets an attribute that the scheduler does not save, or has a value of another kind.
    """
    with contextlib.ExitStack() as stack:
        for scheduler in schedulers:
            inner: Any = getattr(scheduler, "scheduler", scheduler)
            if isinstance(inner, LRScheduler):
                stack.enter_context(_checked(where, inner))
        yield


def _checked(where: object, scheduler: Any) -> contextlib.AbstractContextManager[None]:
    original = scheduler.load_state_dict

    def load_state_dict(state_dict: Any) -> None:
        original(checked_state(where, scheduler, state_dict))

    return temporarily(scheduler, load_state_dict=load_state_dict)


def checked_state(where: object, scheduler: Any, state: Any) -> Any:
    """Check the state that a scheduler of torch is about to load, and return what it has to load.

    Raises:
        CheckpointError: see `checked_schedulers`.
    """
    fault = _fault(scheduler, state)
    if fault:
        raise refusal(where, fault, "otherwise create the scheduler as in the run that wrote the checkpoint")
    return _with_floats(scheduler, state)


def _fault(scheduler: Any, state: Any) -> str:
    """What is wrong with a state; empty if the state is valid."""
    if not isinstance(state, Mapping):
        return "the state of its scheduler is not a dictionary"
    saved = cast("Mapping[Any, Any]", state)
    kind = cast("Any", type(scheduler))
    # Leave out the function that `checked_schedulers` has put among the attributes.
    own = {name: one for name, one in scheduler.state_dict().items() if not callable(getattr(kind, name, None))}
    for name, value in saved.items():
        shown = printable(repr(name))
        if name not in own:
            if not isinstance(name, str) or hasattr(scheduler, name):
                return f"the state of its scheduler sets {shown}, which the scheduler does not save"
        elif not _fits(value, own[name]) or (name in _OF_FUNCTIONS and not _are_attributes(value, own[name])):
            return f"{shown} of its scheduler is of another kind than in the script"
        elif name in _OF_GROUPS and len(value) != len(own[name]):
            return f"{shown} of its scheduler has {len(value)} numbers, and the optimizer has {len(own[name])} groups"
    return _inner_fault(scheduler, saved.get("_schedulers"))


def _are_attributes(value: Any, own: Any) -> bool:
    """Whether a value sets only attributes that the script's objects have, to values of the same kinds."""
    if isinstance(own, list | tuple):
        inner, of_own = cast("list[Any]", value), cast("list[Any]", own)
        return len(inner) == len(of_own) and all(map(_are_attributes, inner, of_own))
    saved = cast("Mapping[Any, Any]", value if isinstance(value, Mapping) else {})
    known = cast("Mapping[Any, Any]", own if isinstance(own, Mapping) else {})
    return (value is None or isinstance(value, Mapping)) and all(
        name in known and _fits(one, known[name]) for name, one in saved.items()
    )


def _with_floats(scheduler: Any, state: Any) -> Any:
    """A state in which floats replace the whole numbers with which a step would take very long."""
    own: dict[str, Any] = scheduler.state_dict()
    changed = {name: as_float(value, 1.0 if name in _BASES else own.get(name)) for name, value in state.items()}
    inner: Any = getattr(scheduler, "_schedulers", None)
    if isinstance(inner, list | tuple) and changed.get("_schedulers") is not None:
        changed["_schedulers"] = list(map(_with_floats, cast("list[Any]", inner), changed["_schedulers"]))
    return changed


def _inner_fault(scheduler: Any, states: Any) -> str:
    """What is wrong with the states of the schedulers that `scheduler` consists of; empty if they are valid."""
    inner: Any = getattr(scheduler, "_schedulers", None)
    if not isinstance(inner, list | tuple) or states is None:
        return ""
    if not isinstance(states, list | tuple) or len(cast("list[Any]", states)) != len(cast("list[Any]", inner)):
        return "its scheduler consists of another number of schedulers"
    pairs = zip(cast("list[Any]", inner), cast("list[Any]", states), strict=True)
    return next((fault for one, of_one in pairs if (fault := _fault(one, of_one))), "")


def _fits(value: Any, own: Any) -> bool:
    """Whether a value from a checkpoint can replace the scheduler's own value."""
    if own is None or value is None:
        return True
    if isinstance(own, bool | int | float | torch.Tensor):
        return _is_number(value)
    if isinstance(own, list | tuple):
        numbers = cast("list[Any]", own)
        if not isinstance(value, list | tuple):
            return False
        return not all(map(_is_number, numbers)) or all(map(_is_number, cast("Iterable[Any]", value)))
    kinds = ((Mapping, Mapping), (str, str))
    return all(isinstance(value, kind) for kind, of_own in kinds if isinstance(own, of_own))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, bool | float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)
