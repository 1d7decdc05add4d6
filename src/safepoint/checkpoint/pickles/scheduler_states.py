"""Checks the states of schedulers that are loaded from a checkpoint. An attacker may have written the checkpoint.

A scheduler of torch makes an attribute of itself from every entry of a loaded state. It does so even if the entry has
the name of a method, or of the attribute that holds the optimizer. It checks no value: a value of another kind raises
an error in a later step, and a function of the script may compute with a large count without end.
"""

import contextlib
import copy
import math
import sys
import warnings
from collections.abc import Generator, Iterator, Mapping
from types import FunctionType, SimpleNamespace
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
_COUNTS = {"last_epoch", "_step_count", "T_cur", "num_bad_epochs", "cooldown_counter"}
"""The numbers that a scheduler increases in its steps."""
_LENGTHS = {"T_0", "T_i", "T_mult", "T_max", "step_size", "total_steps", "total_size", "step_ratio"}
"""The numbers by which schedulers divide."""
_MAY_BE_INFINITE = {"best", "mode_worse", "_schedulers", *_OF_FUNCTIONS}
"""The entries with the best metric so far, which begins as infinity; and entries that are checked elsewhere."""
_MOST_WHOLE = 1 << 53
"""Larger whole numbers are not exact as floats."""
_MOST_REPEATS = 1000
"""How often `MultiStepLR` may decrease the rate at one step. It makes a list with an entry for each decrease."""


