"""Folders of a store, read like a `pathlib.Path`: objects are listed once, ranges are fetched as needed.

For readers that work on a folder of this machine and on an object store: they take a `ReadablePath`, which
`pathlib.Path` and `StorePath` implement.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import BinaryIO, Literal, Protocol, Self, cast

from safepoint.errors import ObjectNotFoundError, StorageError
from safepoint.storage.raw_reader import RawReader
from safepoint.storage.read_ahead import Stretch, stream_ahead
from safepoint.storage.store import Content, Store

_BLOCK_BYTES = 16 << 10
_MAX_CACHED_BLOCKS = 512
_MAX_FETCH_BYTES = 64 << 10
_MAX_FILE_BYTES = 1 << 30

OnRead = Callable[[str, int, int], None]
"""Called with the key, the first byte and the number of bytes of each read."""


class ReadablePath(Protocol):
    """The part of `pathlib.Path` that reads a folder."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        ...

    def __truediv__(self, key: str, /) -> Self:
        """A path below this one."""
        ...

    def __lt__(self, other: Self, /) -> bool:
        """Paths are ordered."""
        ...

    def is_file(self) -> bool:
        """Whether it is a file."""
        ...

    def is_dir(self) -> bool:
        """Whether it is a folder."""
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
    """The listing of a prefix, and a cache of the blocks that were read last."""

    def __init__(self, store: Store, prefix: str, on_read: OnRead | None) -> None:
        self.store = store
        self.prefix = prefix
        self.on_read = on_read
        self.found = self.list()
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def list(self) -> dict[str, tuple[int, str]]:
        """Relative key → size and version."""
        start = len(self.prefix) + 1 if self.prefix else 0
        return {item.key[start:]: (item.size_bytes, item.version) for item in self.store.list(self.prefix)}

    def full(self, key: str) -> str:
        return f"{self.prefix}/{key}".strip("/")

    def read(self, key: str, start: int, length: int) -> bytes:
        """Exactly these bytes; small reads are served from cached blocks."""
        if length > _MAX_FETCH_BYTES:
            return self._fetch(key, start, length)
        first, last = start // _BLOCK_BYTES, (start + length - 1) // _BLOCK_BYTES
        with self._lock:
            blocks = {number: self._blocks.get((key, number)) for number in range(first, last + 1)}
        missing = [number for number, block in blocks.items() if block is None]
        if missing:
            begin = missing[0] * _BLOCK_BYTES
            end = min((missing[-1] + 1) * _BLOCK_BYTES, self.found[key][0])
            data = self._fetch(key, begin, end - begin)
            for number in range(missing[0], missing[-1] + 1):
                offset = number * _BLOCK_BYTES - begin
                blocks[number] = data[offset : offset + _BLOCK_BYTES]
        with self._lock:
            for number, block in blocks.items():
                assert block is not None
                self._blocks[key, number] = block
                self._blocks.move_to_end((key, number))
            while len(self._blocks) > _MAX_CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        joined = b"".join(cast("dict[int, bytes]", blocks).values())
        offset = start - first * _BLOCK_BYTES
        return joined[offset : offset + length]

    def forget(self) -> None:
        with self._lock:
            self._blocks.clear()

    def _fetch(self, key: str, start: int, length: int) -> bytes:
        if self.on_read is not None:
            self.on_read(key, start, length)
        return bytes(self.store.read(self.full(key), start=start, length=length))


class StorePath:
    """An object of a store or a folder of objects; compared by its key.

    Args:
        tree: shared by all paths of one `browse`.
        key: relative to the tree.
    """

    __slots__ = ("_key", "_tree")

    def __init__(self, tree: _Tree, key: str) -> None:
        self._tree = tree
        self._key = key

    @property
    def name(self) -> str:
        """See `ReadablePath`."""
        return (self._key or self._tree.prefix or str(self._tree.store.location)).rpartition("/")[2]

    @property
    def key(self) -> str:
        """Relative to the prefix of `browse`."""
        return self._key

    @property
    def size_bytes(self) -> int:
        """The size of the object.

        Raises:
            ObjectNotFoundError: there is no such object.
        """
        found = self._tree.found.get(self._key)
        if found is None:
            raise ObjectNotFoundError(f"there is no {self}")
        return found[0]

    def __truediv__(self, key: str, /) -> "StorePath":
        """See `ReadablePath`; `.` is the folder itself."""
        if key == ".":
            return self
        return StorePath(self._tree, f"{self._key}/{key}" if self._key else key)

    def __str__(self) -> str:
        key, location = self._tree.full(self._key), self._tree.store.location
        return str(location.child(key) if key else location)

    def __lt__(self, other: "StorePath", /) -> bool:
        return self._key < other._key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and (self._tree, self._key) == (other._tree, other._key)

    def __hash__(self) -> int:
        return hash((id(self._tree), self._key))

    def is_file(self) -> bool:
        """See `ReadablePath`."""
        return self._key in self._tree.found

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
        return f"{self._key}/" if self._key else ""

    def read_bytes(self) -> bytes:
        """See `ReadablePath`.

        Raises:
            StorageError: it is too large to be read at once, or cannot be read.
        """
        if self.size_bytes > _MAX_FILE_BYTES:
            raise StorageError(f"{self} is too large to be read at once")
        return self._tree.read(self._key, 0, self.size_bytes) if self.size_bytes else b""

    def open(self, mode: Literal["rb"], /) -> BinaryIO:
        """See `ReadablePath`."""
        return cast("BinaryIO", _Reader(self._tree, self._key, self.size_bytes))

    def stretch(self, start: int, length: int) -> Stretch:
        """A range of the object, for `stream_ahead`."""
        return Stretch(self._tree.store, self._tree.full(self._key), start, length)

    @property
    def content(self) -> Content:
        """The whole object."""
        whole = self.stretch(0, self.size_bytes)
        return Content(size_bytes=whole.length, pour=lambda sink: stream_ahead([whole], sink))

    def forget_blocks(self) -> None:
        """Empty the cache of blocks of the whole tree."""
        self._tree.forget()

    def changed(self) -> str | None:
        """The key of an object that has changed since it was listed; None when there is none."""
        found = self._tree.list()
        return next((key for key, known in self._tree.found.items() if found.get(key) != known), None)


class _Reader(RawReader):
    def __init__(self, tree: _Tree, key: str, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self._tree = tree
        self._key = key

    def read_range(self, start: int, length: int) -> bytes:
        return self._tree.read(self._key, start, length)


def browse(store: Store, prefix: str = "", *, on_read: OnRead | None = None) -> StorePath:
    """The folder at `prefix` of a store, listed now.

    Args:
        store: the store.
        prefix: a key; empty for the store's own location.
        on_read: called for every read from the store, except those of a `stretch`.

    Raises:
        StorageError: the store cannot be listed.
    """
    return StorePath(_Tree(store, prefix, on_read), "")
