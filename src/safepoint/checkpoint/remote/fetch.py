"""Fetches a checkpoint from a store into a working folder: parallel ranged reads, each checked when it is complete.

Promises:

- If a part of a file (a piece with a digest of its own) has a wrong digest, only this part is fetched again.
- Nothing is written outside the working folder.
- The used memory does not grow with the size of the checkpoint.
- The disk's free space is checked before the first byte is fetched.

The caller commits.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.format.digest import PART_BYTES, FileDigester
from safepoint.checkpoint.format.manifest import FileEntry, Manifest
from safepoint.checkpoint.format.read_ranges import Comparison, ReadRanges
from safepoint.checkpoint.format.verify import compare_listing
from safepoint.checkpoint.remote.refusals import Refusals
from safepoint.errors import CheckpointError, NoRoomError, ObjectNotFoundError, printable
from safepoint.foundation import files
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.volumes.needed import shortage
from safepoint.storage.store import Store

MAKE_ROOM = "free some space, or use a folder on another disk (for a run with an object store: --local-dir)"
"""The hint of the error that a disk has no room for a checkpoint."""
_IN_FLIGHT = 4
_NUM_TRIES = 3
_IMPOSSIBLE_PATH = {
    *(errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.EINVAL, errno.EILSEQ, errno.ELOOP),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A part of one file that is fetched and checked by itself.

    Args:
        path: the file, within the checkpoint.
        start: where the part begins in the file.
        size_bytes: the size of the part.
        digest: the digest of the part.
    """

    path: str
    start: int
    size_bytes: int
    digest: str


def windows_of(entries: Iterable[FileEntry]) -> list[Window]:
    """All parts of these files, in their order."""
    return [
        Window(
            path=entry.path,
            start=index * PART_BYTES,
            size_bytes=min(PART_BYTES, entry.size_bytes - index * PART_BYTES),
            digest=digest,
        )
        for entry in entries
        for index, digest in enumerate(entry.parts or (entry.digest,))
    ]


def share(parts: Sequence[Window], *, index: int, count: int) -> list[Window]:
    """The parts that node `index` of `count` fetches. The nodes' shares are disjoint, and of about equal size."""
    loads = [0] * count
    mine: list[Window] = []
    for part in sorted(parts, key=lambda part: (-part.size_bytes, part.path, part.start)):
        lightest = loads.index(min(loads))
        loads[lightest] += part.size_bytes
        if lightest == index:
            mine.append(part)
    return mine


def check_listing(store: Store, name: str, manifest: Manifest) -> None:
    """Compare the sizes that the store lists with the manifest, before anything is fetched.

    Objects that the manifest does not name are ignored.

    Raises:
        CheckpointError: a file is missing or has another size.
        StorageError: the store cannot be read.
    """
    found = {item.key.removeprefix(f"{name}/"): item.size_bytes for item in store.list(name)}
    for fault in compare_listing(manifest.files, found):
        raise CheckpointError(f"{store.location.child(name)} is damaged: {fault}")


