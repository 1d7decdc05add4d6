"""Parts of a file, which S3 receives one by one. All bytes come from the file that was opened, not from its path."""

import hashlib
import os
from typing import NamedTuple

from safepoint.storage.store import OpenFile

_BLOCK_BYTES = 1 << 20


class FilePart(NamedTuple):
    """A part of a file.

    Args:
        file: the file.
        start: the first byte.
        size_bytes: the number of bytes.
    """

    file: OpenFile
    start: int
    size_bytes: int


def md5_of(source: bytes | memoryview | FilePart) -> bytes:
    """The MD5 of bytes, or of a part of a file; if the file ends earlier, the MD5 of the bytes up to its end."""
    if not isinstance(source, FilePart):
        return hashlib.md5(source, usedforsecurity=False).digest()
    md5, reader = hashlib.md5(usedforsecurity=False), PartReader(source.file.descriptor, source.start)
    end = source.start + source.size_bytes
    while block := reader.read(min(_BLOCK_BYTES, end - reader.position)):
        md5.update(block)
    return md5.digest()


class PartReader:
    """A file object for `socket.sendfile` with a position of its own, because several threads read one open file."""

    mode = "rb"
    """`socket.sendfile` requires this attribute."""

    def __init__(self, descriptor: int, position: int) -> None:
        self._descriptor = descriptor
        self.position = position
        """Where the next `read` begins."""

    def fileno(self) -> int:
        """See `io.IOBase`."""
        return self._descriptor

    def seek(self, position: int) -> None:
        """See `io.IOBase`."""
        self.position = position

    def read(self, count: int) -> bytes:
        """See `io.RawIOBase`."""
        block = os.pread(self._descriptor, count, self.position)
        self.position += len(block)
        return block
