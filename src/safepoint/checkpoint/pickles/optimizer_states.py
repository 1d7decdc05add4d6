"""Checks the optimizer states that are loaded from a checkpoint. An attacker may have written the checkpoint.

An optimizer keeps the tensors that it loads. Its fused kernels do not check that the memory of each tensor is as
large as the memory of the parameter. If a tensor is smaller or expanded, a step would read and write other memory of
the process. So while `checked_optimizers` runs, a loaded state is compared with the parameters, and with the state
that the optimizer itself creates.

The script's settings stay, such as `eps`, `max_iter` and `fused`. Only the settings that a scheduler or a script
changes while it trains are loaded (`_CHANGING`). A class that is not torch's may keep a part of its state among the
settings. For such an optimizer, only the settings that say how a step is computed stay (`_OWN`).
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from typing import Any, cast

import torch

from safepoint.checkpoint.pickles.loading import refusal
from safepoint.checkpoint.pickles.optimizer_steps import copied, fault_of_lbfgs, fault_of_step, step_of_copy
from safepoint.checkpoint.pickles.temporary_attributes import temporarily
from safepoint.errors import CheckpointError, SafepointError, printable
from safepoint.foundation.field_types import NUMBER

_OWN = ("fused", "foreach", "capturable", "differentiable", "maximize")
"""The settings that a checkpoint does not change, whatever the class of the optimizer is."""
_CHANGING = {"lr", "betas", "momentum", "weight_decay"}
"""The settings of torch's optimizers that may change in a training."""
_SCALARS = {"step", "mu_product", "mu", "eta", "RMS"}
"""The tensors of one element in the states of torch's optimizers."""
_ELEMENTWISE = {
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "sum",
    "square_avg",
    "grad_avg",
    "exp_inf",
    "state1",
    "state2",
}
"""The tensors that kernels read and write together with the parameter, element by element."""
_WITH_KERNELS = {"torch", "apex", "bitsandbytes", "deepspeed", "transformers"}
"""The packages whose optimizers have kernels without checks. A tensor that such an optimizer loads has to fit the
parameter, or has to be like the tensor that the optimizer itself creates."""


