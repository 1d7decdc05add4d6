"""Checks and completes the values that `torch.load` reads from a checkpoint. An attacker may have written the file.

`weights_only=True` restricts which functions a pickle calls, but not the arguments of the calls. These dangers
remain:

- numpy's arrays and types take a state from the pickle, and do not check it. For example, the state may give a type a
  size that is too small. Then numpy reads and writes outside of the array. So stand-ins replace numpy's functions
  while a pickle is read, and `finish` makes the arrays afterwards.
- A container may contain itself. Or each of sixty lists may contain the next list twice: then the first list stands
  for 2^60 values. Code that copies such a container would never end. `finish` refuses the container.
- A tensor may have more elements than the file: with a stride of 0, one element stands for millions. A copy of this
  tensor, such as the next checkpoint, would have all these elements. `finish` refuses the tensor.
- An attribute of a dictionary may hide a method, such as `keys`. Code that reads the dictionary, including this
  module, would not see its content. `finish` refuses such a dictionary.
- There are values that no later `torch.load` accepts, such as a stand-in that the pickle names, but does not
  call. Other values cannot be saved, such as a tensor whose attributes hide its methods. The run would train with
  such a value, and its next checkpoints could not be loaded or written. `finish` refuses these values, wherever a
  pickle can put them.
- The state of a module may contain an instruction to replace the parameters of the module by the tensors of the
  state. `load_state_dict` follows this instruction. These tensors may be expanded or share their memory. The fused
  kernels of optimizers do not check that, and would write to other memory of the process. Also, an existing optimizer
  would continue to train the replaced parameters. `finish` removes this instruction.
- torch does not check the position in the state of a random number generator, and would read beyond the state.
  `finish` refuses a tensor that is such a state.
"""

import enum
import functools
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch

_KIND = re.compile(r"[biufc][0-9]{1,2}")
_MOST_REPEATED_BYTES = 64 << 20
_MOST_REPEATS = 8
"""The tensors of a file may exceed their storages by 64 MiB or, if that is more, by eight times the size of the
storages. The limit is not zero, because a script may save an expanded mask beside its model."""
_OF_MODULE = "_metadata"
"""The attribute of a module's state in which torch records the version of each submodule."""
_REPLACES = "assign_to_params_buffers"
"""The entry with which `load_state_dict` replaces the parameters of a submodule. torch itself sets it only while it
loads a state with `assign=True`."""
_GENERATOR_BYTES = {5048, 5056}
"""The sizes of the state of torch's generator for the CPU, in its earlier and in its present layout."""
_NUM_WORDS = 624
"""How many random numbers the state of the Mersenne Twister has."""
_MOST_VALUES = 1 << 27
"""The most values in a file. A container that is in several places is counted once for each place."""


class _SavedType:
    """Stands for a `numpy.dtype`: a type of numbers."""

    def __init__(self, text: str, *_: Any) -> None:
        if not _KIND.fullmatch(text):
            raise ValueError("an array is not made of numbers")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: Any) -> None:
        # For a type of numbers, only the byte order in the state matters.
        self.dtype = self.dtype.newbyteorder(state[1])


class _SavedArray:
    """Stands for a `numpy.ndarray`."""

    array: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, data = state
        array = np.frombuffer(data, kind.dtype).reshape(shape, order="F" if is_fortran else "C")
        self.array = array.copy(order="K")


def _reconstruct(*_: Any) -> _SavedArray:
    return _SavedArray()


def _scalar(kind: _SavedType, data: bytes) -> Any:
    return np.frombuffer(data, kind.dtype)[0]


def _empty_bytes() -> bytes:
    return b""


_STAND_INS: dict[str, Any] = {
    # pickle writes `b""` as a call of `bytes`, which torch refuses. It writes all other bytes with `_codecs.encode`.
    "builtins.bytes": _empty_bytes,
    "numpy.dtype": _SavedType,
    "numpy.ndarray": _SavedArray,
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}


