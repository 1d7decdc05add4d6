"""A file object of known length over a source of byte ranges."""

import io
from abc import abstractmethod
from typing import Any


class RawReader(io.RawIOBase):
    """Seeks and reads; a subclass reads the ranges.

    Args:
        size_bytes: of the file.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._place = 0

    @abstractmethod
    def read_range(self, start: int, length: int) -> bytes:
        """At most that many bytes from there on; the range lies in the file and is not empty."""

    def seekable(self) -> bool:
        """Yes."""
        return True

    def readable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the position.

        Raises:
            OSError: it would be before the beginning.
        """
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size_bytes}[whence]
        if origin + offset < 0:
            raise OSError("the position is before the beginning of the object")
        self._place = origin + offset
        return self._place

    def tell(self) -> int:
        """The position."""
        return self._place

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer, or as much of it as there is; 0 at the end."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size_bytes - self._place))
        if not count:
            return 0
        data = self.read_range(self._place, count)
        view[: len(data)] = data
        self._place += len(data)
        return len(data)
