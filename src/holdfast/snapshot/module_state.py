"""State dicts of modules and optimizers: the same objects as long as nothing but the content of tensors changes."""

from collections import OrderedDict
from collections.abc import Sized
from typing import Any, cast

import torch


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
        self._tables: list[tuple[Sized, int]] = []
        self._known: list[tuple[dict[str, Any], str, Any, Any]] = []

    def state_dict(self) -> "OrderedDict[str, Any]":
        """What `module.state_dict()` returns."""
        if self._last is None or not self._holds():
            self._last = self.module.state_dict()
            self._remember()
        return self._last

    def _remember(self) -> None:
        self._tables.clear()
        self._known.clear()
        for module in self.module.modules():
            if _has_own_ways(module):
                self._tables.append(((), -1))  # never holds
                return
            tables: list[dict[str, Any]] = [module._modules, module._parameters, module._buffers]  # pyright: ignore
            # What the module is given later, hooks or a state_dict of its own, makes one of these longer.
            others: list[Sized] = [
                module.__dict__,
                module._non_persistent_buffers_set,  # pyright: ignore
                module._state_dict_hooks,  # pyright: ignore
                module._state_dict_pre_hooks,  # pyright: ignore
            ]
            self._tables += [(table, len(table)) for table in (*tables, *others)]
            self._known += [(table, name, value, _place(value)) for table in tables for name, value in table.items()]

    def _holds(self) -> bool:
        return all(len(table) == count for table, count in self._tables) and all(
            table.get(name) is known and (place is None or _place(known) == place)
            for table, name, known, place in self._known
        )


class OptimizerState:
    """The state of one optimizer over many saves.

    Args:
        optimizer: whose state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._last: dict[Any, Any] | None = None
        self._items: list[tuple[Any, list[tuple[Any, Any, Any]]]] = []

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
        self._items = []
        for key, values in state.items():
            if type(values) is not dict:
                return
            items = [(name, one, _place(one)) for name, one in cast("dict[Any, Any]", values).items()]
            if not all(type(one) in _PLAIN for _, one, _ in items):
                return
            self._items.append((key, items))
        # Copies of the containers: an optimizer adds to its own.
        self._last = {key: dict(values) for key, values in state.items()}

    def _holds(self, state: dict[Any, Any]) -> bool:
        if len(state) != len(self._items):
            return False
        for (key, values), (known_key, known) in zip(state.items(), self._items, strict=True):
            if key != known_key or len(values) != len(known):
                return False
            for name, one, place in known:
                now = values.get(name)
                if now is not one or (place is not None and _place(now) != place):
                    return False
        return True


_PLAIN = {torch.Tensor, int, float, bool, str, type(None)}


def _place(value: Any) -> tuple[Any, ...] | None:
    """What can change of a tensor that stays the same object."""
    if not isinstance(value, torch.Tensor):
        return None
    return value.data_ptr(), value.shape, value.stride(), value.dtype


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