def with_stand_ins(allowed: list[Any]) -> list[Any]:
    """The classes and functions that a pickle may name, as `torch.serialization.add_safe_globals` receives them.

    Stand-ins replace numpy's functions.

    Args:
        allowed: the other classes and functions that a pickle may name.
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
    """Replace stand-ins by numpy's arrays and types, and check all values.

    Args:
        loaded: the value that `torch.load` has returned. Its lists, its dictionaries and the attributes in it are
            changed in place.

    Raises:
        ValueError: a container contains itself, there are too many values, tensors are larger than the file, or a
            value could not be saved and loaded again.
        RecursionError: containers are nested too deep.
    """
    finisher = _Finisher()
    replacement, _ = finisher.visit(loaded)
    finisher.visit_attributes()
    finisher.check_repeats()
    return replacement


_PLAIN = {bool, bytes, float, int, str, type(None)}
_STORAGES: Any = (torch.TypedStorage, torch.UntypedStorage)
_STORAGE_NAME: Any = torch.serialization.StorageType
"""If a pickle names a type of storages, torch returns an object of this class. torch can save such an object, but
cannot load it again."""
_WITHOUT_STATE: Any = (type, FunctionType, ModuleType, enum.Enum, *_STORAGES)
"""Objects whose attributes no pickle sets."""


class _Finisher:
    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any, int]] = {}
        """The id of a container → the container (kept, so that its id is not reused), its replacement, its size."""
        self._noted: dict[int, Any] = {}
        """The id of an object that has attributes → the object."""
        self._waiting: list[Any] = []
        """The objects whose attributes are not visited yet."""
        self._repeated_bytes = 0
        self._stored: dict[int, int] = {}
        """The address of each storage → its size."""

    def visit(self, value: Any) -> tuple[Any, int]:
        """The replacement of a value, and the number of values in it."""
        if type(value) in _PLAIN:
            return value, 1
        if isinstance(value, _SavedArray | _SavedType):
            return _made(value), 1
        _check_lasting(value)
        if isinstance(value, torch.Tensor):
            _check_attributes(value)
            _check_generator(value)
            if value.is_quantized:
                value.qscheme()  # torch raises an error if the tensor has no scale, and could not save the tensor
            self._note(value)
            self._count(value)
            return value, 1
        self._note(value)
        container: Any = value
        if isinstance(value, set | frozenset):
            _check_keys(container)
            return container, 1
        if type(value) is not tuple and not isinstance(value, dict | list):
            return value, 1
        _check_methods(value)
        if id(container) not in self._done:
            self._done[id(container)] = container, None, 0
            self._done[id(container)] = container, *self._finished(container)
        _, replacement, size = self._done[id(container)]
        if not size:
            raise ValueError("a container contains itself")
        if size > _MOST_VALUES:
            raise ValueError(f"there are more than {_MOST_VALUES} values")
        return replacement, size

    def _note(self, value: Any) -> None:
        if id(value) in self._noted or isinstance(value, _WITHOUT_STATE):
            return
        if next(_attributes_of(value), None) is not None:
            self._noted[id(value)] = value
            self._waiting.append(value)

    def visit_attributes(self) -> None:
        """Visit the attributes of all objects. Objects may refer to each other, and to the containers that hold
        them."""
        while self._waiting:
            value = self._waiting.pop()
            for name, attribute in list(_attributes_of(value)):
                if name == _OF_MODULE:
                    _keep_parameters(attribute)
                replacement, _ = self.visit(attribute)
                if replacement is not attribute:
                    object.__setattr__(value, name, replacement)

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
        # The method of `dict` itself is called: an attribute of a subclass's object may hide `keys`.
        keys: Any = _KEYS(container) if issubclass(type(container), dict) else range(len(container))
        if issubclass(type(container), dict):
            _check_keys(keys)
        pairs = [(key, container[key]) for key in keys]
        found = [self.visit(inner) for _, inner in pairs]
        size = 1 + sum(size for _, size in found)
        changed = {key: new for (key, old), (new, _) in zip(pairs, found, strict=True) if new is not old}
        if changed and type(container) is tuple:
            return tuple(new for new, _ in found), size
        for key, new in changed.items():
            container[key] = new
        return container, size


def _made(stand_in: _SavedArray | _SavedType) -> Any:
    """The array or the type that a stand-in replaces."""
    made = stand_in.array if isinstance(stand_in, _SavedArray) else getattr(stand_in, "dtype", None)
    if made is None:
        raise ValueError("an array or a type of numpy has no state")
    return made


def _check_lasting(value: Any) -> None:
    """Raise ValueError for a value that can be loaded from this file, but not from the run's next checkpoint."""
    is_stand_in = isinstance(value, FunctionType | type) and value in _STAND_INS.values()
    if is_stand_in or isinstance(value, _STORAGE_NAME):
        raise ValueError("it names a function or a type of numpy or torch without calling it")