@contextlib.contextmanager
def checked_schedulers(where: object, *schedulers: Any, most_steps: int | None = None) -> Generator[None]:
    """While the block runs, check the states that these schedulers load. Try a step of each at the end.

    Args:
        where: the file or the checkpoint that the states come from; named in errors.
        schedulers: schedulers of torch, or wrappers of Accelerate around them. Other objects are ignored.
        most_steps: how often a scheduler can have stepped before the checkpoint was written; None for no limit.

    Raises:
        CheckpointError: a state sets an attribute that the scheduler does not save, or has a value of another kind;
            or a scheduler could not make its next step.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(tried_schedulers(where, *schedulers))
        for scheduler in schedulers:
            inner: Any = getattr(scheduler, "scheduler", scheduler)
            if isinstance(inner, LRScheduler):
                stack.enter_context(_checked(where, inner, most_steps))
        yield


@contextlib.contextmanager
def tried_schedulers(where: object, *schedulers: Any) -> Generator[None]:
    """At the end of the block, make one step with a copy of each scheduler and of its optimizer's groups.

    The step shows whether the state of the scheduler fits the settings in the groups. Both may be loaded in the
    block. Only schedulers of torch are tried, and only if they could make a step before the block. Functions of the
    script are not called.

    Args:
        where: the file or the checkpoint that the states come from; named in errors.
        schedulers: see `checked_schedulers`.

    Raises:
        CheckpointError: a step raises an error, or its learning rate is not a finite number.
    """
    found: list[Any] = [getattr(one, "scheduler", one) for one in schedulers]
    tried = [(one, _total_steps(one)) for one in found if isinstance(one, LRScheduler) and not _fault_of_step(one)]
    yield
    for scheduler, total in tried:
        is_shorter = _total_steps(scheduler) < total
        fault = "" if _has_ended(scheduler) and not is_shorter else _fault_of_step(scheduler)
        if fault:
            raise refusal(
                where, fault, "otherwise create the optimizer and the scheduler as in the run that wrote it"
            )


def _checked(where: object, scheduler: Any, most: int | None) -> contextlib.AbstractContextManager[None]:
    original = scheduler.load_state_dict

    def load_state_dict(state_dict: Any) -> None:
        original(checked_state(where, scheduler, state_dict, most))

    return temporarily(scheduler, load_state_dict=load_state_dict)


def checked_state(where: object, scheduler: Any, state: Any, most: int | None = None) -> Any:
    """Check the state that a scheduler of torch is about to load, and return what it has to load.

    Args:
        where: the file, for the error.
        scheduler: the scheduler.
        state: the state.
        most: the limit of its counts; None for no limit.

    Raises:
        CheckpointError: see `checked_schedulers`.
    """
    fault = _fault(scheduler, state, most)
    if fault:
        raise refusal(where, fault, "otherwise create the scheduler as in the run that wrote the checkpoint")
    return _with_floats(scheduler, state)


def _fault(scheduler: Any, state: Any, most: int | None) -> str:
    """What is wrong with a state; empty if the state is valid."""
    if not isinstance(state, Mapping):
        return "the state of its scheduler is not a dictionary"
    saved = cast("Mapping[Any, Any]", state)
    kind = cast("Any", type(scheduler))
    # Leave out the function that `checked_schedulers` has put among the attributes.
    own = {name: one for name, one in scheduler.state_dict().items() if not callable(getattr(kind, name, None))}
    is_known = kind.__module__.startswith("torch.optim")
    for name, value in saved.items():
        if name not in own:
            if not isinstance(name, str) or hasattr(scheduler, name):
                return f"the state of its scheduler sets {printable(repr(name))}, which the scheduler does not save"
        elif fault := _fault_of_entry(name, value, own[name], most, is_known=is_known):
            return f"{printable(repr(name))} of its scheduler {fault}"
    return _inner_fault(scheduler, saved.get("_schedulers"), most) or _fault_of_functions(scheduler, saved)


def _fault_of_entry(name: str, value: Any, own: Any, most: int | None, *, is_known: bool) -> str:
    """What is wrong with an entry of a state; empty if the scheduler can use it."""
    is_alike = _fits(value, own, is_known=is_known) and (name not in _OF_FUNCTIONS or _are_attributes(value, own))
    if not is_alike:
        fault = "is of another kind than in the script"
    elif name in _OF_GROUPS and len(value) != len(own):
        fault = f"has {len(value)} numbers, and the optimizer has {len(own)} groups"
    elif name in _COUNTS and not _is_count(value, own, most):
        fault = "is larger than the step of the checkpoint allows, or negative"
    elif is_known and name in _LENGTHS and own and own > 0 and not value > 0:
        fault = "is not positive"
    elif is_known and name == "milestones" and not _are_milestones(value):
        fault = "has values that are no steps"
    elif name not in _MAY_BE_INFINITE and _must_be_finite(name, is_known) and _is_infinite(value, own):
        fault = "is infinite"
    else:
        fault = ""
    return fault


def _must_be_finite(name: str, is_known: bool) -> bool:
    """Whether a learning rate is computed with an entry. A scheduler of the script may keep infinite losses."""
    return is_known or name in _OF_GROUPS | _BASES


def _is_infinite(value: Any, own: Any) -> bool:
    """Whether a value, or a value in it, is infinite where the scheduler's own value is not."""
    if isinstance(value, float | torch.Tensor):
        return _has_infinity(value) and not (isinstance(own, float | torch.Tensor) and _has_infinity(own))
    if isinstance(value, list | tuple):
        numbers, of_own = cast("list[Any]", value), cast("list[Any]", own if isinstance(own, list | tuple) else [])
        known = [*of_own, *[None] * len(numbers)]
        return any(map(_is_infinite, numbers, known[: len(numbers)]))
    if isinstance(value, Mapping):
        saved, before = cast("Mapping[Any, Any]", value), cast("Any", own if isinstance(own, Mapping) else {})
        return any(_is_infinite(one, before.get(name)) for name, one in saved.items())
    return False


def _has_infinity(number: float | torch.Tensor) -> bool:
    return bool(number.isinf().any()) if isinstance(number, torch.Tensor) else math.isinf(number)


def _are_attributes(value: Any, own: Any) -> bool:
    """Whether a value sets only attributes that the script's objects have, to values of the same kinds."""
    if isinstance(own, list | tuple):
        inner, of_own = cast("list[Any]", value), cast("list[Any]", own)
        return len(inner) == len(of_own) and all(map(_are_attributes, inner, of_own))
    saved = cast("Mapping[Any, Any]", value if isinstance(value, Mapping) else {})
    known = cast("Mapping[Any, Any]", own if isinstance(own, Mapping) else {})
    return (value is None or isinstance(value, Mapping)) and all(
        name in known and _fits(one, known[name], is_known=False) for name, one in saved.items()
    )


