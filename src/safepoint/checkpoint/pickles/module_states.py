"""Makes modules load only data, and run no code, from the extra states in a checkpoint.

A module may save a state in a format of its own (`get_extra_state`), and load it with `set_extra_state`. For example,
the layers of NVIDIA's Transformer Engine pickle this state into a tensor of bytes. The checks of the file do not find
this pickle, because it looks like a tensor. But loading the pickle could run code.
"""

import contextlib
import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from typing import Any, cast

import torch

from safepoint.checkpoint.pickles.loading import refusal
from safepoint.checkpoint.pickles.temporary_attributes import temporarily
from safepoint.errors import printable

_VERSIONS = "_metadata"
"""The attribute of a state in which torch records the version of each module."""
_ALLOWED = {"collections.OrderedDict"}
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
    """While the block runs, restrict the pickles in the extra states that modules load in this thread.

    Such a pickle may name only what the script has allowed with `torch.serialization.add_safe_globals`. If a module
    may keep tensors of a state, it gets copies that are not mapped from a file; see `unmapped`.

    Args:
        where: the file or the checkpoint that the states come from; named in errors.

    Raises:
        CheckpointError: an extra state contains a pickle with another name.
    """
    kind: Any = torch.nn.Module
    original: Callable[..., Any] = kind.load_state_dict
    this_thread = threading.current_thread()

    def load_state_dict(self: torch.nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not this_thread:
            return original(self, state_dict, *args, **kwargs)
        if len(args) > 1 or kwargs.get("assign") or not only_copies(self):
            state_dict = unmapped(state_dict)
        with contextlib.ExitStack() as stack:
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
    return list(map(unmapped, cast("list[Any]", value))) if isinstance(value, list) else value


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
