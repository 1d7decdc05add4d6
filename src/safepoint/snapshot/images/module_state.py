"""State dicts of modules and optimizers. A save gets the same objects if only the content of tensors has changed.

Making and comparing state dicts takes most of the time at a boundary (between two optimizer steps). So the last state
dict is returned again while every tensor has the same address, type, shape and strides (`TensorPlaces`).
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sized
from typing import Any, cast

import torch


class ModuleState:
    """The state of one module over many saves.

    torch's own `state_dict` makes new tensors and walks the whole tree. At a boundary (between two optimizer steps)
    that takes longer than everything else. As long as every submodule has the same parameters and buffers, the last
    state dict is still valid: its tensors share the memory of the module's tensors.

    Args:
        module: the module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.is_sure = False
        """Whether the last call of `state_dict` returned the same object as the call before: no tensor has moved."""
        self._last: Any = None
        self._tables: list[Sized] = []
        self._counts: list[int] = []
        self._entries: list[tuple[dict[str, Any], str]] = []
        self._values: list[Any] = []
        self._ids: list[int] = []
        self._places = TensorPlaces([])

    def state_dict(self) -> "OrderedDict[str, Any]":
        """What `module.state_dict()` returns."""
        self.is_sure = self._last is not None and self._holds()
        if not self.is_sure:
            self._last = self.module.state_dict()
            self._remember()
        return cast("OrderedDict[str, Any]", self._last)

    def _remember(self) -> None:
        self._tables, self._entries = [], []
        for module in self.module.modules():
            if _has_custom_state(module):
                self._counts = [-1]  # no list of lengths equals [-1], so `_holds` returns False
                return
            tables: list[dict[str, Any]] = [module._modules, module._parameters, module._buffers]  # pyright: ignore
            # If a hook or a state_dict method is added later, one of these containers becomes longer, and the last
            # state dict is not used.
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
        self._ids = list(map(id, self._values))
        self._places = TensorPlaces(self._values)

    def _holds(self) -> bool:
        if [len(table) for table in self._tables] != self._counts:
            return False
        return [id(table.get(name)) for table, name in self._entries] == self._ids and self._places.hold()


