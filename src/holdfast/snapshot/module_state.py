"""State dicts of modules and optimizers: the same objects as long as nothing but the content of tensors changes."""

import operator
from collections import OrderedDict
from collections.abc import Iterable, Sized
from typing import Any, cast

import torch


class _Places:
    """Where tensors are and how they lie there: what can change of a tensor that stays the same object.

    Lists are compared as a whole: one look at each tensor at every save is what the time at a boundary goes to.

    Args:
        values: tensors, and whatever else, which is not looked at.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self._are = self._now()

    def _now(self) -> tuple[list[Any], ...]:
        tensors = self._tensors
        return (
            [tensor.data_ptr() for tensor in tensors],
            [tensor.shape for tensor in tensors],
            [tensor.stride() for tensor in tensors],
            [tensor.dtype for tensor in tensors],
        )

    def hold(self) -> bool:
        """Whether nothing has changed."""
        return self._now() == self._are


class ModuleState:
    """The state of one module over many saves.

    `state_dict` makes new tensors and walks the whole tree, which takes longer than all else at a boundary. As long
    as every submodule has the parameters and buffers that it had, the last one still holds: its tensors share the
    memory of the module's.

    Args:
        module: whose state.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._last: Any = None
        self._tables: list[Sized] = []
        self._counts: list[int] = []
        self._entries: list[tuple[dict[str, Any], str]] = []
        self._values: list[Any] = []
        self._places = _Places([])

    def state_dict(self) -> "OrderedDict[str, Any]":
        """What `module.state_dict()` returns."""
        if self._last is None or not self._holds():
            self._last = self.module.state_dict()
            self._remember()
        return self._last

    def _remember(self) -> None:
        self._tables, self._entries = [], []
        for module in self.module.modules():
            if _has_own_ways(module):
                self._counts = [-1]  # never holds
                return
            tables: list[dict[str, Any]] = [module._modules, module._parameters, module._buffers]  # pyright: ignore
            # What the module is given later, hooks or a state_dict of its own, makes one of these longer.
            others: list[Sized] = [
                module.__dict__,
                module._non_persistent_buffers_set,  # pyright: ignore
                module._state_dict_hooks,  # pyright: ignore
                module._state_dict_pre_hooks,  # pyright: ignore
            ]
            self._tables += [*tables, *others]
            self._entries += [(table, name) for table in tables for name in table]
        self._counts = [len(table) for table in self._tables]
        self._values = [table[name] for table, name in self._entries]
        self._places = _Places(self._values)

    def _holds(self) -> bool:
        if [len(table) for table in self._tables] != self._counts:
            return False
        values = [table.get(name) for table, name in self._entries]
        return all(map(operator.is_, values, self._values)) and self._places.hold()


class OptimizerState:
    """The state of one optimizer over many saves.

    Args:
        optimizer: whose state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._last: dict[Any, Any] | None = None
        self._keys: list[Any] = []
        self._names: list[list[Any]] = []
        self._values: list[Any] = []
        self._places = _Places([])

    def state_dict(self) -> dict[str, Any]:
        """What `optimizer.state_dict()` returns; its `state` is the last one's object while that holds."""
        packed: dict[str, Any] = self.optimizer.state_dict()
        state: Any = packed.get("state")
        if type(state) is not dict:
            return packed
        if self._last is None or not self._holds(cast("dict[Any, Any]", state)):
            self._remember(cast("dict[Any, Any]", state))
        if self._last is not None:
            packed["state"] = self._last
        return packed

    def _remember(self, state: dict[Any, Any]) -> None:
        self._last = None
        if not all(type(values) is dict for values in state.values()):
            return
        self._keys, self._names = list(state), [list(values) for values in state.values()]
        self._values = [value for values in state.values() for value in values.values()]
        if all(type(value) in _PLAIN for value in self._values):
            self._places = _Places(self._values)
            # Copies of the containers: an optimizer adds to its own.
            self._last = {key: dict(values) for key, values in state.items()}

    def _holds(self, state: dict[Any, Any]) -> bool:
        if list(state) != self._keys or not all(type(values) is dict for values in state.values()):
            return False
        if [list(values) for values in state.values()] != self._names:
            return False
        values = [value for values in state.values() for value in values.values()]
        return all(map(operator.is_, values, self._values)) and self._places.hold()


_PLAIN = {torch.Tensor, int, float, bool, str, type(None)}


def _has_own_ways(module: torch.nn.Module) -> bool:
    """Whether a module saves anything but its parameters and buffers."""
    kind = type(module)
    base = torch.nn.Module
    return bool(
        module._state_dict_hooks  # pyright: ignore
        or module._state_dict_pre_hooks  # pyright: ignore
        or "state_dict" in module.__dict__
        or kind.state_dict is not base.state_dict
        or kind._save_to_state_dict is not base._save_to_state_dict  # pyright: ignore
        or kind.get_extra_state is not base.get_extra_state
    )


__all__ = ["ModuleState", "OptimizerState"]
