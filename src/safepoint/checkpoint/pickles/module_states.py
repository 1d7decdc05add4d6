"""Checks the states of modules that are loaded from a checkpoint. An attacker may have written the checkpoint.

A module may save a state in a format of its own (`get_extra_state`), and load it with `set_extra_state`. For example,
the layers of NVIDIA's Transformer Engine pickle this state into a tensor of bytes. The checks of the file do not find
this pickle, because it looks like a tensor. But loading the pickle could run code. So such a pickle may name only
what the script has allowed.

A module of torch copies a loaded tensor into its own tensor, and torch compares the shapes. A module with code of its
own for that, such as the metrics of torchmetrics, may make an attribute from any loaded value. So the attributes of
such a module are compared before and after: a value of another kind is refused, with which a later step would fail.
Values of the same kind are not compared.
"""

import contextlib
import functools
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, cast

import torch

from safepoint.checkpoint.pickles.loading import refusal
from safepoint.checkpoint.pickles.temporary_attributes import temporarily
from safepoint.errors import printable
from safepoint.foundation.field_types import MOST_COUNT

_VERSIONS = "_metadata"
"""The attribute of a state in which torch records the version of each module."""
_ALLOWED = {"collections.OrderedDict"}
_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""The attributes that every module has, such as the dictionaries of its hooks."""
_COUNTS = {"num_batches_tracked", "n_averaged"}
"""The buffers with which torch's modules count, and by which they divide."""
_ORDINARY = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_WHOLE = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
_OTHERWISE = "otherwise create the module as in the run that wrote the checkpoint"
_running = threading.local()
"""Its attribute `refuse` is called with each name in the pickles that this thread loads. Only `_restricted` sets this
attribute."""


def only_copies(module: torch.nn.Module) -> bool:
    """Whether a module copies the tensors of a loaded state and keeps none of them, as torch's modules do.

    A module that has a state of its own, or a hook, may keep them.
    """
    kind: Any = torch.nn.Module
    for one in module.modules():
        own, hooks = cast("Any", type(one)), cast("Any", one)
        copies = own._load_from_state_dict is kind._load_from_state_dict or own.__module__.startswith("torch.nn.")
        has_hooks = bool(hooks._load_state_dict_pre_hooks or hooks._load_state_dict_post_hooks)
        if not copies or has_hooks or own.set_extra_state is not kind.set_extra_state:
            return False
        if own.load_state_dict is not kind.load_state_dict and not own.__module__.startswith("torch.nn."):
            return False
    return True


