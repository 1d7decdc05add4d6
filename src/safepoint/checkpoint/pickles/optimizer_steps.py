"""Makes one step with a copy of an optimizer and a copy of one parameter.

The step shows which state the optimizer creates, and whether the optimizer can continue with a loaded state. The
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

_MOST_ELEMENTS = 1 << 20
"""A larger parameter is not copied for a test: it could fill the memory of the device."""


def fault_of_step(optimizer: torch.optim.Optimizer, own: Sequence[Mapping[str, Any]]) -> str:
    """Why an optimizer cannot step with the state that it has loaded; empty if no reason was found.

    In each group, one parameter is tried for each number of dimensions and each form of a state. Without this
    test, a run whose optimizer cannot step with its state would fail in the first step after each start, with an
    error that names no file. Only optimizers of torch are tested: the step of another optimizer may need more than a
    gradient, or all ranks.

    Args:
        optimizer: an optimizer that has loaded a state.
        own: the settings of each group before the optimizer loaded the state. If a step fails with these settings,
            the loaded state and settings are not tested.
    """
    known: Any = optimizer
    if not cast("Any", type(optimizer)).__module__.startswith("torch.optim"):
        return ""
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


class _Sample(NamedTuple):
    """A parameter, or one element of it, with its state."""

    parameter: torch.Tensor
    state: Mapping[Any, Any]


def _is_tested(parameter: Any, state: Any) -> bool:
    is_plain = type(parameter) is torch.nn.Parameter or type(parameter) is torch.Tensor
    return is_plain and parameter.numel() > 0 and isinstance(state, Mapping) and bool(cast("Any", state))


def _sample_of(parameter: torch.Tensor, state: Mapping[Any, Any]) -> _Sample | None:
    """One element of a parameter, with the state of this element; a step does the same with all elements.

    If a tensor of the state has another shape, the sample is the whole parameter. The result is None if that is too
    large to be copied.
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
    """What decides whether a step with a state is possible: names, types, and the values of single numbers."""
    return tuple((name, _kind_of(value)) for name, value in state.items())


def _kind_of(value: Any) -> Any:
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
) -> dict[str, Any]:
    """Make one step with a copy of an optimizer and a copy of one parameter, whose gradient is zero.

    Args:
        optimizer: the optimizer.
        parameter: the parameter. Its values are not used.
        settings: the settings of the parameter's group.
        place: the number of the group, and the number of the parameter in it.
        state: the state of the parameter before the step, which the step changes; None for a first step.

    Returns:
        The state of the parameter after the step.
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
        fresh.grad = torch.zeros_like(parameter)
    group = {**settings, "params": [fresh]}
    copy.state, copy.param_groups = defaultdict[Any, Any](dict), [group]
    if state is not None:
        copy.state[fresh] = state
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
                copy.step()
    return dict(copy.state[fresh])


def copied(state: Any) -> Any:
    """A copy of a dictionary; any other value as it is."""
    return dict(cast("dict[Any, Any]", state)) if isinstance(state, dict) else state
