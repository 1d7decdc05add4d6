"""Reads files of `torch.save` without importing or calling anything that they name.

Containers, numbers and strings are returned as they are. A tensor becomes a `StoredTensor`, which says where the
tensor's bytes are. Every other object becomes an `Inert`, which keeps the object's arguments and state and does
nothing.
"""

import io
import itertools
import math
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, cast

from safepoint.checkpoint.format.safetensors_layout import KINDS, SIZES
from safepoint.checkpoint.pickles.archive_records import ArchiveReader, check_directory
from safepoint.checkpoint.pickles.bounded_pickle import BoundedUnpickler, KeyLimits
from safepoint.checkpoint.weights.budget import Budget, Cost
from safepoint.checkpoint.weights.stored_weight import Run
from safepoint.errors import CheckpointError, SafepointError
from safepoint.storage.browsing import ReadablePath

_LOCAL_HEADER_BYTES = 30
MAX_PICKLE_BYTES = 1 << 30
_MAX_TUPLE_KEYS = 10_000
_MAX_KEY_PARTS = 64
_MAX_NAMES = 4096
_MAX_DIMENSIONS = 64
_NUMBER_BITS = 63
_STEPS_PER_ARCHIVE = 100
"""An archive takes as long to open as this many instructions of a pickle."""
_MOST_RUNS = 1 << 20
ITEM_BYTES = {dtype: SIZES[kind] for dtype, kind in KINDS.items()}
"""Torch's names of types → the size of an element."""
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}

CheckName = Callable[[str, str], None]
"""A function that is called with the module and the name of each class or function that a pickle names. It is not
called for names for which the reader of the pickle has a replacement. The function may raise CheckpointError."""


def _allow_all(module_name: str, global_name: str) -> None:
    """Allow every name: an `Inert`, which replaces the named object, does nothing."""


class Inert:
    """Stands for an object whose class is not loaded.

    `get` returns an attribute of the pickled state; `args` are the arguments that the object was made with.
    """

    module = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any, **_: Any) -> "Inert":
        """Keep the arguments. Any arguments are allowed."""
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """`__new__` has kept the arguments."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore an item of a subclass of dict."""

    def append(self, value: Any) -> None:
        """Ignore an item of a subclass of list."""

    def extend(self, values: Any) -> None:
        """Ignore items of a subclass of list."""

    def get(self, name: str, *default: Any) -> Any:
        """An attribute of the pickled state.

        Args:
            name: the attribute's name.
            default: returned when the attribute is missing.

        Raises:
            CheckpointError: the attribute is missing.
        """
        state: Any = self.state
        if isinstance(state, dict) and name in state:
            return cast("dict[str, Any]", state)[name]
        if not default:
            raise CheckpointError(f"{type(self).__name__} has no {name}")
        return default[0]


class _Unpickler(BoundedUnpickler):
    """Uses an `Inert` in place of each class that is not in `known`; limits the number of names."""

    def __init__(
        self, data: bytes, known: Mapping[tuple[str, str], Any], storage: Callable[[Any], Any], check_name: CheckName
    ) -> None:
        keys = KeyLimits(
            most_tuples=_MAX_TUPLE_KEYS,
            most_parts=_MAX_KEY_PARTS,
            number_bits=_NUMBER_BITS,
            is_plain=lambda key: isinstance(key, Inert),
        )
        super().__init__(io.BytesIO(data), keys=keys, has_state=_has_state)
        self._known = {("collections", "OrderedDict"): _ordered_dict, **known}
        self._storage = storage
        self._check_name = check_name

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        key = module_name, global_name
        if key not in self._known:
            self._check_name(module_name, global_name)
            if len(self._known) > _MAX_NAMES:
                raise CheckpointError(f"a pickle names more than {_MAX_NAMES} classes")
            self._known[key] = type(global_name.rpartition(".")[2], (Inert,), {"module": module_name})
        return self._known[key]

    def persistent_load(self, pid: Any) -> Any:
        return self._storage(pid)


def _has_state(target: Any, state: Any) -> bool:
    # An attribute must not hide a method, such as `items`.
    is_dictionary = isinstance(target, OrderedDict) and isinstance(state, dict)
    hides = is_dictionary and any(hasattr(OrderedDict, name) for name in cast("dict[str, Any]", state))
    return isinstance(target, Inert) or (is_dictionary and not hides)


def _ordered_dict() -> OrderedDict[Any, Any]:
    """Make a dictionary without arguments: the pickle adds the items afterwards, so that their keys are checked."""
    return OrderedDict()


