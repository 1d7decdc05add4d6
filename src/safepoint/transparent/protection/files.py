"""The form of a protected file: its bytes, then a tag of 16 bytes for each chunk of 64 KiB.

The tags are computed with AES-256-GCM. In an encrypted file, the bytes are encrypted. In an authenticated file, the
bytes are unchanged, so that a table can still be mapped: the bytes are the associated data of an empty message.

The nonce of a chunk is its number and, in the last byte, whether it is the last chunk. No nonce is used twice with
the same key, because each file of each image has its own key, and each file is written once, from its beginning to
its end. If a file is cut off, or its chunks are exchanged, the nonce of a chunk no longer matches its tag.
"""

import functools
import importlib
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from safepoint.checkpoint.format.digest import FileDigest, FileDigester
from safepoint.errors import ImageError
from safepoint.foundation.shared_folders.opening import open_file

CHUNK_BYTES = 64 << 10
TAG_BYTES = 16
_NUMBER_BYTES = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class FileProtection:
    """How one file is protected.

    Args:
        is_encrypted: whether it is encrypted; otherwise it is only authenticated.
        key: its key, 32 bytes; None if it is not known. Without the key, tags are not compared.
    """

    is_encrypted: bool
    key: bytes | None = field(repr=False)


def _cipher(key: bytes) -> Any:
    # Imported here, because a file without protection does not need this package.
    return importlib.import_module("cryptography.hazmat.primitives.ciphers.aead").AESGCM(key)


@functools.cache
def _invalid_tag() -> type[Exception]:
    return importlib.import_module("cryptography.exceptions").InvalidTag


def _nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(_NUMBER_BYTES) + bytes([is_last])