def create_files(entries: Sequence[FileEntry], folder: Path) -> None:
    """Create the files of a checkpoint at their full size, without content.

    Raises:
        CheckpointError: the file system does not allow a path of the checkpoint, such as a path that is too long.
        NoRoomError: the disk or a quota has too little space. If the disk states its free space, no file was created.
        OSError: the folder cannot be written.
    """
    no_links.make_folders(folder)
    check_room(
        folder,
        ((entry.path, entry.size_bytes) for entry in entries),
        consequence="nothing was fetched",
        hint=MAKE_ROOM,
    )
    for entry in entries:
        path = folder / entry.path
        with refusing_impossible_path(entry.path):
            no_links.make_folders(path.parent)
            descriptor = no_links.open_file(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            if entry.size_bytes:
                _allocate(descriptor, entry.size_bytes)
        finally:
            os.close(descriptor)


def check_room(folder: Path, needed: Iterable[tuple[str, int]], *, consequence: str, hint: str) -> None:
    """Check that files fit on the disk of a folder; see `shortage`.

    Args:
        folder: an existing folder.
        needed: the path of each file, and its size in bytes.
        consequence: what was not done, for the error.
        hint: what the user can do.

    Raises:
        NoRoomError: the disk has too little free space.
    """
    why = shortage(folder, needed)
    if why:
        raise NoRoomError(f"{why}; {consequence}", hint=hint)


@contextlib.contextmanager
def refusing_impossible_path(path: str) -> Generator[None]:
    """Raise CheckpointError if the file system cannot create the file `path` of a checkpoint."""
    try:
        yield
    except OSError as error:
        if error.errno not in _IMPOSSIBLE_PATH:
            raise
        raise CheckpointError(f"the file {printable(path)} cannot be created here: {error.strerror}") from error


def fetch(
    store: Store,
    name: str,
    parts: Sequence[Window],
    folder: Path,
    *,
    progress: Callable[[int], None] | None = None,
    deadline_s: float | None = None,
) -> None:
    """Fetch `parts` of the checkpoint `name` into the prepared `folder`, and make them durable.

    Args:
        store: the store with the checkpoint.
        name: the name of the checkpoint, such as `checkpoint-20`.
        parts: the parts to fetch; see `share`.
        folder: a folder for which this node, or another node that shares it, has called `create_files`.
        progress: receives the number of bytes that were fetched and checked since its last call; one call at a time.
        deadline_s: when to give up, by the monotonic clock. If None, only each single request has a time limit.

    Raises:
        CheckpointError: a part is missing, had a wrong digest each time it was fetched, or is in a file that the
            store refuses, although the store serves other files.
        StorageError: the store cannot be read.
        OSError: the disk is full or gone.
    """

    def one(part: Window) -> None:
        descriptor = no_links.open_file(folder / part.path, os.O_WRONLY)
        try:
            _fetch_window(store, f"{name}/{part.path}", part, descriptor, deadline_s)
        finally:
            os.close(descriptor)

    _for_each(parts, one, progress)
    for path in sorted({part.path for part in parts}):
        files.fsync_file(folder / path)


def check(
    store: Store,
    name: str,
    parts: Sequence[Window],
    *,
    read: ReadRanges | None = None,
    progress: Callable[[int], None] | None = None,
    deadline_s: float | None = None,
) -> dict[str, str]:
    """Read `parts` of the checkpoint `name` and compare them with their digests; nothing is written.

    Args:
        store: the store with the checkpoint.
        name: the name of the checkpoint, such as `checkpoint-20`; empty for the store's own location.
        parts: the parts to read.
        read: the ranges of the checkpoint that the caller has read or is going to read; a range that was read with
            other bytes is a fault.
        progress: receives the number of bytes that were read since its last call; one call at a time.
        deadline_s: when to give up, by the monotonic clock. If None, only each single request has a time limit.

    Returns:
        The fault of each damaged file, by path.

    Raises:
        StorageError: the store cannot be read.
    """
    wrong: dict[str, str] = {}

    def one(part: Window) -> None:
        try:
            _fetch_window(store, f"{name}/{part.path}".lstrip("/"), part, None, deadline_s, read)
        except CheckpointError as error:
            wrong.setdefault(part.path, error.message)

    _for_each(parts, one, progress)
    return wrong


def _for_each(
    parts: Sequence[Window], work: Callable[[Window], None], progress: Callable[[int], None] | None
) -> None:
    """Call `work` for all parts, on several threads; its first error cancels the rest."""
    lock = threading.Lock()

    def one(part: Window) -> None:
        work(part)
        if progress is not None:
            with lock:
                progress(part.size_bytes)

    with ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="safepoint-fetch") as threads:
        list(threads.map(one, parts))  # raises the first error


def _fetch_window(
    store: Store,
    key: str,
    part: Window,
    descriptor: int | None,
    deadline_s: float | None,
    read: ReadRanges | None = None,
) -> None:
    end = part.start + part.size_bytes
    for _ in range(_NUM_TRIES):
        digester = FileDigester()
        comparison = None if read is None else read.comparing(part.path, part.start)
        position = part.start

        def take(
            block: memoryview, digester: FileDigester = digester, comparison: Comparison | None = comparison
        ) -> None:
            nonlocal position
            digester.update(block)
            if comparison is not None:
                comparison.take(block)
            if descriptor is not None:
                files.write_at(descriptor, block, position)
            position += len(block)

        try:
            with Refusals(store).as_fault(key, deadline_s=deadline_s):
                store.stream(key, take, start=part.start, length=part.size_bytes, deadline_s=deadline_s)
        except ObjectNotFoundError as error:
            raise CheckpointError(f"{key} is missing in {store.location}") from error
        if digester.result().digest == part.digest:
            if comparison is not None:
                comparison.finish()
            return
    raise CheckpointError(
        f"{key} in {store.location} is damaged: bytes {part.start} to {end} do not match their digest, "
        f"even after {_NUM_TRIES} tries"
    )


def _allocate(descriptor: int, size_bytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        # Some network file systems cannot allocate. The file is then sparse, and a full disk is noticed later.
        if error.errno in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            os.truncate(descriptor, size_bytes)
        else:
            raise