def _with_floats(scheduler: Any, state: Any) -> Any:
    """A state in which floats replace the whole numbers with which a step would take very long."""
    own: dict[str, Any] = scheduler.state_dict()
    changed = {name: as_float(value, 1.0 if name in _BASES else own.get(name)) for name, value in state.items()}
    inner: Any = getattr(scheduler, "_schedulers", None)
    if isinstance(inner, list | tuple) and changed.get("_schedulers") is not None:
        changed["_schedulers"] = list(map(_with_floats, cast("list[Any]", inner), changed["_schedulers"]))
    return changed


def _inner_fault(scheduler: Any, states: Any, most: int | None) -> str:
    """What is wrong with the states of the schedulers that `scheduler` consists of; empty if they are valid."""
    inner: Any = getattr(scheduler, "_schedulers", None)
    if not isinstance(inner, list | tuple) or states is None:
        return ""
    if not isinstance(states, list | tuple) or len(cast("list[Any]", states)) != len(cast("list[Any]", inner)):
        return "its scheduler consists of another number of schedulers"
    pairs = zip(cast("list[Any]", inner), cast("list[Any]", states), strict=True)
    return next((fault for one, of_one in pairs if (fault := _fault(one, of_one, most))), "")


def _is_count(value: Any, own: Any, most: int | None) -> bool:
    """Whether a scheduler can have counted so far. The script may have created the scheduler with a larger count."""
    is_possible = value is None or (math.isfinite(value) and value >= -1)
    return is_possible and (value is None or most is None or value <= max(most, most + (own or 0)))


def _are_milestones(value: Any) -> bool:
    """Whether a value is a mapping of steps to the number of decreases at this step."""
    return isinstance(value, Mapping) and all(
        type(step) is int and abs(step) <= _MOST_WHOLE and type(times) is int and 0 <= times <= _MOST_REPEATS
        for step, times in cast("Mapping[Any, Any]", value).items()
    )


def _fault_of_functions(scheduler: Any, saved: Mapping[Any, Any]) -> str:
    """Why the script's functions of a LambdaLR cannot compute with the count of a state; empty if they can.

    The script has called its functions with this count before the checkpoint was written.
    """
    count: Any = saved.get("last_epoch")
    functions: Any = getattr(scheduler, "lr_lambdas", None)
    if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR) or type(count) not in {int, float}:
        return ""
    for function in functions:
        if type(function) is FunctionType:  # an object may count its calls
            try:
                function(count)
            except Exception as error:  # noqa: BLE001  the script's function may raise anything
                return printable(f"the script's function of the learning rate fails for step {count} ({error})")
    return ""


def _fits(value: Any, own: Any, *, is_known: bool) -> bool:
    """Whether a value from a checkpoint can replace the scheduler's own value.

    Args:
        value: the value of the checkpoint.
        own: the scheduler's own value.
        is_known: whether the class of the scheduler is torch's. Then no number becomes None, and no list changes its
            length.
    """
    if own is None or (value is None and not is_known):
        return True
    if isinstance(own, bool | int | float | torch.Tensor):
        return _is_number(value, own)
    if isinstance(own, list | tuple):
        is_list = isinstance(value, list | tuple)
        return is_list and _list_fits(cast("list[Any]", value), cast("list[Any]", own), is_known=is_known)
    if isinstance(own, Mapping) and isinstance(value, Mapping):
        return not is_known or _are_alike(cast("Mapping[Any, Any]", value), cast("Mapping[Any, Any]", own))
    kinds = ((Mapping, Mapping), (str, str))
    return all(isinstance(value, kind) for kind, of_own in kinds if isinstance(own, of_own))


def _list_fits(value: list[Any], own: list[Any], *, is_known: bool) -> bool:
    if is_known:
        return len(value) == len(own) and all(
            _fits(one, other, is_known=True) for one, other in zip(value, own, strict=True)
        )
    has_numbers = all(isinstance(one, bool | int | float | torch.Tensor) for one in own)
    return not has_numbers or all(_is_number(one, 0.0) for one in value)


def _are_alike(value: Mapping[Any, Any], own: Mapping[Any, Any]) -> bool:
    """Whether two mappings with texts as keys, such as the phases of OneCycleLR, have the same entries and texts."""
    if not own or not all(isinstance(name, str) for name in own):
        return True
    return set(value) == set(own) and all(
        one == own[name] if isinstance(own[name], str) else _fits(one, own[name], is_known=True)
        for name, one in value.items()
    )


