"""The image of a file that the file system writer of torch.distributed.checkpoint writes.

An image is the bytes that a file will have, in memory.

The format is DCP's (torch.distributed.checkpoint): the items of one rank, one after the other, each as `torch.save`
would write it to a file of its own. The checkpoint's metadata file says where each item begins. In an image the
tensors come first, so that their offsets do not depend on the length of the other items, such as numbers.
"""

import functools
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from safepoint.snapshot.images.image import Image, Piece, is_plain
from safepoint.snapshot.images.torch_archive import Archive, StorageRecords, lay_out
from safepoint.snapshot.images.torch_image import UncomposableError, pickle_lone_tensor

_ALIGNMENT = 64
_PREFIX = "archive"
"""The name of the folder inside an archive that `torch.save` writes to a buffer. (In an archive that it writes to a
file, the folder has the file's name.)"""


class _Lone(NamedTuple):
    """The archive of one tensor: the bytes before and after the tensor's data, and the `Archive`."""

    head: bytes
    tail: bytes
    directory: int
    num_entries: int


class _Item(NamedTuple):
    """What the layout of an item depends on."""

    index: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    address: int
    base: int
    device: str


class DcpImages:
    """Composes the image of one file at each save, and remembers its last layout.

    Args:
        path: see `Image`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._items: list[_Item] = []
        self._tensors = _Tensors([], [])

    def compose(self, items: Sequence[tuple[WriteItem, Any]]) -> tuple[Image, list[WriteResult]]:
        """The image of the file that DCP's writer would write now, and the results that the writer would return.

        Args:
            items: each item to write, with the tensor or the `io.BytesIO` to which the planner resolves it.
        """
        tensors: list[torch.Tensor] = []
        described: list[_Item] = []
        rest: list[tuple[WriteItem, bytes]] = []
        for item, data in items:
            if item.type == WriteItemType.BYTE_IO:
                rest.append((item, data.getvalue()))
            elif _is_composable(data):
                tensor = data.contiguous()
                tensors.append(tensor)
                described.append(_describe(item, tensor))
            else:
                rest.append((item, _saved_by_torch(data)))
        if described != self._items:
            self._tensors = _Tensors(described, tensors)
            self._items = described
        place = self._tensors.end
        literals: list[tuple[int, bytes]] = []
        results = [_result(index, self.path, begin, length) for index, begin, length in self._tensors.places]
        for item, content in rest:
            literals.append((place, content))
            results.append(_result(item.index, self.path, place, len(content)))
            place += len(content)
        image = Image(
            path=self.path,
            size_bytes=place,
            literals=tuple(literals),
            fixed=self._tensors.literals,
            pieces=self._tensors.pieces,
            archives=self._tensors.archives,
        )
        return image, results


class _Tensors:
    """The part of a file that holds tensors. It is valid while the tensors keep their addresses and shapes."""

    def __init__(self, items: Sequence[_Item], tensors: Sequence[torch.Tensor]) -> None:
        literals: list[tuple[int, bytes]] = []
        pieces: list[Piece] = []
        archives: list[Archive] = []
        self.places: list[tuple[Any, int, int]] = []
        begin = 0
        for item, tensor in zip(items, tensors, strict=True):
            lone = _archive_of(item.dtype, item.shape)
            data = begin + len(lone.head)
            tail = data + tensor.nbytes
            end = tail + len(lone.tail)
            literals += [(begin, lone.head), (tail, lone.tail)]
            if tensor.nbytes:
                pieces.append(Piece(data, tensor.nbytes, item.address, item.base, tensor, item.device))
            archives.append(Archive(begin=begin, directory=begin + lone.directory, num_entries=lone.num_entries))
            self.places.append((item.index, begin, end - begin))
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            literals.append((end, bytes(begin - end)))
        self.end = begin
        self.literals = tuple(literals)
        self.pieces = tuple(pieces)
        self.archives = tuple(archives)


@functools.lru_cache(maxsize=4096)
def _archive_of(dtype: torch.dtype, shape: tuple[int, ...]) -> _Lone:
    num_bytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
    storages = StorageRecords(_PREFIX, [num_bytes])
    layout = lay_out(storages, pickle_lone_tensor(dtype, shape))
    (data,) = storages.places
    head, tail = bytearray(data), bytearray(layout.size_bytes - data - num_bytes)
    for place, content in (*storages.literals, *layout.literals):
        part, at = (head, place) if place < data else (tail, place - data - num_bytes)
        part[at : at + len(content)] = content
    return _Lone(bytes(head), bytes(tail), layout.archive.directory, layout.archive.num_entries)


def _is_composable(tensor: Any) -> bool:
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter} or not is_plain(tensor):
        return False
    try:
        _archive_of(tensor.dtype, tuple(tensor.shape))
    except UncomposableError:
        return False
    return True


def _describe(item: WriteItem, tensor: torch.Tensor) -> _Item:
    base = tensor.untyped_storage().data_ptr()
    return _Item(item.index, tensor.dtype, tuple(tensor.shape), tensor.data_ptr(), base, tensor.device.type)


def _saved_by_torch(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor.detach().cpu().clone(), buffer)
    return buffer.getvalue()


def _result(index: Any, path: str, offset: int, length: int) -> WriteResult:
    place = _StorageInfo(path.rsplit("/", 1)[-1], offset, length)
    return WriteResult(index=index, size_in_bytes=length, storage_data=place)
