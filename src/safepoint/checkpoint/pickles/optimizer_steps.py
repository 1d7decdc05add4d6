"""Makes one step with a copy of an optimizer and a copy of one parameter. For an optimizer of bitsandbytes, it only
creates the state that the parameter has before the first step.

The result shows which state the optimizer creates, and whether the optimizer can continue with a loaded state. The
optimizer, its parameters and the random number generators do not change.
"""

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch

from safepoint.checkpoint.pickles.temporary_attributes import temporarily
from safepoint.errors import printable
from safepoint.foundation.field_types import MOST_COUNT

_MOST_ELEMENTS = 1 << 20
"""A larger parameter is not copied for a test: it could fill the memory of the device."""


def fault_of_step(optimizer: torch.optim.Optimizer, own: Sequence[Mapping[str, Any]]) -> str:
    """Why an optimizer cannot step with the state that it has loaded; empty if no reason was found.

    In each group, parameters with the same number of dimensions and the same form of the state (`_form_of`) are
    treated alike, so only the first of them is tried. Parameters without a state are not tried. Without this test, a
    run whose optimizer cannot step with its state would fail in the first step after each start, with an error that
    names no file. Only optimizers of torch are tested. The step of another optimizer may need another input than a
    gradient, or may wait for the other ranks.

    Args:
        optimizer: an optimizer that has loaded a state.
        own: the settings of each group before the optimizer loaded the state. If a parameter cannot be stepped with
            these settings and without a state, its loaded state is not tested.
    """
    known: Any = optimizer
    if not cast("Any", type(optimizer)).__module__.startswith("torch.optim"):
        return ""
    if isinstance(optimizer, torch.optim.LBFGS):
        return _fault_of_lbfgs_step(known, own[0])
    for number, (group, before) in enumerate(zip(known.param_groups, own, strict=True)):
        samples: dict[Any, tuple[int, _Sample]] = {}
        for index, parameter in enumerate(group["params"]):
            state: Any = known.state.get(parameter)
            sample = _sample_of(parameter, state) if _is_tested(parameter, state) else None
            if sample is not None:
                samples.setdefault((parameter.dim(), _form_of(sample.state)), (index, sample))
        for index, sample in samples.values():
            place = number, index
            try:
                step_of_copy(optimizer, sample.parameter, before, place)
            except Exception:  # noqa: BLE001  the script's own settings allow no step, for example without a closure
                continue
            try:
                step_of_copy(optimizer, sample.parameter, group, place, state=_cloned(sample.state))
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # noqa: BLE001  hostile content may raise anything
                return printable(f"its optimizer cannot continue with its state ({type(error).__name__}: {error})")
    return ""


def fault_of_lbfgs(optimizer: Any) -> str:
    """What is wrong with the state that an LBFGS has loaded; empty if the state fits the parameters and settings.

    LBFGS has one state, which belongs to its first parameter. The state consists of numbers, of vectors with the
    elements of all parameters, and of lists of such numbers or vectors. The list `al` is scratch memory: if it is not
    a list of the length `history_size`, it is replaced by a list of this length.
    """
    group: Any = optimizer.param_groups[0]
    state: Any = optimizer.state.get(group["params"][0], {})
    if not isinstance(state, Mapping):
        return "the state of its LBFGS is not a dictionary"
    found = cast("dict[Any, Any]", state)
    length = sum((2 if one.is_complex() else 1) * one.numel() for one in group["params"])
    lists: dict[str, Any] = {name: found[name] for name in _LISTS if found.get(name) is not None}
    wrong = {name for name, one in lists.items() if type(one) is not list or _len(one) > group["history_size"]}
    wrong |= set(lists) if len({_len(one) for one in lists.values()}) > 1 else set()
    vectors = {**{name: [found.get(name)] for name in _VECTORS}, **{name: lists.get(name, []) for name in _LISTS[:2]}}
    wrong |= {
        name for name, one in vectors.items() if name not in wrong and not all(_is_vector(v, length) for v in one)
    }
    numbers = {**{name: [found.get(name)] for name in _NUMBERS}, "ro": lists.get("ro", [])}
    wrong |= {name for name, one in numbers.items() if name not in wrong and not all(map(_is_number, one))}
    wrong |= {
        name for name in _OF_STEPS if type(found.get(name, 0)) is not int or abs(found.get(name, 0)) > MOST_COUNT
    }
    if wrong:
        return f"{min(wrong)!r} in the state of its LBFGS does not fit the parameters and settings of the script"
    scratch: Any = found.get("al")
    if scratch is not None and (
        type(scratch) is not list or len(cast("list[Any]", scratch)) != group["history_size"]
    ):
        found["al"] = [None] * group["history_size"]
    return ""


_LISTS = ("old_dirs", "old_stps", "ro")
_VECTORS = ("d", "prev_flat_grad")
_NUMBERS = ("t", "H_diag", "prev_loss")
_OF_STEPS = ("func_evals", "n_iter")


def _len(value: Any) -> int:
    return len(cast("list[Any]", value)) if isinstance(value, list) else 0


def _is_vector(value: Any, length: int) -> bool:
    is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta
    return value is None or (is_plain and value.shape == (length,) and value.is_floating_point())


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_floating_point() and not value.is_meta
    return value is None or type(value) in {int, float}