def _is_number(value: Any, own: Any) -> bool:
    """Whether a value is a number with which a scheduler can compute in place of its own number `own`."""
    if isinstance(value, torch.Tensor):
        is_real = value.numel() == 1 and not value.is_meta and value.layout is torch.strided
        is_real = is_real and not (value.is_complex() or value.is_quantized)
        return is_real and not isinstance(own, bool | int) and not math.isnan(float(value))
    if isinstance(value, float):
        return not math.isnan(value)
    most = _MOST_WHOLE if isinstance(own, int) else sys.float_info.max
    return isinstance(value, bool) or (isinstance(value, int) and abs(value) <= most)


def _parts_of(scheduler: Any) -> Iterator[Any]:
    """A scheduler, and the schedulers that it consists of."""
    yield scheduler
    inner: Any = getattr(scheduler, "_schedulers", None)
    for one in cast("list[Any]", inner) if isinstance(inner, list | tuple) else []:
        yield from _parts_of(one)


def _cycles_of(scheduler: Any) -> Iterator[Any]:
    """The parts of a scheduler that can make only a limited number of steps."""
    return (one for one in _parts_of(scheduler) if isinstance(one, torch.optim.lr_scheduler.OneCycleLR))


def _total_steps(scheduler: Any) -> float:
    """How many steps a scheduler can make; infinity for no limit."""
    return min((one.total_steps for one in _cycles_of(scheduler)), default=math.inf)


def _has_ended(scheduler: Any) -> bool:
    """Whether a scheduler has made all its steps, as in the last checkpoint of a run."""
    return any(one.last_epoch >= one.total_steps for one in _cycles_of(scheduler))


def _fault_of_step(scheduler: Any) -> str:
    """Why a scheduler of torch cannot make its next step; empty if no reason was found."""
    kinds: list[Any] = [type(one) for one in _parts_of(scheduler)]
    if not all(kind.__module__.startswith("torch.optim") for kind in kinds):
        return ""
    with warnings.catch_warnings(action="ignore"):
        try:
            is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            for metric in (0.0, math.nan) if is_plateau else [None]:
                groups = [
                    {name: _copied(one) for name, one in group.items() if name != "params"}
                    for group in scheduler.optimizer.param_groups
                ]
                copied = _copy_of(scheduler, groups)
                if metric is None:
                    copied.step()
                else:
                    copied.num_bad_epochs, copied.cooldown_counter = copied.patience, 0  # the rate is decreased
                    copied.step(metric)
                rates = [float(group["lr"]) for group in groups]
                if not all(map(math.isfinite, rates)):
                    return f"the next step of its scheduler sets the learning rate to {rates}"
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001  hostile content may raise anything
            return printable(f"its scheduler cannot continue with its state ({type(error).__name__}: {error})")
    return ""


def _copy_of(scheduler: Any, groups: list[dict[str, Any]]) -> Any:
    """A copy of a scheduler that changes only these groups. It does not call functions of the script."""
    own = cast("dict[str, Any]", vars(scheduler))
    attributes = {name: _copied(one) for name, one in own.items() if name not in {"optimizer", "_schedulers"}}
    made = object.__new__(cast("Any", type(scheduler)))
    made.__dict__.update(attributes)
    step = SimpleNamespace(_wrapped_by_lr_sched=True)
    made.optimizer = SimpleNamespace(
        param_groups=groups, defaults=getattr(scheduler.optimizer, "defaults", {}), step=step
    )
    if "lr_lambdas" in attributes:
        made.lr_lambdas = [_constant] * len(groups)
    if attributes.get("_scale_fn_custom") is not None:
        made._scale_fn_custom = _constant
    inner: Any = getattr(scheduler, "_schedulers", None)
    if isinstance(inner, list | tuple):
        made._schedulers = [_copy_of(one, groups) for one in cast("list[Any]", inner)]
    return made


def _constant(_: Any) -> float:
    return 1.0


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return copy.deepcopy(cast("Any", value)) if isinstance(value, list | tuple | dict) else value