def read_inert(
    data: bytes,
    known: Mapping[tuple[str, str], Any] | None = None,
    storage: Callable[[Any], Any] = Inert,
    check_name: CheckName = _allow_all,
    budget: Budget | None = None,
) -> Any:
    """The content of a pickle.

    Args:
        data: the pickle.
        known: (module, name) of a function or class → the object that is used and called in its place.
        storage: returns the object for a persistent id.
        check_name: see `CheckName`.
        budget: the budget of the checkpoint; reading the instructions uses it up.

    Raises:
        CheckpointError: `data` is not a valid pickle, or has more instructions than `budget` allows.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise CheckpointError(f"a pickle has more than {MAX_PICKLE_BYTES} bytes")
    unpickler = _Unpickler(data, known or {}, storage, check_name)
    most = min(len(data), unpickler.max_instructions)  # a pickle cannot have more instructions than bytes
    if budget is not None:
        budget.spend(Cost.STEPS, most)
    try:
        return unpickler.load()
    except CheckpointError:
        raise
    except Exception as error:  # hostile content may raise anything
        raise CheckpointError(f"a pickle cannot be read: {type(error).__name__}: {error}") from error
    finally:
        if budget is not None:
            budget.return_unused(Cost.STEPS, most - unpickler.num_instructions)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Args:
        dtype: torch's name of the type, without `torch.`.
        sizes: the sizes of its dimensions.
        strides: the strides of its dimensions, in elements.
        path: the file.
        offset: where its first element begins in the file.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    path: ReadablePath
    offset: int

    def run(self, first: int, count: int, begin: int) -> Run:
        """Elements `first` to `first + count` of this tensor, as a `Run` that begins at byte `begin` of a weight.

        Raises:
            CheckpointError: the tensor is not contiguous.
        """
        places = zip(self.sizes, self.strides, strides_of(self.sizes), strict=True)
        if any(size != 1 and stride != expected for size, stride, expected in places):
            raise CheckpointError(
                "a weight is not stored contiguously (it may be transposed); load the file with torch"
            )
        size = ITEM_BYTES[self.dtype]
        return Run(begin, count * size, self.path, self.offset + first * size)

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)


def read_torch_file(
    path: ReadablePath,
    *,
    begin: int = 0,
    length: int | None = None,
    check_name: CheckName = _allow_all,
    budget: Budget | None = None,
) -> Any:
    """The content of an archive, with a `StoredTensor` for each tensor and an `Inert` for each other object.

    Args:
        path: the path of the file.
        begin: where in the file the archive begins.
        length: the length of the archive; None for the rest of the file.
        check_name: see `CheckName`.
        budget: the budget of the checkpoint. The archive and the instructions of its pickle count against it.

    Raises:
        CheckpointError: the file is damaged, has the format that torch used before zip archives, or costs more than
            `budget` allows.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:

        def read_range(start: int, count: int) -> bytes:
            file.seek(begin + start)
            return file.read(count)

        size_bytes = file.seek(0, io.SEEK_END) - begin if length is None else length
        try:
            reader = ArchiveReader(size_bytes, read_range)
            with zipfile.ZipFile(reader) as archive:
                check_directory(reader, archive, size_bytes)
                reader.most_bytes = MAX_PICKLE_BYTES
                return _read(path, begin, archive, file, check_name, budget)
        except (SafepointError, OSError, MemoryError):
            raise
        except Exception as error:  # zipfile raises exceptions that it does not document, such as RuntimeError
            raise CheckpointError(f"{path.name} is not a file of torch.save: {error}") from error


class _Storage(NamedTuple):
    """Where in the file a storage begins, and its size."""

    dtype: str
    begin: int
    size_bytes: int


