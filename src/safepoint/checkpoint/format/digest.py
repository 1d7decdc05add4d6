"""Digests of files: XXH3-128, of a whole file and of its parts.

A file of more than PART_BYTES is digested in parts, and its digest is the digest of the parts' digests. So a fetch
can check each part by itself, in any order, and fetches only damaged parts again.

A digest detects accidents, not attacks: an attacker who can write the folder can also write the manifest. Nothing in
a checkpoint is executed, whether or not its digests match.
"""

import errno
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from safepoint.foundation.shared_folders.opening import open_file

ALGORITHM = "xxh3-128"
PART_BYTES = 64 << 20
"""The checkpoint format fixes this value: with another value, the same file would have another digest."""
_CHUNK_BYTES = 4 << 20
_PREFIX = f"{ALGORITHM}:"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """The size and the digests of a file.

    Args:
        size_bytes: the size.
        digest: `xxh3-128:<32 hex digits>` of the whole file.
        parts: the digests of the parts of PART_BYTES, in order; empty for a file of one part.
    """

    size_bytes: int
    digest: str
    parts: tuple[str, ...] = ()


def digest_bytes(data: bytes | memoryview) -> str:
    """The digest of `data`, as written in a manifest: `xxh3-128:<32 hex digits>`."""
    return f"{_PREFIX}{xxhash.xxh3_128_hexdigest(data)}"


class FileDigester:
    """Computes the digests of a file and of its parts. `update` receives the bytes of the file in order."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._hasher = xxhash.xxh3_128()
        self._in_part = 0
        self._size = 0

    def update(self, piece: memoryview) -> None:
        """Add the next piece."""
        self._size += len(piece)
        while piece:
            head = piece[: PART_BYTES - self._in_part]
            self._hasher.update(head)
            self._in_part += len(head)
            piece = piece[len(head) :]
            if self._in_part == PART_BYTES:
                self._end_part()

    def add_zeros(self) -> None:
        """Add PART_BYTES zeros without computing their digest each time. Call it only at the start of a part."""
        assert not self._in_part
        self._parts.append(_digest_of_zeros())
        self._size += PART_BYTES

    def differs(self, parts: Sequence[str]) -> bool:
        """Whether the digest of the last complete part differs from its digest in `parts`; False if `parts` has no
        digest for this part."""
        number = len(self._parts) - 1
        return 0 <= number < len(parts) and self._parts[number] != parts[number]

    def _end_part(self) -> None:
        self._parts.append(f"{_PREFIX}{self._hasher.hexdigest()}")
        self._hasher = xxhash.xxh3_128()
        self._in_part = 0

    def result(self) -> FileDigest:
        """The size and the digests of all pieces. Do not call `update` after this method."""
        if self._in_part or not self._parts:
            self._end_part()
        if len(self._parts) == 1:
            return FileDigest(size_bytes=self._size, digest=self._parts[0])
        return FileDigest(size_bytes=self._size, digest=digest_of_parts(self._parts), parts=tuple(self._parts))


@functools.cache
def _digest_of_zeros() -> str:
    """The digest of a part that has only zeros."""
    return digest_bytes(bytes(PART_BYTES))


def digest_of_parts(parts: Sequence[str]) -> str:
    """The digest of a file, from the digests of its parts."""
    return digest_bytes(b"".join(bytes.fromhex(part.removeprefix(_PREFIX)) for part in parts))


def num_parts(size_bytes: int) -> int:
    """The number of part digests of a file of this size; 0 for a file of one part."""
    return 0 if size_bytes <= PART_BYTES else -(-size_bytes // PART_BYTES)


def digest_file(
    path: Path,
    progress: Callable[[int], None] | None = None,
    *,
    expected_bytes: int | None = None,
    expected_parts: Sequence[str] = (),
) -> FileDigest:
    """The size and the digests of the file at `path`, which is read once.

    Args:
        path: a regular file; links are not followed.
        progress: called with the number of bytes read since the last call.
        expected_bytes: the size that the file should have. If the file is larger, only one byte more is read, and the
            size in the result is this size plus one. None if any size is right.
        expected_parts: the digests that the parts of the file should have, if they are known. Reading stops after the
            first part with another digest, and the result is the digest of the bytes that were read. If a part should
            contain only zeros, and is a hole of the file, the part is not read. (A sparse file of many terabytes
            occupies no disk space, but reading its holes would take hours.)

    Raises:
        OSError: unreadable, a link, or not a regular file.
    """
    descriptor = open_file(path)
    try:
        return digest_open_file(descriptor, progress, expected_bytes=expected_bytes, expected_parts=expected_parts)
    finally:
        os.close(descriptor)


def digest_open_file(
    descriptor: int,
    progress: Callable[[int], None] | None = None,
    *,
    expected_bytes: int | None = None,
    expected_parts: Sequence[str] = (),
) -> FileDigest:
    """The same as `digest_file`, for an open file. The current position of `descriptor` is not used."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    digester, position = FileDigester(), 0
    end = None if expected_bytes is None else expected_bytes + 1
    while position % PART_BYTES or not digester.differs(expected_parts):
        if position % PART_BYTES == 0 and _are_zeros(descriptor, position, expected_parts):
            digester.add_zeros()
            count = PART_BYTES
        else:
            length = min(_CHUNK_BYTES, PART_BYTES - position % PART_BYTES)
            length = length if end is None else min(length, end - position)
            count = os.preadv(descriptor, [buffer[:length]], position)
            digester.update(buffer[:count])
        if not count:
            break
        position += count
        if progress is not None:
            progress(count)
    return digester.result()


def _are_zeros(descriptor: int, start: int, expected_parts: Sequence[str]) -> bool:
    """Whether the part that begins at `start` should be zeros, and is one hole.

    A hole does not mean that data was lost: some file systems report holes where a program has written zeros.
    """
    number, end = start // PART_BYTES, start + PART_BYTES
    if number >= len(expected_parts) or expected_parts[number] != _digest_of_zeros():
        return False
    if os.fstat(descriptor).st_size < end:
        return False
    try:
        return os.lseek(descriptor, start, os.SEEK_DATA) >= end
    except OSError as error:
        return error.errno == errno.ENXIO  # there is no data up to the end of the file