def _num_chunks(size_bytes: int) -> int:
    """The number of chunks of a file. An empty file has one empty chunk, so that a tag authenticates its size."""
    return max(1, -(-size_bytes // CHUNK_BYTES))


def content_bytes(stored_bytes: int) -> int:
    """How many bytes of content a protected file of this size has; -1 if no protected file has this size."""
    num_chunks = max(1, -(-stored_bytes // (CHUNK_BYTES + TAG_BYTES)))
    found = stored_bytes - num_chunks * TAG_BYTES
    return found if found >= 0 and _num_chunks(found) == num_chunks else -1


class ProtectedWriter:
    """Writes a file from its beginning to its end. A file without protection has no tags.

    Args:
        file: an empty file.
        protection: how it is protected.
    """

    def __init__(self, file: BinaryIO, protection: FileProtection | None) -> None:
        self._file = file
        self._digester = FileDigester()
        self._cipher = None
        self._is_encrypted = False
        if protection is not None:
            if protection.key is None:
                raise ValueError("key is None: a file cannot be protected without a key")
            self._cipher, self._is_encrypted = _cipher(protection.key), protection.is_encrypted
        self._chunk = bytearray()
        self._tags = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        if self._cipher is None:
            self._put(data)
            return
        view = memoryview(data)
        while view:
            # A full chunk waits until it is known whether it is the last chunk.
            if len(self._chunk) == CHUNK_BYTES:
                self._end_chunk(is_last=False)
            room = CHUNK_BYTES - len(self._chunk)
            self._chunk += view[:room]
            view = view[room:]

    def end(self) -> FileDigest:
        """Write what is left, and return the digests of the whole file."""
        if self._cipher is not None:
            self._end_chunk(is_last=True)
            self._put(self._tags)
        return self._digester.result()

    def _end_chunk(self, *, is_last: bool) -> None:
        assert self._cipher is not None
        nonce = _nonce(len(self._tags) // TAG_BYTES, is_last=is_last)
        if self._is_encrypted:
            sealed: bytes = self._cipher.encrypt(nonce, self._chunk, None)
            self._put(memoryview(sealed)[:-TAG_BYTES])
            self._tags += sealed[-TAG_BYTES:]
        else:
            self._put(self._chunk)
            self._tags += self._cipher.encrypt(nonce, b"", self._chunk)
        self._chunk.clear()

    def _put(self, data: bytes | bytearray | memoryview) -> None:
        with memoryview(data) as view:
            self._file.write(view)
            self._digester.update(view)


class ProtectedFile:
    """An open file. Several threads may read it at the same time. If its key is known, the content that is
    read is authentic."""

    def __init__(self, path: Path, protection: FileProtection | None) -> None:
        """Open the file at `path`, with the protection with which it was written.

        Raises:
            ImageError: no file with this protection has this size, or the key of an encrypted file is not known.
            OSError: the file cannot be read, is a link, or is not a regular file.
        """
        self.name = path.name
        self._is_encrypted = protection is not None and protection.is_encrypted
        self._cipher = None
        if protection is not None and protection.key is not None:
            self._cipher = _cipher(protection.key)
        elif self._is_encrypted:
            raise ImageError(f"{path} is encrypted; it was not used", hint="name its key with --key")
        self._descriptor = open_file(path)
        stored_bytes = os.fstat(self._descriptor).st_size
        self.size_bytes = stored_bytes if protection is None else content_bytes(stored_bytes)
        """How many bytes of content it has."""
        if self.size_bytes < 0:
            self.close()
            raise ImageError(f"{path} has {stored_bytes} bytes, which no protected file has; it was not used")
        self._num_chunks = _num_chunks(self.size_bytes)
        self.stored_bytes = stored_bytes
        """How many bytes it has with its tags."""

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> "ProtectedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, offset: int, length: int) -> bytes:
        """The `length` bytes from `offset` on; see `view`."""
        return bytes(self.view(offset, length))

    def view(self, offset: int, length: int) -> memoryview:
        """The `length` bytes from `offset` on. The view may keep a few more bytes in memory.

        Raises:
            ImageError: the file is too short, or was altered.
            OSError: the file cannot be read.
        """
        if offset + length > self.size_bytes:
            raise ImageError(f"{self.name} ends too early; it was not used")
        if self._cipher is None:
            return memoryview(self._pread(offset, length))
        first = offset // CHUNK_BYTES
        end = max(first + 1, -(-(offset + length) // CHUNK_BYTES))
        begin = first * CHUNK_BYTES
        data = self._pread(begin, min(self.size_bytes, end * CHUNK_BYTES) - begin)
        with memoryview(data) as view:
            if self._is_encrypted:
                data = b"".join(self._decrypted(view, first, end))
            else:
                self._check(view, first, end)
        return memoryview(data)[offset - begin : offset - begin + length]

    @property
    def is_authenticated(self) -> bool:
        """Whether reads are compared with the tags. The comparison needs the key."""
        return self._cipher is not None

    def tags(self) -> bytes:
        """The bytes that are stored after the content."""
        return self._pread(self.size_bytes, self.stored_bytes - self.size_bytes)

    def content(self) -> "mmap.mmap | bytes":
        """The whole content. It is mapped if the file is not encrypted, and takes memory otherwise.

        Raises:
            ImageError: the file was altered.
            OSError: the file cannot be read.
        """
        if self._is_encrypted or not self.size_bytes:
            return self.read(0, self.size_bytes)
        mapped = mmap.mmap(self._descriptor, self.size_bytes, access=mmap.ACCESS_READ)
        if self._cipher is not None:
            with memoryview(mapped) as view:
                self._check(view, 0, self._num_chunks)
        return mapped

    def _check(self, data: memoryview, first: int, end: int) -> None:
        for number, chunk, tag in self._chunks(data, first, end):
            self._open(number, tag, chunk)

    def _decrypted(self, data: memoryview, first: int, end: int) -> "list[bytes]":
        return [
            self._open(number, b"".join((chunk, tag)), None) for number, chunk, tag in self._chunks(data, first, end)
        ]

    def _chunks(self, data: memoryview, first: int, end: int) -> "list[tuple[int, memoryview, bytes]]":
        tags = self._pread(self.size_bytes + first * TAG_BYTES, (end - first) * TAG_BYTES)
        return [
            (
                first + place,
                data[place * CHUNK_BYTES : (place + 1) * CHUNK_BYTES],
                tags[place * TAG_BYTES : (place + 1) * TAG_BYTES],
            )
            for place in range(end - first)
        ]

    def _open(self, number: int, message: bytes, associated: memoryview | None) -> bytes:
        assert self._cipher is not None
        try:
            nonce = _nonce(number, is_last=number == self._num_chunks - 1)
            found: bytes = self._cipher.decrypt(nonce, message, associated)
        except _invalid_tag() as error:
            raise ImageError(
                f"{self.name} is damaged, or was changed by a program that does not have the image's key; the file "
                "was not used"
            ) from error
        return found

    def _pread(self, offset: int, length: int) -> bytes:
        pieces: list[bytes] = []
        while length:
            piece = os.pread(self._descriptor, length, offset)
            if not piece:
                raise ImageError(f"{self.name} ends too early; it was not used")
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