class OptimizerState:
    """The state of one optimizer over many saves.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.is_sure = False
        """Whether the last call of `state_dict` returned the same `state` as the call before: no tensor has moved."""
        self._last: dict[Any, Any] | None = None
        self._indices: list[Any] = []
        self._objects: list[Any] = []
        self._ids: list[int] = []
        self._outline: list[Any] = []
        self._places = TensorPlaces([])

    def state_dict(self) -> dict[str, Any]:
        """What `optimizer.state_dict()` returns.

        `state` in it is the same object as in the last call, if nothing but the content of tensors has changed.
        """
        self.is_sure = _packs_as_torch(self.optimizer) and self._last is not None and self._holds()
        if not _packs_as_torch(self.optimizer):
            self._last = None
            return self.optimizer.state_dict()
        if not self.is_sure:
            self._remember()
        if self._last is None:
            return self.optimizer.state_dict()
        groups: list[dict[str, Any]] = []
        for group, indices in zip(self.optimizer.param_groups, self._indices, strict=True):
            groups.append({key: value for key, value in group.items() if key != "params"})
            groups[-1]["params"] = indices
        return {"state": self._last, "param_groups": groups}

    def _remember(self) -> None:
        self._last = None
        if not _has_plain_state(self.optimizer):
            return
        packed = self.optimizer.state_dict()
        state = cast("dict[Any, dict[Any, Any]]", packed["state"])
        values = [value for one in state.values() for value in one.values()]
        if not all(type(value) in _PLAIN for value in values):
            return
        # Keep references to the objects: while an object is referenced, no new object gets its id.
        self._objects = list(_objects_of(self.optimizer))
        self._ids = list(map(id, self._objects))
        self._outline = _outline_of(self.optimizer)
        self._places = TensorPlaces(values)
        self._indices = [group["params"] for group in packed["param_groups"]]
        # The dictionaries are copied, because the optimizer adds entries to its own dictionaries.
        self._last = {key: dict(one) for key, one in state.items()}

    def _holds(self) -> bool:
        return (
            _has_plain_state(self.optimizer)
            and list(map(id, _objects_of(self.optimizer))) == self._ids
            and _outline_of(self.optimizer) == self._outline
            and self._places.hold()
        )


def _has_plain_state(optimizer: Any) -> bool:
    return set(map(type, optimizer.state.values())) <= {dict}


def _objects_of(optimizer: Any) -> Iterable[Any]:
    """The parameters of an optimizer, and the keys and values of its state."""
    joined = itertools.chain.from_iterable
    values: Iterable[Any] = joined(map(_values, optimizer.state.values()))
    return itertools.chain(joined(group["params"] for group in optimizer.param_groups), optimizer.state, values)


def _outline_of(optimizer: Any) -> list[Any]:
    """The keys of each state, and the number of parameters in each group."""
    names: list[Any] = list(map(_tuple, optimizer.state.values()))
    return names + [len(group["params"]) for group in optimizer.param_groups]


_base_state_dict: Any = torch.optim.Optimizer.state_dict  # pyright: ignore
_values: Any = dict.values  # pyright: ignore
_tuple: Any = tuple
_PLAIN = {torch.Tensor, int, float, bool, str, type(None)}


def _packs_as_torch(optimizer: Any) -> bool:
    """Whether the optimizer has torch's own method `state_dict`, and no hooks that change its result."""
    return (
        optimizer.__class__.state_dict is _base_state_dict
        and "state_dict" not in optimizer.__dict__
        and not optimizer._optimizer_state_dict_pre_hooks
        and not optimizer._optimizer_state_dict_post_hooks
    )


def _has_custom_state(module: torch.nn.Module) -> bool:
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


# ---- places of tensors ---------------------------------------------------------------------------------------------

_data_ptr: Any = torch.Tensor.data_ptr


class TensorPlaces:
    """Remembers the addresses, types, shapes and strides of tensors, all of which can change in place.

    `TensorGuards`, which torch uses for compiled functions, compares types, shapes and strides of all tensors in one
    call. If torch does not have this class, types, shapes and strides are compared as Python lists.

    Args:
        values: tensors; other values are ignored.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self._addresses: list[int] = []
        try:
            self._addresses = self._addresses_now()
            self._have_same_layout = _guard_of_torch(self._tensors) or _guard_of_lists(self._tensors)
            # An empty view has no address. So if its storage is not empty, a change of the storage cannot be
            # detected.
            empty = [tensor for tensor, address in zip(self._tensors, self._addresses, strict=True) if not address]
            self._can_compare = not any(tensor.untyped_storage().nbytes() for tensor in empty)
        except RuntimeError:  # a sparse tensor, or one that wraps other tensors
            self._can_compare = False

    def _addresses_now(self) -> list[int]:
        return list(map(_data_ptr, self._tensors))

    def hold(self) -> bool:
        """Whether nothing but the content of the tensors has changed."""
        return self._can_compare and self._addresses_now() == self._addresses and self._have_same_layout()


def _guard_of_torch(tensors: list[torch.Tensor]) -> Callable[[], bool] | None:
    try:
        from torch._C._dynamo.guards import TensorGuards  # pyright: ignore

        make_guards: Any = TensorGuards
        guards = make_guards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        )
        if not guards.check(*tensors):
            return None
    except Exception:  # noqa: BLE001  not a public interface of torch: it may be missing or have other arguments
        return None
    return lambda: guards.check(*tensors)


def _guard_of_lists(tensors: list[torch.Tensor]) -> Callable[[], bool]:
    def now() -> list[Any]:
        return [(tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad) for tensor in tensors]

    before = now()
    return lambda: now() == before
