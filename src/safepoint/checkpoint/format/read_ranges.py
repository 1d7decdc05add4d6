"""Checks that all reads of a range of a checkpoint's files return the same bytes.

Two reads of a file may return different bytes: a hostile server may send other bytes, and another user may write to
the file. So the right digest of a second read does not prove that the first read was right. `ReadRanges` keeps the
digest of every range that was used, or is going to be used, and finds out whether all reads returned the same bytes.
Nothing is promised about ranges that were not noted.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import xxhash

from safepoint.checkpoint.format.digest import PART_BYTES
from safepoint.errors import CheckpointError

_Ranges = dict[tuple[int, int], bytes | None]
"""(First byte, length) → the digest; None if the range was not read yet, empty if two reads of it differed."""


class Hasher(Protocol):
    """Receives the bytes of a range, in order."""

    def update(self, data: memoryview, /) -> None:
        """Add a block."""
        ...

    def digest(self) -> bytes:
        """The digest of all blocks."""
        ...


class ReadRanges:
    """The ranges that were read, or are going to be read, in the files of one checkpoint. Several threads may use one
    object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Ranges are cut where parts of files begin, because parts are digested one by one.
        self._found: dict[tuple[str, int], _Ranges] = {}

    def note(self, key: str, start: int, data: bytes) -> None:
        """Record a read.

        Raises:
            CheckpointError: an earlier read of this range had other bytes.
        """
        for first, length in _cut(start, len(data)):
            piece = memoryview(data)[first - start :][:length]
            self.compare(key, first, length, xxhash.xxh3_128_digest(piece))

    def expect(self, key: str, start: int, length: int) -> None:
        """Record that a range is going to be read."""
        for first, count in _cut(start, length):
            with self._lock:
                self._of(key, first).setdefault((first, count), None)

    def parts(self) -> Iterator[tuple[str, int]]:
        """The parts of files in which a range was noted: (path of the file, number of the part of PART_BYTES)."""
        with self._lock:
            return iter(sorted(self._found))

    def comparing(self, key: str, start: int = 0) -> "Comparison":
        """Compare the noted ranges of a file with its bytes from `start`, a multiple of PART_BYTES.

        The caller passes the bytes to `take`, in order, and calls `finish` when it knows that they are right.
        `finish` compares the digest of every noted range of these bytes. For a range that `expect` has noted,
        `finish` records the digest, and a later read of the range must have the same digest.
        """
        return Comparison(self, key, start)

    def checked(self, ranges: Iterable[tuple[str, int, int]], sink: Callable[[memoryview], None]) -> "CheckedSink":
        """A sink that compares the digests of its bytes with the noted digests, and passes the bytes on to `sink`.

        Args:
            ranges: key, first byte and length of the ranges whose bytes the new sink receives, in order.
            sink: receives the blocks.
        """
        pieces = ((key, *piece) for key, start, length in ranges for piece in _cut(start, length))
        return CheckedSink(self, pieces, sink)

    def of_part(self, key: str, start: int) -> _Ranges:
        """The ranges in the part that begins at `start`; for `Comparison`."""
        with self._lock:
            return dict(self._of(key, start)) if (key, start // PART_BYTES) in self._found else {}

    def _of(self, key: str, start: int) -> _Ranges:
        return self._found.setdefault((key, start // PART_BYTES), {})

    def compare(self, key: str, start: int, length: int, digest: bytes) -> None:
        """Record the digest of a range within one part.

        Raises:
            CheckpointError: an earlier read of the range had other bytes.
        """
        with self._lock:
            known = self._of(key, start).get((start, length))
            is_same = known in {None, digest}
            # After a difference, all later reads of the range are refused too: it is unknown which of the two
            # contents was used.
            self._of(key, start)[start, length] = digest if is_same else b""
        if not is_same:
            raise CheckpointError(
                f"{key} changed while it was read: two reads of bytes {start} to {start + length} differ",
                hint="`safepoint checkpoints verify --deep` lists the faults",
            )


class Comparison:
    """See `ReadRanges.comparing`."""

    def __init__(self, found: ReadRanges, key: str, start: int) -> None:
        self._found = found
        self._key = key
        self._position = start
        self._waiting: list[tuple[int, int]] = []
        self._open: list[tuple[int, int, Hasher]] = []
        self._done: list[tuple[int, int, bytes]] = []
        self._begin_part()

    def _begin_part(self) -> None:
        self._waiting = sorted(self._found.of_part(self._key, self._position), reverse=True)

    def take(self, block: memoryview) -> None:
        """Add the next bytes."""
        while block:
            left = PART_BYTES - self._position % PART_BYTES
            self._take(block[:left])
            block = block[left:]
            if self._position % PART_BYTES == 0:
                self._begin_part()

    def _take(self, block: memoryview) -> None:
        begin, end = self._position, self._position + len(block)
        while self._waiting and self._waiting[-1][0] < end:
            self._open.append((*self._waiting.pop(), xxhash.xxh3_128()))
        still_open: list[tuple[int, int, Hasher]] = []
        for start, length, hasher in self._open:
            hasher.update(block[max(0, start - begin) : start + length - begin])
            if start + length <= end:
                self._done.append((start, length, hasher.digest()))
            else:
                still_open.append((start, length, hasher))
        self._open, self._position = still_open, end

    def finish(self) -> None:
        """Compare the noted ranges. Call this when all bytes were added, and are known to be right.

        Raises:
            CheckpointError: a range was read with other bytes.
        """
        for start, length, digest in self._done:
            self._found.compare(self._key, start, length, digest)


class CheckedSink:
    """See `ReadRanges.checked`."""

    def __init__(
        self, found: ReadRanges, pieces: Iterator[tuple[str, int, int]], sink: Callable[[memoryview], None]
    ) -> None:
        self._found = found
        self._pieces = pieces
        self._sink = sink
        self._piece: tuple[str, int, int] | None = None
        self._left = 0
        self._hasher: Hasher = xxhash.xxh3_128()

    def __call__(self, block: memoryview) -> None:
        """Take the next bytes.

        Raises:
            CheckpointError: an earlier read of a range that ends in this block had other bytes.
        """
        rest = block
        while rest:
            if self._piece is None:
                self._piece, self._hasher = next(self._pieces), xxhash.xxh3_128()
                self._left = self._piece[2]
            head = rest[: self._left]
            self._hasher.update(head)
            self._left -= len(head)
            rest = rest[len(head) :]
            if not self._left:
                self._found.compare(*self._piece, self._hasher.digest())
                self._piece = None
        self._sink(block)


def _cut(start: int, length: int) -> Iterator[tuple[int, int]]:
    """The range, cut where parts of the file begin."""
    end = start + length
    while start < end:
        stop = min(end, (start // PART_BYTES + 1) * PART_BYTES)
        yield start, stop - start
        start = stop