def checked_modules(where: object) -> contextlib.AbstractContextManager[None]:
    """While the block runs, check the states that modules load in this thread.

    A pickle in an extra state may name only what the script has allowed with `torch.serialization.add_safe_globals`.
    If a module may keep tensors of a state, it gets copies that are not mapped from a file; see `unmapped`. If such a
    module has another kind of value in an attribute after the load, it gets its earlier attributes back.

    Args:
        where: the file or the checkpoint that the states come from; named in errors.

    Raises:
        CheckpointError: an extra state contains a pickle with another name, a value is of another kind than in the
            script, or a module could not have counted so far.
    """
    kind: Any = torch.nn.Module
    original: Callable[..., Any] = kind.load_state_dict
    this_thread = threading.current_thread()

    def load_state_dict(self: torch.nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not this_thread:
            return original(self, state_dict, *args, **kwargs)
        _check_counts(state_dict, where)
        has_own_code = not only_copies(self)
        if len(args) > 1 or kwargs.get("assign") or has_own_code:
            state_dict = unmapped(state_dict)
        with contextlib.ExitStack() as stack:
            if has_own_code:
                stack.enter_context(_compared(self, where))
            for module in self.modules():
                if cast("Any", type(module)).set_extra_state is not kind.set_extra_state:
                    stack.enter_context(_guarded(module, where))
            return original(self, state_dict, *args, **kwargs)

    return temporarily(kind, load_state_dict=load_state_dict)


def unmapped(value: Any) -> Any:
    """A copy of a state in which no tensor is mapped from a file.

    If another person writes to the file, the values of a mapped tensor change. If the file is truncated, a read of
    the tensor ends the process.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.device.type == "cpu" else value
    if isinstance(value, dict):
        state = cast("dict[Any, Any]", value)
        copied: dict[Any, Any] = OrderedDict[Any, Any]() if isinstance(state, OrderedDict) else {}
        copied.update((name, unmapped(one)) for name, one in state.items())
        if isinstance(copied, OrderedDict) and hasattr(state, _VERSIONS):
            setattr(copied, _VERSIONS, getattr(state, _VERSIONS))
        return copied
    if type(value) in {list, tuple}:
        return type(value)(map(unmapped, cast("list[Any]", value)))
    return value


def _check_counts(state: Any, where: object) -> None:
    """Refuse counts by which a module could not divide, such as a BatchNorm that has tracked -1 batches."""
    for name, value in cast("Mapping[Any, Any]", state).items() if isinstance(state, Mapping) else ():
        is_count = str(name).rpartition(".")[2] in _COUNTS
        # Weights may be tensors of other classes. FSDP's ShardedTensor raises an error when it is asked for its size.
        is_number = is_count and type(value) in {torch.Tensor, torch.nn.Parameter} and value.numel() == 1
        if is_number and not value.is_meta and value.layout is torch.strided and not value.is_complex():
            count = float(value)
            if not (math.isfinite(count) and 0 <= count <= MOST_COUNT):
                raise refusal(where, f"{printable(repr(str(name)))} of its module is {count:g}, which is no count")


@contextlib.contextmanager
def _compared(module: torch.nn.Module, where: object) -> Generator[None]:
    """Compare the attributes of a module, and of the modules in it, before and after the block.

    Raises:
        CheckpointError: an attribute is of another kind. All modules get their earlier attributes back.
    """
    before = [_Before(one) for one in module.modules()]
    try:
        yield
        for one in before:
            one.check(where)
    except BaseException:
        for one in before:
            one.restore()
        raise


class _Before:
    """A module, with the attributes, parameters and buffers that it had before it loaded a state."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module: Any = module
        states: Any = getattr(module, "_defaults", None) if _is_metric(module) else None
        self._states: Mapping[str, Any] = states if isinstance(states, Mapping) else {}
        """The states of a metric of torchmetrics, with their initial values."""
        self._is_free = cast("Any", type(module)).set_extra_state is not cast("Any", torch.nn.Module).set_extra_state
        """Whether a method of the script decides what becomes of the values in a state. Then only tensors are
        compared."""
        self._values = [dict(place) for place in self._places()]
        values = (one for place in self._values for one in place.values())
        self._lists: list[tuple[list[Any], list[Any]]] = [(one, one.copy()) for one in values if type(one) is list]
        self._forms = [{name: _Form(one) for name, one in place.items()} for place in self._values]

    def _attributes(self) -> dict[str, Any]:
        return cast("dict[str, Any]", vars(self._module))

    def _places(self) -> list[dict[str, Any]]:
        module = self._module
        own = {name: one for name, one in self._attributes().items() if name not in _OF_TORCH}
        return [own, module._parameters, module._buffers]

    def restore(self) -> None:
        """Put the earlier values back."""
        module = self._module
        places: list[dict[str, Any]] = [self._attributes(), module._parameters, module._buffers]
        for place, values in zip(places, self._values, strict=True):
            for name in [name for name in place if name not in values and name not in _OF_TORCH]:
                del place[name]
            place.update(values)
        for one, content in self._lists:
            one[:] = content

    def check(self, where: object) -> None:
        """Raise CheckpointError if an attribute of the module is of another kind."""
        fault = self._fault()
        if fault:
            raise refusal(where, fault, _OTHERWISE)

    def _fault(self) -> str:
        kind = printable(cast("Any", type(self._module)).__name__)
        places = self._places()
        for forms, place in zip(self._forms, places, strict=True):
            for name, form in forms.items():
                value = place.get(name)
                is_state = name in self._states
                if name not in place and any(name in other for other in places):
                    fault = "is a parameter or a buffer, or no longer one"
                elif is_state:
                    fault = form.fault_of_state(value, is_joined=self._is_joined(name))
                else:
                    fault = form.fault(value, is_free=self._is_free, is_resized=_is_of_torch(self._module))
                if fault:
                    return f"{printable(repr(name))} of its {kind} {fault}, unlike in the script"
        return ""

    def _is_joined(self, name: str) -> bool:
        """Whether torchmetrics concatenates the tensors of a list."""
        reductions: dict[str, Any] = self._attributes().get("_reductions", {})
        return getattr(reductions.get(name), "__name__", "") == "dim_zero_cat"


class _Form:
    """What decides whether a step can use another value in the place of a value.

    Args:
        value: the value; it may change later.
    """

    def __init__(self, value: Any) -> None:
        self._kind = _kind_of(value)
        self._is_plain = _is_plain(value)
        tensor: Any = value if self._kind is torch.Tensor and self._is_plain else torch.zeros(())
        self._shape, self._dtype, self._is_meta = tensor.shape, tensor.dtype, tensor.is_meta

    def fault(self, value: Any, *, is_free: bool, is_resized: bool) -> str:
        """Why a value cannot replace the value in an attribute of any module; empty if it can.

        A module may give a tensor another size when it loads a state. It may also drop a value that it computes
        again.

        Args:
            value: the value.
            is_free: whether only tensors are compared.
            is_resized: whether the module may also change the number of dimensions.
        """
        if self._kind is None or value is None:
            return ""
        if self._kind is not torch.Tensor:
            is_number = self._kind is float and isinstance(value, torch.Tensor) and value.numel() == 1
            is_alike = is_free or is_number or _kind_of(value) is self._kind
            return "" if is_alike else f"is a value of type {type(value).__name__}"
        if not self._is_plain:
            return ""  # a library's own tensor, or a parameter without memory, may become anything
        fault = self._fault_of_tensor(value)
        if not fault and not is_resized and self._shape.numel() and value.dim() != len(self._shape):
            fault = f"has the shape {tuple(value.shape)}"
        return fault

    def fault_of_state(self, value: Any, *, is_joined: bool) -> str:
        """Why a value cannot replace a state of a metric; empty if it can.

        A state with one element may get more elements with the first update, because the update adds a larger tensor.

        Args:
            value: the value.
            is_joined: whether the metric concatenates the tensors of a list.
        """
        if self._kind is list:
            return _fault_of_list(value, is_joined=is_joined)
        if self._kind is not torch.Tensor or not self._is_plain:
            return ""
        fault = self._fault_of_tensor(value)
        if not fault and self._shape.numel() > 1 and _sizes(value.shape) != _sizes(self._shape):
            fault = f"has the shape {tuple(value.shape)}"
        return fault

    def _fault_of_tensor(self, value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return f"is a value of type {type(value).__name__}"
        if value.layout is not torch.strided or value.is_nested or (value.is_meta and not self._is_meta):
            return "is a tensor without memory of its own, such as a sparse tensor"
        return "" if _is_alike(value.dtype, self._dtype) else f"has the type {value.dtype}"


def _is_of_torch(module: torch.nn.Module) -> bool:
    """Whether torch itself has defined the class of a module. Observers of torch get the shapes of a loaded state."""
    return cast("Any", type(module)).__module__.startswith("torch.")


def _is_metric(module: Any) -> bool:
    kinds: Iterable[type] = type(module).__mro__
    return any(kind.__module__.startswith("torchmetrics.") for kind in kinds)


def _kind_of(value: Any) -> Any:
    """The kind of a value; None if it can become anything, or if its kind is not compared."""
    kinds: dict[Any, Any] = {
        torch.Tensor: torch.Tensor, list: list, tuple: list, Mapping: Mapping, str: str, int: float, float: float
    }  # fmt: skip
    return next((kind for one, kind in kinds.items() if isinstance(value, one)), None)


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor or type(value) is torch.nn.Parameter


def _is_alike(dtype: torch.dtype, own: torch.dtype) -> bool:
    """Whether a tensor may have a type in place of `own`. A sum of whole numbers may have become a float."""
    if dtype.is_complex and own.is_complex:
        return True
    return dtype == own or (dtype in _ORDINARY and own in _ORDINARY | _WHOLE) or (dtype in _WHOLE and own in _WHOLE)


def _sizes(shape: torch.Size) -> list[int]:
    return [size for size in shape if size != 1]


def _fault_of_list(value: Any, *, is_joined: bool) -> str:
    """Why a value cannot be a list state of a metric; empty if it can."""
    if type(value) is not list:
        return f"is a value of type {type(value).__name__}"
    dimensions = set[int]()
    for one in cast("list[Any]", value):
        if isinstance(one, torch.Tensor):
            if one.layout is not torch.strided or one.is_meta or one.is_quantized or one.is_nested:
                return "has a tensor without memory of its own, such as a sparse tensor"
            dimensions.add(max(one.dim(), 1))
        elif is_joined or not isinstance(one, list | tuple):
            return f"has a value of type {type(one).__name__}"
    return "has tensors with different numbers of dimensions" if is_joined and len(dimensions) > 1 else ""


def _guarded(module: Any, where: object) -> contextlib.AbstractContextManager[None]:
    original: Callable[[Any], None] = module.set_extra_state

    def set_extra_state(state: Any) -> None:
        with _restricted(where, cast("Any", type(module)).__name__):
            original(state)

    return temporarily(module, set_extra_state=set_extra_state)


@contextlib.contextmanager
def _restricted(where: object, kind: str) -> Generator[None]:
    allowed = _ALLOWED | names_of_script()

    def refuse(name: str) -> None:
        if name not in allowed:
            raise refusal(
                where,
                f"the extra state of a {printable(kind)} is a pickle that names {printable(name)}, and loading it "
                "could run code",
                "otherwise call torch.serialization.add_safe_globals in the script, with the name in the message",
            )

    _install_hook()
    with temporarily(_running, refuse=refuse):
        yield


@functools.cache
def _install_hook() -> None:
    """Install a hook that Python calls with each name that a pickle contains, before the name is looked up.

    Modules call `pickle` in different ways, but each way causes this event. A hook stays until the process ends, so
    it is installed only when it is needed for the first time.
    """
    sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        refuse: Callable[[str], None] | None = getattr(_running, "refuse", None)
        if refuse is not None:
            refuse(".".join(map(str, arguments)))


def names_of_script() -> set[str]:
    """The names of the classes and functions that the script has allowed with
    `torch.serialization.add_safe_globals`."""
    serialization: Any = torch.serialization
    given: list[Any] = serialization.get_safe_globals()
    # An entry is a class, or a pair of a class and the name that stands for it in a file.
    pairs: list[tuple[Any, Any]] = [one if isinstance(one, tuple) else (one, None) for one in given]
    return {name or f"{one.__module__}.{one.__qualname__}" for one, name in pairs}
