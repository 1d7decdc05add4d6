"""Folders of a store, read like a `pathlib.Path`: objects are listed once, their bytes are read when they are needed.

Code that can read both a folder of this machine and a folder of a store takes a `ReadablePath`, which `pathlib.Path`
and `StorePath` implement.
"""

import io
from collections.abc import Callable, Container, Iterator
from functools import lru_cache, partial
from typing import Any, BinaryIO, Literal, Protocol, Self, cast

from safepoint.errors import ObjectNotFoundError, StorageError
from safepoint.storage.read_ahead import ByteRange, stream_ahead
from safepoint.storage.store import Content, Store

_BLOCK_BYTES = 16 << 10
_MAX_CACHED_BLOCKS = 512
_MAX_FILE_BYTES = 1 << 30

OnRead = Callable[[str, int, bytes], None]
"""Called after each read with the key, the offset of the first byte, and the bytes."""


class ReadablePath(Protocol):
    """The methods of `pathlib.Path` that read a folder and its files."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        ...

    def __truediv__(self, key: str, /) -> Self:
        """A path below this path."""
        ...

    def __lt__(self, other: Self, /) -> bool:
        """Whether this path comes before `other` in a sorted list."""
        ...

    def is_file(self) -> bool:
        """Whether this path is a file."""
        ...

    def is_dir(self) -> bool:
        """Whether this path is a folder."""
        ...

    def iterdir(self) -> Iterator[Self]:
        """The entries of the folder, in any order."""
        ...

    def read_bytes(self) -> bytes:
        """The whole file."""
        ...

    def open(self, mode: Literal["rb"], /) -> BinaryIO:
        """The file, opened for random access."""
        ...


class _Tree:
    """The objects below a prefix, listed once, and a cache of the blocks that were read last."""

    def __init__(self, store: Store, prefix: str, on_read: OnRead | None, only: Container[str] | None) -> None:
        self.store = store
        self.prefix = prefix
        self.on_read = on_read
        self.only = only
        self.found = self.list()
        self.block = lru_cache(_MAX_CACHED_BLOCKS)(self._read_block)

    def list(self) -> dict[str, tuple[int, str]]:
        """Relative key → size and version."""
        start = len(self.prefix) + 1 if self.prefix else 0
        found = {item.key[start:]: (item.size_bytes, item.version) for item in self.store.list(self.prefix)}
        return {key: one for key, one in found.items() if self.only is None or key in self.only}

    def full(self, key: str) -> str:
        return f"{self.prefix}/{key}".strip("/")

    def read(self, key: str, start: int, length: int) -> bytes:
        """Exactly these bytes; small reads are served from cached blocks."""
        if length > _BLOCK_BYTES:
            return self._read_range(key, start, length)
        first, last = start // _BLOCK_BYTES, (start + length - 1) // _BLOCK_BYTES
        joined = b"".join(self.block(key, number) for number in range(first, last + 1))
        offset = start - first * _BLOCK_BYTES
        return joined[offset : offset + length]

    def _read_block(self, key: str, number: int) -> bytes:
        start = number * _BLOCK_BYTES
        return self._read_range(key, start, min(_BLOCK_BYTES, self.found[key][0] - start))

    def _read_range(self, key: str, start: int, length: int) -> bytes:
        data = bytes(self.store.read(self.full(key), start=start, length=length))
        if self.on_read is not None:
            self.on_read(key, start, data)
        return data


class StorePath:
    """An object in a store, or a folder of objects. Paths are sorted by key.

    Args:
        tree: the listing and the cache of one call of `browse`. The path that the call returns and all paths below
            this path share them.
        key: the key of the object, relative to the prefix of the call.
    """

    __slots__ = ("_tree", "key")

    def __init__(self, tree: _Tree, key: str) -> None:
        self._tree = tree
        self.key = key

    @property
    def name(self) -> str:
        """See `ReadablePath`."""
        return (self.key or self._tree.prefix or str(self._tree.store.location)).rpartition("/")[2]

    @property
    def size_bytes(self) -> int:
        """The size of the object.

        Raises:
            ObjectNotFoundError: there is no such object.
        """
        found = self._tree.found.get(self.key)
        if found is None:
            raise ObjectNotFoundError(f"there is no {self}")
        return found[0]

    @property
    def total_bytes(self) -> int:
        """The size of all objects in the folder, and in the folders below it."""
        return sum(size for key, (size, _) in self._tree.found.items() if key.startswith(self._prefix))

    def __truediv__(self, key: str, /) -> "StorePath":
        """See `ReadablePath`; `.` is the folder itself."""
        if key == ".":
            return self
        return StorePath(self._tree, f"{self.key}/{key}" if self.key else key)

    def __str__(self) -> str:
        key, location = self._tree.full(self.key), self._tree.store.location
        return str(location.child(key) if key else location)

    def __lt__(self, other: "StorePath", /) -> bool:
        return self.key < other.key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and (self._tree, self.key) == (other._tree, other.key)

    def __hash__(self) -> int:
        return hash((id(self._tree), self.key))

    def is_file(self) -> bool:
        """See `ReadablePath`."""
        return self.key in self._tree.found

    def is_dir(self) -> bool:
        """See `ReadablePath`."""
        return any(key.startswith(self._prefix) for key in self._tree.found)

    def iterdir(self) -> Iterator["StorePath"]:
        """See `ReadablePath`."""
        start = len(self._prefix)
        names = {key[start:].partition("/")[0] for key in self._tree.found if key.startswith(self._prefix)}
        return (self / name for name in sorted(names))

    @property
    def _prefix(self) -> str:
        return f"{self.key}/" if self.key else ""

    def read_bytes(self) -> bytes:
        """See `ReadablePath`.

        Raises:
            StorageError: the object is too large to be read at once, or cannot be read.
        """
        if self.size_bytes > _MAX_FILE_BYTES:
            raise StorageError(f"{self} is too large to be read at once")
        return self._tree.read(self.key, 0, self.size_bytes) if self.size_bytes else b""

    def open(self, mode: Literal["rb"], /) -> BinaryIO:
        """See `ReadablePath`."""
        return cast("BinaryIO", RawReader(self.size_bytes, partial(self._tree.read, self.key)))

    def byte_range(self, start: int, length: int) -> ByteRange:
        """A range of the bytes of the object, for `stream_ahead`."""
        return ByteRange(self._tree.store, self._tree.full(self.key), start, length)

    @property
    def content(self) -> Content:
        """The content of the whole object."""
        whole = self.byte_range(0, self.size_bytes)
        return Content(size_bytes=whole.length, write_to=lambda sink: stream_ahead([whole], sink))

    def forget_blocks(self) -> None:
        """Empty the cache of blocks, which all paths of one call of `browse` share."""
        self._tree.block.cache_clear()

    def changed(self) -> str | None:
        """The key of an object that has changed since it was listed; None when all are unchanged."""
        found = self._tree.list()
        return next((key for key, known in self._tree.found.items() if found.get(key) != known), None)


class RawReader(io.RawIOBase):
    """A file object over a source of byte ranges.

    Args:
        size_bytes: the size of the file.
        read_range: takes `start` and `length`, and returns at most `length` bytes from `start` on. The range is not
            empty, and lies within the file.
    """

    def __init__(self, size_bytes: int, read_range: Callable[[int, int], bytes]) -> None:
        self._size_bytes = size_bytes
        self._read_range = read_range
        self._position = 0

    def seekable(self) -> bool:
        """Always True."""
        return True

    def readable(self) -> bool:
        """Always True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the position.

        Raises:
            OSError: the position would be before the beginning of the file.
        """
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        if origin + offset < 0:
            raise OSError("the position is before the beginning of the object")
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Read into the buffer until it is full or the file ends; return the number of bytes, 0 at the end."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size_bytes - self._position))
        if not count:
            return 0
        data = self._read_range(self._position, count)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def browse(
    store: Store, prefix: str = "", *, on_read: OnRead | None = None, only: Container[str] | None = None
) -> StorePath:
    """List the objects of a store below `prefix`, and return the folder that contains them.

    Args:
        store: the store.
        prefix: a key; empty for the store's own location.
        on_read: called for every read from the store, except for reads of a `byte_range` and of a path's `content`.
        only: the keys below `prefix` to use; objects with other keys are ignored. None uses all objects.

    Raises:
        StorageError: the store cannot be listed.
    """
    return StorePath(_Tree(store, prefix, on_read, only), "")
