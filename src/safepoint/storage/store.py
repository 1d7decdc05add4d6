"""The Protocol `Store`: objects that are named by keys. Folders and object stores implement it."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safepoint.errors import StorageError
from safepoint.foundation.shared_folders.opening import open_regular
from safepoint.storage.location import Location

Progress = Callable[[int], None]
"""Called with the number of bytes moved since the last call."""
Sink = Callable[[memoryview], None]
"""Called with a block of bytes. The block is valid until the call returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The content of an object, from any source. Its length is known before the first byte is read.

    Args:
        size_bytes: how many bytes there are.
        write_to: a function that passes all bytes to a sink once, in order, in blocks of any size. `Store.upload`
            calls it at most once, on the thread that called `upload`. An exception that `write_to` raises ends the
            upload, and `upload` raises it too. `write_to` must not catch an exception that the sink raises.
    """

    size_bytes: int
    write_to: Callable[[Sink], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFile:
    """A regular file that is open. All bytes come from this file, even if another file gets its name meanwhile.

    Args:
        descriptor: the open file. Several threads read it at given offsets; its position is not used.
        size_bytes: the size when the file was opened.
        name: the name of the file, for messages.
    """

    descriptor: int
    size_bytes: int
    name: str


@contextlib.contextmanager
def opened(path: Path, *, below: Path | None = None) -> Generator[OpenFile]:
    """Open a regular file once, to upload it.

    Args:
        path: the file; it must not be a link.
        below: a folder above the file; the folders between the two must not be links.

    Raises:
        OSError: the file cannot be opened, or is not a regular file; or the file or a folder below `below` is a link.
    """
    with open_regular(path, below=below) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        yield OpenFile(descriptor=file.fileno(), size_bytes=size_bytes, name=str(path))


def opened_source(source: "Path | OpenFile | Content") -> "contextlib.AbstractContextManager[OpenFile | Content]":
    """A context that returns the source of an upload. If `source` is a path, the context opens the file, and closes
    it when the `with` block ends."""
    return opened(source) if isinstance(source, Path) else contextlib.nullcontext(source)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object in a store.

    Args:
        key: the key of the object, relative to the store's location, with `/`.
        size_bytes: the size of the object.
        version: a string that identifies what was written. In a folder and in Google's stores, the version changes
            with every write. In other stores, the version is the ETag, which may stay the same when the same content
            is written again.
        modified_s: when the object was written, seconds since 1970 by the store's clock.
    """

    key: str
    size_bytes: int
    version: str
    modified_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The condition under which a write may create or replace an object.

    Args:
        version: the version that the object must still have; None if there must be no object under the key.
    """

    version: str | None = None


WHOLE_BYTES = 16 << 20
"""Object stores write objects up to this size with one request. Only larger objects can leave unfinished uploads."""
MOST_READ_BYTES = 64 << 20
"""The limit of a read that states neither a length nor a limit of its own."""
ABSENT = Condition()
"""Write only when there is no object under the key."""


class Store(Protocol):
    """The objects at one location, by key.

    A key is a relative path with `/` between its parts. No part is empty, `.` or `..`, and no character is a control
    character or a surrogate (`check_key`).

    What every implementation promises, and the contract suite tests:

    - a reader sees an object whole or not at all. While an object is replaced, readers see the old object;
    - after a write has returned, every reader sees the new object, and in a folder the object survives a power loss;
    - of several writers with the same condition at most one succeeds, and the others get ConditionError;
    - a request that fails in transit is repeated until `deadline_s`, a time by
      `safepoint.foundation.clock.monotonic_s`. It also succeeds if an earlier try has already done the work, and only
      the answer to that try was lost;
    - content that was changed on its way to the store is sent again, or the write fails; it never counts as written;
    - memory stays bounded for objects of any size, except in `read`, which returns all requested bytes;
    - several threads may call all methods at once; a process that forks must not use a store before the fork.

    All methods may raise AccessDeniedError and TransientError (the deadline has passed). The docstring of each method
    names its other errors.
    """

    @property
    def location(self) -> Location:
        """The location of the store."""
        ...

    def list(self, prefix: str = "", *, deadline_s: float | None = None) -> Iterator[StoredObject]:
        """Yield the objects below `prefix/`, sorted by key; without a prefix, all objects of the store.

        Objects of other programs whose names are not valid keys are left out, with a warning. The library obstore
        lists the stores of Google and Azure. There, the listing fails at an object with an invalid name.
        """
        ...

    def stat(self, key: str, *, deadline_s: float | None = None) -> StoredObject:
        """The size, the version and the time of an object.

        Raises:
            ObjectNotFoundError: there is no such object.
        """
        ...

    def read(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        most_bytes: int = MOST_READ_BYTES,
        deadline_s: float | None = None,
    ) -> memoryview:
        """Read `length` bytes from `start` on; if `length` is None, all bytes from `start` to the end.

        Args:
            key: the key of the object.
            start: the first byte.
            length: the number of bytes; None for all bytes to the end.
            most_bytes: the limit of the bytes that are read if `length` is None. The size that the server states is
                not trusted.
            deadline_s: when to give up, by the monotonic clock. If None, only each single request has a time limit.

        Raises:
            ObjectNotFoundError: there is no such object.
            StorageError: the object has fewer bytes than requested, or more than `most_bytes`.
        """
        ...

    def stream(self, key: str, sink: Sink, *, start: int, length: int, deadline_s: float | None = None) -> None:
        """Read `length` bytes from `start` and pass them to `sink` in blocks, in order, each byte once.

        A block is valid until `sink` returns. If the connection is cut off, reading continues with the first byte
        that was not passed on.

        Raises:
            ObjectNotFoundError: there is no such object.
            StorageError: the object has fewer bytes than requested.
        """
        ...

    def write(
        self, key: str, data: bytes, *, condition: Condition | None = None, deadline_s: float | None = None
    ) -> str:
        """Write a small object in one request and return its version.

        Raises:
            ConditionError: the condition does not hold; nothing was written.
        """
        ...

    def upload(
        self,
        key: str,
        source: Path | OpenFile | Content,
        *,
        fence: Callable[[], None] | None = None,
        progress: Progress | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """Write a file or a stream of any size. Large sources are sent in parts. An existing object is replaced.

        If an upload to S3 is interrupted, a repeated upload, even by another process, sends only the missing parts.
        On the other object stores, a repeated upload sends everything again.

        A stream is not written to a disk of this machine. At most 32 MiB of it are in memory. S3 limits the number of
        parts, so a stream of more than 300 GB has parts of more than 32 MiB; then one part at a time is in memory.

        Args:
            key: the key of the object.
            source: a stream; or a regular file, as a path or as an open file. The file must not change during the
                upload. A path is opened once, and must not be a link.
            fence: called immediately before the object becomes visible. An exception that `fence` raises stops the
                upload. Together with `sweep`, a fence prevents a replaced writer from overwriting its successor's
                objects (docs/adr/0007-object-stores.md).
            progress: receives the number of bytes sent since its last call. If the server already has parts of the
                file, all these parts are reported in one call.
            deadline_s: when to give up, by the monotonic clock. If None, only each single request has a time limit.

        Raises:
            StorageError: the upload failed, or the source has more or fewer bytes than announced.
        """
        ...

    def delete(self, key: str, *, deadline_s: float | None = None) -> None:
        """Delete an object; a missing object is not an error."""
        ...

    def sweep(
        self,
        *,
        only: Callable[[str], bool] = lambda key: True,
        keys: Iterable[str] = (),
        below: str = "",
        begun_before_s: float | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """Delete the unfinished uploads of all writers, so that they cannot become visible. Return their number.

        An upload that the store does not let this user delete stays, with a warning.

        Args:
            only: called with the key of each upload; the uploads for which it returns True are deleted.
            keys: keys that may have unfinished uploads. MinIO lists the uploads of a key only if the request names
                exactly this key, so each of `keys` is requested, but not more than 10,000: other users may have
                written the list of keys. On MinIO, uploads of other keys are not found.
            below: a key. Only the uploads of keys below this key are listed, because other users may have begun any
                number of uploads elsewhere. If it is empty, the uploads of all keys are listed. On MinIO, the uploads
                of `keys` are listed in any case.
            begun_before_s: delete only uploads that began before this time, seconds since 1970; None for all.
            deadline_s: when to give up, by the monotonic clock. If None, each request has a time limit, and all
                listings and deletions together have half an hour.

        Raises:
            StorageError: there are too many uploads.
        """
        ...


def too_long(what: str, most_bytes: int) -> StorageError:
    """The error for an object that is larger than its reader allows."""
    return StorageError(f"{what}: the object has more than {most_bytes:,} bytes; it was not read")


def check_length(content: Content, num_bytes: int) -> None:
    """Check that a stream delivered as many bytes as it announced.

    Raises:
        StorageError: the stream delivered more or fewer bytes.
    """
    if num_bytes != content.size_bytes:
        raise StorageError(f"a stream of {content.size_bytes} bytes delivered {num_bytes} bytes; nothing was written")


def check_key(key: str) -> str:
    """Return `key`, or raise ValueError if the key is invalid; see `Store`."""
    if not is_key(key):
        raise ValueError(
            f"the key {key!r} is invalid: it must be a relative path, without empty parts, `.`, `..`, control "
            "characters and surrogates"
        )
    return key


def is_key(key: str) -> bool:
    """Whether `key` is valid, see `Store`."""
    is_plain = all(ord(letter) >= 32 and letter != "\x7f" and not "\ud800" <= letter <= "\udfff" for letter in key)
    return is_plain and not any(part in {"", ".", ".."} for part in key.split("/"))


def is_own_key(key: str, location: Location) -> bool:
    """Whether a name from a listing of `location` is a valid key. The first invalid name causes a warning."""
    if is_key(key):
        return True
    if not key.endswith("/"):  # consoles create empty objects with such keys, which stand for folders
        _warn_of_stranger(location)
    return False


@functools.cache
def _warn_of_stranger(location: Location) -> None:
    logging.getLogger("safepoint").warning(
        "%s has objects that Safepoint cannot have written: a part of their names is empty, `.` or `..`, or has a "
        "control character; these objects are ignored",
        location,
    )