@contextlib.contextmanager
def checked_optimizers(where: object, *optimizers: torch.optim.Optimizer) -> Generator[None]:
    """While the block runs, check the state that any torch optimizer loads.

    Args:
        where: the file or the checkpoint that the states come from; named in errors.
        optimizers: the optimizers that the caller knows. They are also checked at the end of the block, because
            their classes may load states without the method of `torch.optim.Optimizer`.

    Raises:
        CheckpointError: a state has tensors or settings that do not fit. The optimizer gets its earlier state back.
    """
    kind: Any = torch.optim.Optimizer
    original = kind.load_state_dict
    before = [_Before(one) for one in optimizers]

    def load_state_dict(self: torch.optim.Optimizer, state_dict: Any) -> None:
        earlier = _Before(self)
        with earlier.restored_on_error():
            try:
                original(self, earlier.with_own_settings(state_dict, where))
                earlier.check(where)
            except (SafepointError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # hostile content may raise anything
                what = f"the state of its optimizer does not fit ({type(error).__name__}: {error})"
                raise _refusal(where, printable(what)) from error

    with temporarily(kind, load_state_dict=load_state_dict):
        yield
    for one in before:
        with one.restored_on_error():
            one.check(where)


@contextlib.contextmanager
def with_own_groups(where: object, *optimizers: torch.optim.Optimizer) -> Generator[None]:
    """Let other code replace the groups of optimizers in the block, by groups from a checkpoint.

    The settings that say how a step is computed stay those of the script, as in `checked_optimizers`.

    Args:
        where: the file or the checkpoint that the groups come from; named in errors.
        optimizers: the optimizers whose groups may be replaced.

    Raises:
        CheckpointError: a setting of a group does not fit, or a parameter of the script is left out or repeated. The
            optimizer gets its earlier groups back.
    """
    before = [_Before(one) for one in optimizers]
    yield
    for one in before:
        with one.restored_on_error():
            one.check_groups(where)


class _Before:
    """An optimizer, with the state and the settings that it had before it loaded a state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._state = {key: copied(one) for key, one in self._optimizer.state.items()}
        self._groups: list[dict[str, Any]] = self._optimizer.param_groups
        is_known = cast("Any", type(optimizer)).__module__.startswith("torch.optim")
        self._is_known = is_known
        self._own = {*_OWN, *(self._optimizer.defaults.keys() - _CHANGING if is_known else ())}
        """The names of the settings that stay."""
        self._is_known = is_known
        self._settings = [{name: one for name, one in group.items() if name != "params"} for group in self._groups]

    @contextlib.contextmanager
    def restored_on_error(self) -> Generator[None]:
        """If the block raises an error, restore the earlier state and settings of the optimizer."""
        try:
            yield
        except BaseException:
            # The settings are put back one by one, because some classes change their dictionaries in place.
            self._optimizer.__dict__.update(state=defaultdict[Any, Any](dict, self._state), param_groups=self._groups)
            for group, own in zip(self._groups, self._settings, strict=True):
                group.update(own)
            raise

    def with_own_settings(self, state: Any, where: object) -> Any:
        """A loaded state, in which this optimizer's values replace the settings that stay. An invalid state is
        returned unchanged.

        Raises:
            CheckpointError: a setting has a value of another kind.
        """
        if not isinstance(state, Mapping):
            return state
        saved = cast("Mapping[str, Any]", state)
        groups: Any = saved.get("param_groups")
        if not isinstance(groups, list) or len(cast("list[Any]", groups)) != len(self._settings):
            return saved
        pairs = list(zip(cast("list[Any]", groups), self._settings, strict=True))
        if not all(isinstance(group, Mapping) for group, _ in pairs):
            return saved
        for group, own in pairs:
            self._check_settings(group, own, where)
        return {**saved, "param_groups": [_with_own(group, own, self._own) for group, own in pairs]}

    def check_groups(self, where: object) -> None:
        """Check groups that have replaced those of the optimizer. Groups may have been added.

        Raises:
            CheckpointError: a setting does not fit, or a parameter is left out or repeated.
        """
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        if groups is self._groups:
            return
        parameters = [id(one) for group in groups for one in group["params"]]
        earlier = {id(one) for group in self._groups for one in group["params"]}
        if len(groups) < len(self._groups) or len(set(parameters)) < len(parameters) or earlier - set(parameters):
            raise _refusal(where, "its groups of parameters leave out or repeat a parameter of the optimizer")
        added = {**self._optimizer.defaults, **self._settings[0]}
        self._keep_settings(where, self._settings + [added] * (len(groups) - len(self._settings)))

    def check(self, where: object) -> None:
        """Check the state and the settings that the optimizer has loaded.

        Raises:
            CheckpointError: the state or a setting does not fit.
        """
        self._keep_settings(where, self._settings)
        strays = [repr(key) for key in self._optimizer.state if not isinstance(key, torch.Tensor)]
        if self._is_known and strays:
            # The optimizer would keep this state for ever, and each checkpoint would contain it.
            raise _refusal(where, f"its optimizer has no parameter {printable(strays[0])[:80]}")
        _States(self._optimizer, where).check()
        fault = fault_of_step(self._optimizer, self._settings)
        if fault:
            raise _refusal(where, fault)

    def _check_settings(self, group: Mapping[str, Any], own: Mapping[str, Any], where: object) -> None:
        for name, setting in own.items():
            is_used = name in _CHANGING or (self._is_known and name not in self._own)
            if name in group and not _fits(group[name], setting, is_used=is_used):
                raise _refusal(where, f"the setting {name!r} of its optimizer is {_shown(group[name])}")

    def _keep_settings(self, where: object, settings: list[dict[str, Any]]) -> None:
        for index, (group, own) in enumerate(zip(self._optimizer.param_groups, settings, strict=True)):
            self._check_settings(group, own, where)
            for name, setting in own.items():
                if name in group:
                    group[name] = as_float(group[name], setting)
            is_added = index >= len(self._settings)
            # A group that was added has only the settings that the script has given it.
            lacks = own.keys() - group.keys() - self._own if is_added else set[str]()
            changed = _with_own(group, {name: one for name, one in own.items() if name not in lacks}, self._own)
            for name in group.keys() - changed.keys():
                del group[name]
            group.update(changed)


class _States:
    """The check of the tensors of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, where: object) -> None:
        self._optimizer: Any = optimizer
        self._where = where
        kinds = [kind for kind in cast("Any", type(optimizer)).__mro__ if kind not in (torch.optim.Optimizer, object)]
        self._loads_itself = hasattr(optimizer, "init_state")
        """Whether the class loads states with code of its own, as the optimizers of bitsandbytes do. Then the tensors
        keep their types."""
        packages = {kind.__module__.partition(".")[0] for kind in kinds}
        self._has_kernels = self._loads_itself or bool(packages & _WITH_KERNELS)
        self._created: dict[Any, dict[str, Any]] = {}
        """The state that the optimizer creates for a parameter, by the parameter's group, shape, type and device."""

    def check(self) -> None:
        """Raise CheckpointError if a tensor does not fit its parameter."""
        if isinstance(self._optimizer, torch.optim.LBFGS):
            fault = fault_of_lbfgs(self._optimizer)
            if fault:
                raise _refusal(self._where, fault)
            return
        number = 0
        for group_index, group in enumerate(self._optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                state: Any = self._optimizer.state.get(parameter, {})
                if not isinstance(state, Mapping):
                    raise _refusal(
                        self._where, f"the state of its optimizer for the parameter {number} is not a dictionary"
                    )
                for name, value in cast("Mapping[Any, Any]", state).items():
                    for tensor in _tensors_in(value):
                        fault = self._fault(name, tensor, parameter, (group_index, index))
                        if fault:
                            what = f"{printable(str(name))!r} of its optimizer, for the parameter {number}, {fault}"
                            raise _refusal(self._where, what)
                number += 1

    def _fault(self, name: Any, tensor: Any, parameter: torch.Tensor, place: tuple[int, int]) -> str:
        """Why a tensor does not fit; empty if it fits."""
        here, there = _local(tensor), _local(parameter)
        # This rank has no part of the parameter, or DeepSpeed has moved the parameter to a disk.
        if not there.numel():
            return ""
        is_scalar = name in _SCALARS and here.numel() == 1
        if type(here) is not torch.Tensor and type(here) is not torch.nn.Parameter:
            # The script has allowed the class of this tensor, such as torchao's quantized tensors. The methods of the
            # class check sizes.
            fits, is_whole = here.shape == there.shape, True
        elif is_scalar or (here.numel() == there.numel() and not self._loads_itself):
            fits, is_whole = True, _is_whole(here)
        else:
            created = self._create(parameter, place).get(name)
            is_tensor = isinstance(created, torch.Tensor)
            fits = is_tensor and created.shape == here.shape and created.dtype == here.dtype
            if not fits and not self._has_kernels and name not in _ELEMENTWISE:
                return ""  # the script defines the class of the optimizer, and torch's operations check sizes
            is_whole = _is_whole(here)
        if not fits:
            return f"has the shape {tuple(here.shape)} and the type {here.dtype}, which do not fit the parameter"
        return "" if is_whole else "is expanded, or has gaps in memory, or no memory"

    def _create(self, parameter: torch.Tensor, place: tuple[int, int]) -> dict[str, Any]:
        """The state that the optimizer creates for a parameter like `parameter`; empty if it is not known."""
        key = place[0], parameter.shape, parameter.dtype, parameter.device
        if key not in self._created:
            try:
                group = self._optimizer.param_groups[place[0]]
                self._created[key] = step_of_copy(self._optimizer, parameter, group, place)
            except Exception:  # noqa: BLE001  an optimizer may need more than a gradient; then nothing is known
                self._created[key] = {}
        return self._created[key]


def _with_own(group: Mapping[str, Any], own: Mapping[str, Any], stay: Collection[str]) -> dict[str, Any]:
    """A group of a loaded state, in which the optimizer's values replace the settings that stay, and those that the
    state lacks. The order of the settings stays, so that files have the same bytes."""
    kept = {name: one for name, one in group.items() if name not in stay or name in own}
    return {**kept, **{name: one for name, one in own.items() if name in stay or name not in kept}}


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        mapping = cast("Any", value)
        for one in cast("Iterable[Any]", mapping.values() if isinstance(value, Mapping) else mapping):
            yield from _tensors_in(one)


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a sharded tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether each element has its own place in memory, without gaps, as kernels expect."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= needed


def _fits(value: Any, own: Any, *, is_used: bool) -> bool:
    """Whether a setting from a checkpoint can replace the optimizer's own setting.

    Args:
        value: the setting of the checkpoint.
        own: the optimizer's own setting.
        is_used: whether torch's optimizers or schedulers compute with the setting. If not, the script decides which
            values it may have.
    """
    if isinstance(value, torch.Tensor):
        return _tensor_fits(value, own, is_used=is_used)
    if own is None or value is None:
        return own is None or not is_used
    if isinstance(own, list | tuple):
        of_own = cast("list[Any]", own)
        is_list = isinstance(value, list | tuple) and len(cast("list[Any]", value)) == len(of_own)
        pairs = zip(cast("list[Any]", value) if is_list else [], of_own, strict=False)
        return is_list and all(_fits(one, other, is_used=is_used) for one, other in pairs)
    if type(value) is not bool and isinstance(own, bool | int | float | torch.Tensor):
        is_number = NUMBER.fits(value) and not math.isnan(value)
        return is_number and not (is_used and math.isinf(value) and not math.isinf(own))
    return isinstance(value, type(own)) if isinstance(own, str) else True


def _tensor_fits(value: torch.Tensor, own: Any, *, is_used: bool) -> bool:
    """See `_fits`. A scheduler fills such a tensor with the next learning rate."""
    is_whole = value.layout is torch.strided and not (value.is_meta or value.is_quantized or value.is_nested)
    if not is_whole or bool(value.isnan().any()):
        return False
    shape = own.shape if isinstance(own, torch.Tensor) else torch.Size()
    if not is_used:
        return value.numel() == 1 or value.shape == shape
    is_infinite = bool(value.isinf().any()) and not (isinstance(own, float | torch.Tensor) and math.isinf(own))
    has_gradient = value.requires_grad and not (isinstance(own, torch.Tensor) and own.requires_grad)
    return value.shape == shape and value.is_floating_point() and not is_infinite and not has_gradient


def as_float(value: Any, own: Any) -> Any:
    """A loaded number as a float, if the script's own number is a float.

    Python computes a power of whole numbers exactly: in a step, `gamma ** count` could take days and fill the memory.

    Args:
        value: a number, or a list or a tuple of numbers; any other value is returned as it is.
        own: the script's value, which `value` replaces.
    """
    if type(own) is float and type(value) is int:
        return float(value)
    if isinstance(own, list | tuple) and type(value) in {list, tuple}:
        numbers, of_own = cast("list[Any]", value), cast("list[Any]", own)
        if len(numbers) == len(of_own):
            return type(numbers)(map(as_float, numbers, of_own))
    return value


def _shown(value: Any) -> str:
    is_short = isinstance(value, bool | int | float | str) and len(repr(value)) <= 80
    return printable(repr(value)) if is_short else f"a value of type {type(value).__name__}"


def _refusal(where: object, what: str) -> CheckpointError:
    return refusal(where, what, "otherwise create the optimizer as in the run that wrote the checkpoint")