def _fault_of_lbfgs_step(optimizer: Any, own: Mapping[str, Any]) -> str:
    """See `fault_of_step`. One iteration is made, with the first element of each vector."""
    first: torch.Tensor = optimizer.param_groups[0]["params"][0]
    state: Any = optimizer.state.get(first)
    if not state:
        return ""
    sample = torch.zeros(1, dtype=first.dtype.to_real(), device=first.device)
    short = {name: [one[:1].clone() for one in state[name]] for name in _LISTS[:2] if state.get(name) is not None}
    short |= {name: state[name][:1].clone() for name in _VECTORS if state.get(name) is not None}
    lists: dict[str, Any] = {name: list(state[name]) for name in ("ro", "al") if state.get(name) is not None}
    once = {"max_iter": 1, "max_eval": 3}
    try:
        step_of_copy(optimizer, sample, {**own, **once}, (0, 0), gradient=1.0)
    except Exception:  # noqa: BLE001  the script's own settings allow no step
        return ""
    try:
        settings = {**optimizer.param_groups[0], **once}
        step_of_copy(optimizer, sample, settings, (0, 0), state=_cloned({**state, **short, **lists}), gradient=1.0)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001  hostile content may raise anything
        return printable(f"its optimizer cannot continue with its state ({type(error).__name__}: {error})")
    return ""


class _Sample(NamedTuple):
    """A parameter with its state, or one element of a parameter with the state of this element."""

    parameter: torch.Tensor
    state: Mapping[Any, Any]


def _is_tested(parameter: Any, state: Any) -> bool:
    is_plain = type(parameter) is torch.nn.Parameter or type(parameter) is torch.Tensor
    return is_plain and parameter.numel() > 0 and isinstance(state, Mapping) and bool(cast("Any", state))


def _sample_of(parameter: torch.Tensor, state: Mapping[Any, Any]) -> _Sample | None:
    """One element of a parameter, with the state of this element. One is enough, because a step treats all elements
    in the same way.

    If a tensor of the state has neither the shape of the parameter nor exactly one element, the sample is the whole
    parameter. The result is None if the whole parameter is needed, and is too large to be copied.
    """
    tensors: list[torch.Tensor] = [one for one in state.values() if isinstance(one, torch.Tensor)]
    if all(one.shape == parameter.shape or one.numel() == 1 for one in tensors):
        first = (slice(0, 1),) * parameter.dim()
        of_first = {
            name: one[first] if isinstance(one, torch.Tensor) and one.shape == parameter.shape else one
            for name, one in state.items()
        }
        return _Sample(parameter.detach()[first], of_first)
    return _Sample(parameter.detach(), state) if parameter.numel() <= _MOST_ELEMENTS else None


def _form_of(state: Mapping[Any, Any]) -> tuple[Any, ...]:
    """What decides whether a step with a state is possible: the names of its values, and the kind of each value
    (`_kind_of`)."""
    return tuple((name, _kind_of(value)) for name, value in state.items())


def _kind_of(value: Any) -> Any:
    """For a tensor: its data type, its number of dimensions and, if it has no dimension, its value. For a number: the
    value. For anything else: the type."""
    if not isinstance(value, torch.Tensor):
        return repr(value) if isinstance(value, bool | int | float) else cast("Any", type(value))
    is_number = value.dim() == 0 and not value.is_meta
    return value.dtype, value.dim(), repr(value.item()) if is_number else None


def _cloned(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()
    }


def step_of_copy(
    optimizer: Any,
    parameter: torch.Tensor,
    settings: Mapping[str, Any],
    place: tuple[int, int],
    *,
    state: Mapping[Any, Any] | None = None,
    gradient: float = 0.0,
) -> dict[str, Any]:
    """Make one step with a copy of an optimizer and a copy of one parameter.

    For an optimizer of bitsandbytes, make no step, and only create the state that the parameter has before the first
    step.

    Args:
        optimizer: the optimizer.
        parameter: the parameter. Its values are not used.
        settings: the settings of the parameter's group.
        place: the number of the group, and the number of the parameter in the group.
        state: the state of the parameter before the step. The step changes this dictionary and its tensors in place.
            If None, the optimizer has made no step yet.
        gradient: the value of every element of the gradient.

    Returns:
        The state of the parameter after the step; for an optimizer of bitsandbytes, the state before the first step.
    """
    attributes = cast("dict[str, Any]", vars(optimizer))
    own = {
        name: list(cast("list[Any]", one)) if type(one) is list else copied(one) for name, one in attributes.items()
    }
    own.pop("step", None)  # remove the wrapper of `step` that a scheduler may have installed
    copy = object.__new__(cast("Any", type(optimizer)))
    copy.__dict__.update(own)
    with torch.no_grad():
        fresh = torch.nn.Parameter(torch.zeros_like(parameter))
        fresh.grad = torch.full_like(parameter, gradient)
    group = {**settings, "params": [fresh]}
    copy.state, copy.param_groups = defaultdict[Any, Any](dict), [group]
    if state is not None:
        copy.state[fresh] = state
    if isinstance(optimizer, torch.optim.LBFGS):
        copy._params, copy._numel_cache = [fresh], None
    copy._optimizer_step_pre_hooks, copy._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    devices = [parameter.device] if parameter.device.type == "cuda" else []
    random: Any = torch.random
    with random.fork_rng(devices=devices):
        if hasattr(copy, "init_state"):  # only optimizers of bitsandbytes have this method
            if hasattr(copy, "page_mng"):
                copy.page_mng = SimpleNamespace(paged_tensors=[])
            copy.init_state(group, fresh, *place)
        else:
            library: Any = sys.modules[torch.optim.Optimizer.__module__]
            none = OrderedDict[Any, Any]()
            with temporarily(library, _global_optimizer_pre_hooks=none, _global_optimizer_post_hooks=none):
                copy.step(*([lambda: torch.ones(())] if isinstance(optimizer, torch.optim.LBFGS) else []))
    return dict(copy.state[fresh])


def copied(state: Any) -> Any:
    """A copy of `state` if it is a dictionary; otherwise `state` itself."""
    return dict(cast("dict[Any, Any]", state)) if isinstance(state, dict) else state