def _read(
    path: ReadablePath,
    begin: int,
    archive: zipfile.ZipFile,
    file: BinaryIO,
    check_name: CheckName,
    budget: Budget | None,
) -> Any:
    if budget is not None:
        budget.spend(Cost.STEPS, _STEPS_PER_ARCHIVE + len(archive.infolist()))
    records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    pickled = records["data.pkl"]
    if pickled.file_size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"the pickle of {path.name} is too large")
    places: dict[str, int] = {}

    def storage(identity: Any) -> _Storage:
        kind, dtype, key = cast("tuple[str, Any, Any]", tuple(itertools.islice(cast("Iterable[Any]", identity), 3)))
        if kind != "storage" or type(dtype) is not str or type(key) is not str:
            raise CheckpointError("a pickle refers to an object that is not a storage")
        info = records[f"data/{key}"]
        if key not in places:
            file.seek(begin + info.header_offset + _LOCAL_HEADER_BYTES - 4)
            name_bytes, extra_bytes = (int.from_bytes(file.read(2), "little") for _ in range(2))
            places[key] = begin + info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        return _Storage(dtype, places[key], info.file_size)

    def rebuild(
        stored: _Storage, offset: int, sizes: Any, strides: Any, grad: Any = None, hooks: Any = None, sign: Any = None
    ) -> StoredTensor:
        # If `sign` is set, torch negates or conjugates the values when it loads them. A copied range of bytes would
        # contain the unchanged values.
        if sign:
            raise CheckpointError("a tensor is stored negated or conjugated; load the file with torch")
        if type(stored) is not _Storage or type(stored.dtype) is not str:
            raise CheckpointError("a tensor has no storage")
        sizes, strides, (offset,) = numbers_of(sizes), numbers_of(strides), numbers_of([offset])
        last = offset + sum((count - 1) * stride for count, stride in zip(sizes, strides, strict=True))
        item = ITEM_BYTES[stored.dtype]
        if math.prod(sizes) and (last + 1) * item > stored.size_bytes:
            raise CheckpointError("a tensor is larger than its storage")
        return StoredTensor(stored.dtype, sizes, strides, path, stored.begin + offset * item)

    def rebuild_as(
        stored: _Storage, offset: int, sizes: Any, strides: Any, grad: Any, hooks: Any, dtype: str, sign: Any = None
    ) -> StoredTensor:
        return rebuild(stored._replace(dtype=dtype), offset, sizes, strides, sign=sign)

    known: dict[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_tensor_v2"): rebuild,
        ("torch._utils", "_rebuild_tensor_v3"): rebuild_as,
        ("torch._utils", "_rebuild_parameter"): _first,
        ("torch._tensor", "_rebuild_from_type_v2"): _without_attributes,
        ("torch", "Size"): numbers_of,
        **{("torch", name): dtype for name, dtype in _STORAGES.items()},
        ("torch.storage", "UntypedStorage"): "uint8",
        **{("torch", dtype): dtype for dtype in ITEM_BYTES},
    }
    return read_inert(archive.read(pickled), known, storage, check_name, budget)


def _first(value: Any, *_: Any) -> Any:
    return value


def _without_attributes(rebuild: Callable[..., Any], kind: Any, args: Any, state: Any) -> Any:
    """Rebuild a tensor that was pickled with attributes, and leave out these attributes."""
    if isinstance(state, dict) and "data" in state:
        raise CheckpointError("an attribute of a tensor replaces its data")
    return rebuild(*args)


def numbers_of(values: Any = ()) -> tuple[int, ...]:
    """A shape, strides or offsets as a tuple of numbers.

    Raises:
        CheckpointError: `values` has too many values, or a value that is not a whole number from 0 to 2^63 - 1.
    """
    numbers: tuple[Any, ...] = tuple(itertools.islice(values, _MAX_DIMENSIONS + 1))
    if len(numbers) > _MAX_DIMENSIONS or not all(
        type(number) is int and 0 <= number < 1 << _NUMBER_BITS for number in numbers
    ):
        raise CheckpointError("a shape or an offset has invalid numbers, or too many of them")
    return numbers


def strides_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(sizes[number:]) for number in range(1, len(sizes) + 1))


def runs_of(tensor: StoredTensor, offsets: Sequence[int], sizes: Sequence[int], budget: Budget) -> Iterator[Run]:
    """The runs of a part of a weight.

    Args:
        tensor: the part.
        offsets: where the part begins in the weight, in each dimension.
        sizes: the sizes of the weight's dimensions.
        budget: the budget of the checkpoint. The runs count against it.

    Raises:
        CheckpointError: the part would need more than `_MOST_RUNS` runs, or more than `budget` allows.
    """
    item = ITEM_BYTES[tensor.dtype]
    strides = strides_of(sizes)
    # A run covers the innermost dimensions. The loop goes outwards from the last dimension, while the elements are
    # contiguous. It ends with the first dimension of which the part has only a piece.
    inner, count = len(sizes), 1
    while inner and (tensor.sizes[inner - 1] == 1 or tensor.strides[inner - 1] == count):
        inner -= 1
        count *= tensor.sizes[inner]
        if tensor.sizes[inner] != sizes[inner]:
            break
    num_runs = math.prod(tensor.sizes[:inner])
    if num_runs > _MOST_RUNS:
        raise CheckpointError("a part of a weight is stored in too many pieces; load the file with torch")
    budget.spend(Cost.RUNS, num_runs)
    for outer in itertools.product(*(range(size) for size in tensor.sizes[:inner])):
        source = sum(index * stride for index, stride in zip(outer, tensor.strides, strict=False))
        target = sum(
            (offset + index) * stride
            for offset, index, stride in zip(offsets, (*outer, *[0] * (len(sizes) - inner)), strides, strict=True)
        )
        yield Run(target * item, count * item, tensor.path, tensor.offset + source * item)
