"""Checks and completes what `torch.load` returns from a checkpoint that an attacker may have written.

`weights_only=True` restricts which functions a pickle calls, but not the arguments of the calls. These dangers
remain:

- numpy's arrays and types take a state from the pickle, and do not check it: if a type is larger than its state says,
  numpy reads and writes outside of the array. So stand-ins take the place of numpy's functions while a pickle is
  read, and `finish` makes the arrays afterwards.
- A container may contain itself, or sixty lists of two lists each may stand for 2^60 values. Code that copies such a
  container would never end. `finish` refuses the container.
- A tensor may have more elements than the file: with a stride of 0, one element stands for millions. A copy of this
  tensor, such as the next checkpoint, would have all these elements. `finish` refuses the tensor.
"""

import re
from typing import Any, cast

import numpy as np
import torch

_KIND = re.compile(r"[biufc][0-9]{1,2}")
_MOST_REPEATED_BYTES = 64 << 20
_MOST_REPEATS = 8
"""The tensors of a file may exceed their storages by 64 MiB or, if that is more, by eight times the size of the
storages. The limit is not zero, because a script may save an expanded mask beside its model."""
_MOST_VALUES = 1 << 27
"""The most values in a file. A container that is in several places is counted once for each place."""


class _SavedType:
    """Stands for a `numpy.dtype`: a type of numbers."""

    def __init__(self, text: str, *_: Any) -> None:
        if not _KIND.fullmatch(text):
            raise ValueError("an array is not made of numbers")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: Any) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])  # the rest says nothing more about a type of numbers


class _SavedArray:
    """Stands for a `numpy.ndarray`."""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, data = state
        array = np.frombuffer(data, kind.dtype).reshape(shape, order="F" if is_fortran else "C")
        self.array = array.copy(order="K")


def _reconstruct(*_: Any) -> _SavedArray:
    return _SavedArray()


def _scalar(kind: _SavedType, data: bytes) -> Any:
    return np.frombuffer(data, kind.dtype)[0]


_STAND_INS: dict[str, Any] = {
    "numpy.dtype": _SavedType,
    "numpy.ndarray": _SavedArray,
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}


def with_stand_ins(allowed: list[Any]) -> list[Any]:
    """What a pickle may name, for `torch.serialization.add_safe_globals`, with stand-ins for numpy's functions.

    Args:
        allowed: what else a pickle may name.
    """
    others = [one for one in allowed if _name_of(one) not in _STAND_INS and not _is_type_of_numpy(one)]
    return [*others, *((function, name) for name, function in _STAND_INS.items())]


def _name_of(allowed: Any) -> str:
    if isinstance(allowed, tuple):
        return str(cast("tuple[Any, str]", allowed)[1])
    return f"{allowed.__module__}.{allowed.__qualname__}"


def _is_type_of_numpy(allowed: Any) -> bool:
    return isinstance(allowed, type) and issubclass(allowed, np.dtype)


def finish(loaded: Any) -> Any:
    """Put numpy's arrays into the place of their stand-ins.

    Args:
        loaded: what `torch.load` has returned. Its lists and dictionaries are changed in place.

    Raises:
        ValueError: a container contains itself, there are too many values, or tensors are larger than the file.
        RecursionError: containers are nested too deep.
    """
    finisher = _Finisher()
    replacement, _ = finisher.visit(loaded)
    finisher.check_repeats()
    return replacement


class _Finisher:
    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any, int]] = {}
        """The id of a container → the container (kept, so that its id is not reused), its replacement, its size."""
        self._repeated_bytes = 0
        self._stored: dict[int, int] = {}
        """The address of each storage → its size."""

    def visit(self, value: Any) -> tuple[Any, int]:
        """The replacement of a value, and the number of values in it."""
        if isinstance(value, _SavedArray):
            return value.array, 1
        if isinstance(value, torch.Tensor):
            self._count(value)
            return value, 1
        if type(value) is not tuple and not isinstance(value, dict | list):
            return value, 1
        container = cast("Any", value)
        if id(container) not in self._done:
            self._done[id(container)] = container, None, 0
            self._done[id(container)] = container, *self._finished(container)
        _, replacement, size = self._done[id(container)]
        if not size:
            raise ValueError("a container contains itself")
        if size > _MOST_VALUES:
            raise ValueError(f"there are more than {_MOST_VALUES} values")
        return replacement, size

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.is_nested:
            size_bytes = tensor.numel() * tensor.element_size()
            storage = tensor.untyped_storage()
            self._stored[storage.data_ptr()] = storage.nbytes()
            self._repeated_bytes += max(0, size_bytes - storage.nbytes())

    def check_repeats(self) -> None:
        """Raise ValueError if the tensors are much larger than the data that the file stores for them."""
        if self._repeated_bytes > max(_MOST_REPEATED_BYTES, _MOST_REPEATS * sum(self._stored.values())):
            raise ValueError("the tensors are much larger than the data that the file stores for them")

    def _finished(self, container: Any) -> tuple[Any, int]:
        keys: Any = container.keys() if issubclass(type(container), dict) else range(len(container))
        pairs = [(key, container[key]) for key in keys]
        found = [self.visit(inner) for _, inner in pairs]
        size = 1 + sum(size for _, size in found)
        changed = {key: new for (key, old), (new, _) in zip(pairs, found, strict=True) if new is not old}
        if changed and type(container) is tuple:
            return tuple(new for new, _ in found), size
        for key, new in changed.items():
            container[key] = new
        return container, size