def _check_keys(keys: Iterable[Any]) -> None:
    """Like `_check_lasting`, for keys of dictionaries and elements of sets. `finish` does not replace these."""
    waiting = [key for key in keys if type(key) is not str]
    while waiting:
        key = waiting.pop()
        if isinstance(key, _SavedArray | _SavedType):
            raise ValueError("a key is an array or a type of numpy")  # noqa: TRY004  the data is invalid, not the call
        _check_lasting(key)
        if isinstance(key, tuple):
            waiting += cast("tuple[Any, ...]", key)


def _attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that the pickle may have set, including attributes in slots."""
    own: Any = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        yield from cast("dict[str, Any]", own).items()
    for name in _slots_of(cast("Any", type(value))):
        if hasattr(value, name):
            yield name, getattr(value, name)


@functools.cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    found: list[Any] = [getattr(one, "__dict__", {}).get("__slots__", ()) for one in kind.__mro__]
    return tuple(name for slots in found for name in ((slots,) if isinstance(slots, str) else slots))


_KEYS: Any = cast("Any", dict).keys
_WITH_ATTRIBUTES = (torch.Tensor, torch.nn.Parameter, OrderedDict, Counter)
"""The classes that every pickle may name, and whose objects may have attributes."""


def _check_methods(value: Any) -> None:
    """Raise ValueError if attributes of an object hide attributes of its class.

    Such attributes could report a wrong size, type or content, or prevent a save.
    """
    kind = cast("Any", type(value))
    if kind in _WITH_ATTRIBUTES and any(hasattr(kind, name) for name in cast("Mapping[str, Any]", vars(value))):
        raise ValueError(f"an attribute of a {kind.__name__} has the name of an attribute of its class")


def _check_attributes(tensor: torch.Tensor) -> None:
    """Like `_check_methods`; also raise ValueError if the tensor has hooks."""
    _check_methods(tensor)
    if tensor._backward_hooks:
        raise ValueError("a tensor has functions that are called with its gradient")


def _check_generator(tensor: torch.Tensor) -> None:
    """Raise ValueError for a state of a generator from which torch would read beyond the end of the state.

    The state consists of the seed (8 bytes), how many numbers are left (4), a flag (4), the position of the next
    number (8), and the numbers. From this position on, torch reads as many numbers as are left.
    """
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not is_plain or tensor.dtype is not torch.uint8 or tensor.numel() not in _GENERATOR_BYTES:
        return
    if tensor.is_nested:  # torch accepts it as a state, and its bytes may be anywhere in its storage
        raise ValueError("the state of a random number generator is a nested tensor")
    left, is_seeded, position = struct.unpack("<iiQ", tensor.reshape(-1)[8:24].numpy().tobytes())
    position &= 0xFFFF_FFFF  # torch uses only these bits
    is_accepted = is_seeded == 1 and 0 < left <= _NUM_WORDS and position <= _NUM_WORDS
    if is_accepted and position + left > _NUM_WORDS + 1:
        raise ValueError("the state of a random number generator has more numbers left than follow its position")


def _keep_parameters(of_module: Any) -> None:
    """Make `load_state_dict` copy the tensors of a state into the parameters of the module."""
    versions = cast("dict[Any, Any]", of_module).values() if isinstance(of_module, dict) else ()
    for version in versions:
        if isinstance(version, dict):
            cast("dict[Any, Any]", version).pop(_REPLACES, None)
