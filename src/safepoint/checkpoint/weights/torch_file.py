"""What a file of `torch.save` holds: plain values, and for each tensor the place of its bytes."""

import io
import itertools
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from safepoint.checkpoint.format.safetensors_layout import KINDS, SIZES
from safepoint.checkpoint.weights.inert_pickle import read_inert
from safepoint.checkpoint.weights.weight import Run
from safepoint.errors import CheckpointError
from safepoint.storage.browsing import RawReader, ReadablePath

_LOCAL_HEADER_BYTES = 30
_MAX_PICKLE_BYTES = 1 << 30
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


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Args:
        dtype: torch's name of the type, without `torch.`.
        sizes: of its dimensions.
        strides: of them, in elements.
        path: of the file.
        offset: of its first element in the file.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    path: ReadablePath
    offset: int

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in the file as they are counted."""
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def run(self, first: int, count: int, begin: int) -> Run:
        """`count` elements from `first` on; they begin at byte `begin` of a weight.

        Raises:
            CheckpointError: the tensor is not contiguous.
        """
        if not self.is_contiguous:
            raise CheckpointError("a weight is stored in another order of dimensions; load it with torch")
        size = ITEM_BYTES[self.dtype]
        return Run(begin, count * size, self.path, self.offset + first * size)

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)


def read_torch_file(path: ReadablePath, *, begin: int = 0, length: int | None = None) -> Any:
    """The content of an archive, with a `StoredTensor` for each tensor and an `Inert` for each other object.

    Args:
        path: of the file.
        begin: where in the file the archive begins.
        length: of the archive; None for the rest of the file.

    Raises:
        CheckpointError: it is damaged, or of the format before zip archives.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(_Window(file, begin, length)) as archive:
                return _read(path, begin, archive, file)
        except (zipfile.BadZipFile, ValueError, KeyError, EOFError, NotImplementedError) as error:
            raise CheckpointError(f"{path.name} is no archive of torch: {error}") from error


def _read(path: ReadablePath, begin: int, archive: zipfile.ZipFile, file: BinaryIO) -> Any:
    records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    pickled = records["data.pkl"]
    if pickled.file_size > _MAX_PICKLE_BYTES or pickled.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"the pickle of {path.name} is too large or compressed")
    places: dict[str, tuple[int, int]] = {}

    def storage(identity: Any) -> tuple[str, str]:
        kind, dtype, key = cast("tuple[str, Any, Any]", tuple(identity)[:3])
        if kind != "storage" or not isinstance(dtype, str):
            raise CheckpointError("it refers to something that is no storage")
        info = records[f"data/{key}"]
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError("a storage is compressed")
        if key not in places:
            file.seek(begin + info.header_offset + _LOCAL_HEADER_BYTES - 4)
            name_bytes, extra_bytes = (int.from_bytes(file.read(2), "little") for _ in range(2))
            data = begin + info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
            places[key] = data, info.file_size
        return dtype, key

    def rebuild(stored: tuple[str, str], offset: int, sizes: Any, strides: Any, *_: Any) -> StoredTensor:
        dtype, key = stored
        return build(dtype, key, offset, sizes, strides)

    def rebuild_as(
        stored: tuple[str, str], offset: int, sizes: Any, strides: Any, grad: Any, hooks: Any, dtype: str, *_: Any
    ) -> StoredTensor:
        return build(dtype, stored[1], offset, sizes, strides)

    def build(dtype: str, key: str, offset: int, sizes: Any, strides: Any) -> StoredTensor:
        data, size = places[key]
        sizes, strides = _numbers(sizes), _numbers(strides)
        last = offset + sum((count - 1) * stride for count, stride in zip(sizes, strides, strict=True))
        if offset < 0 or (math.prod(sizes) and (last + 1) * ITEM_BYTES[dtype] > size):
            raise CheckpointError("a tensor is larger than its storage")
        return StoredTensor(dtype, sizes, strides, path, data + offset * ITEM_BYTES[dtype])

    known: dict[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_tensor_v2"): rebuild,
        ("torch._utils", "_rebuild_tensor_v3"): rebuild_as,
        ("torch._utils", "_rebuild_parameter"): _first,
        ("torch._tensor", "_rebuild_from_type_v2"): _without_attributes,
        ("torch", "Size"): tuple,
        **{("torch", name): dtype for name, dtype in _STORAGES.items()},
        ("torch.storage", "UntypedStorage"): "uint8",
        **{("torch", dtype): dtype for dtype in ITEM_BYTES},
    }
    return read_inert(archive.read(pickled), known, storage)


def _first(value: Any, *_: Any) -> Any:
    return value


def _without_attributes(rebuild: Callable[..., Any], kind: Any, args: Any, state: Any) -> Any:
    """A tensor that has attributes; they are dropped."""
    return rebuild(*args)


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise CheckpointError("a shape is not made of numbers")
    return numbers


class _Window(RawReader):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int | None) -> None:
        super().__init__(file.seek(0, io.SEEK_END) - begin if length is None else length)
        self._file = file
        self._begin = begin

    def read_range(self, start: int, length: int) -> bytes:
        self._file.seek(self._begin + start)
        return self._file.read(length)


def strides_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def runs_of(tensor: StoredTensor, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Run]:
    """The stretches of a whole weight, of these sizes, that a part of it at these offsets fills."""
    item = ITEM_BYTES[tensor.dtype]
    strides = strides_of(sizes)
    # From the last dimension on, as long as the part has all of it and its elements lie side by side.
    inner, count = len(sizes), 1
    while inner and (tensor.sizes[inner - 1] == 1 or tensor.strides[inner - 1] == count):
        inner -= 1
        count *= tensor.sizes[inner]
        if tensor.sizes[inner] != sizes[inner]:
            break
    if math.prod(tensor.sizes[:inner]) > _MOST_RUNS:
        raise CheckpointError("a part of a weight is stored in another order of dimensions; load it with torch")
    for outer in itertools.product(*(range(size) for size in tensor.sizes[:inner])):
        source = sum(index * stride for index, stride in zip(outer, tensor.strides, strict=False))
        target = sum(
            (offset + index) * stride
            for offset, index, stride in zip(offsets, (*outer, *[0] * (len(sizes) - inner)), strides, strict=True)
        )
        yield Run(target * item, count * item, tensor.path, tensor.offset + source * item)
