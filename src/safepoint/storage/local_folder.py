"""A folder as a store. Deadlines are ignored: a file system call cannot be cancelled."""

import contextlib
import fcntl
import logging
import os
import re
import stat
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path

from safepoint.errors import AccessDeniedError, ConditionError, ObjectNotFoundError, StorageError, printable
from safepoint.foundation import clock, files
from safepoint.foundation.shared_folders import no_links
from safepoint.storage.location import Location
from safepoint.storage.store import (
    MOST_READ_BYTES,
    Condition,
    Content,
    OpenFile,
    Progress,
    Sink,
    StoredObject,
    check_key,
    check_length,
    is_own_key,
    opened_source,
    too_long,
)

_CHUNK_BYTES = 8 << 20
_BLOCK_BYTES = 1 << 20
_MOST_TRIES = 100
_LOCK_WITHIN_S, _LOCK_AGAIN_S = 10.0, 0.01
_held: set[Path] = set()
"""The folders whose lock another process did not release within `_LOCK_WITHIN_S`."""
_log = logging.getLogger("safepoint")
_WORKING = re.compile(r"\.(.+)\.[0-9a-f]{32}\.part")


class LocalStore:
    """The files below a folder, by their relative paths. Links are neither listed nor followed.

    Args:
        location: a `file` location; the folder need not exist yet.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        """See `Store`."""
        self._root = location.folder

    def list(self, prefix: str = "", *, deadline_s: float | None = None) -> Iterator[StoredObject]:
        """See `Store`."""
        folder = self._path(prefix) if prefix else self._root
        if folder.is_symlink() and prefix:
            return
        found: list[tuple[str, os.stat_result]] = []
        with _translating(folder), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found += files.walk_files(folder, skip_unreadable=True)
        for path, status in found:
            key = f"{prefix}/{path}" if prefix else path
            is_object = stat.S_ISREG(status.st_mode) and not _WORKING.fullmatch(path.rpartition("/")[2])
            if is_object and is_own_key(key, self.location):
                yield _object(key, status)

    def stat(self, key: str, *, deadline_s: float | None = None) -> StoredObject:
        """See `Store`."""
        with self._open(key) as descriptor:
            return _object(key, os.fstat(descriptor))

    def read(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        most_bytes: int = MOST_READ_BYTES,
        deadline_s: float | None = None,
    ) -> memoryview:
        """See `Store`."""
        with self._open(key) as descriptor:
            size_bytes = os.fstat(descriptor).st_size
            count = max(0, size_bytes - start) if length is None else length
            if length is None and count > most_bytes:
                raise too_long(str(self._path(key)), most_bytes)
            if start + count > size_bytes:
                raise StorageError(f"{self._path(key)} has {size_bytes} bytes, not {start + count}; nothing was read")
            buffer = memoryview(bytearray(count))
            done = 0
            while done < count:
                step = os.preadv(descriptor, [buffer[done : done + _CHUNK_BYTES]], start + done)
                if step == 0:
                    raise StorageError(f"{self._path(key)} became shorter while it was read")
                done += step
            return buffer.toreadonly()

    def stream(self, key: str, sink: Sink, *, start: int, length: int, deadline_s: float | None = None) -> None:
        """See `Store`."""
        with self._open(key) as descriptor:
            buffer = memoryview(bytearray(min(_BLOCK_BYTES, length)))
            done = 0
            while done < length:
                count = os.preadv(descriptor, [buffer[: length - done]], start + done)
                if count == 0:
                    raise StorageError(f"{self._path(key)} has {start + done} bytes, not {start + length}")
                sink(buffer[:count])
                done += count

    def write(
        self, key: str, data: bytes, *, condition: Condition | None = None, deadline_s: float | None = None
    ) -> str:
        """See `Store`."""
        return self._create(
            key, lambda descriptor: files.write_at(descriptor, memoryview(data), 0), condition=condition
        )

    def upload(
        self,
        key: str,
        source: Path | OpenFile | Content,
        *,
        fence: Callable[[], None] | None = None,
        progress: Progress | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """See `Store`. The file is not uploaded in parts: after an interruption, the caller has to upload the whole
        file again."""

        check_key(key)
        with opened_source(source) as opened:

            def fill(descriptor: int) -> None:
                if isinstance(opened, Content):
                    _receive(opened, descriptor, progress)
                else:
                    _copy(opened, descriptor, progress)

            self._create(key, fill, fence=fence)

    def _create(
        self,
        key: str,
        fill: Callable[[int], None],
        *,
        condition: Condition | None = None,
        fence: Callable[[], None] | None = None,
    ) -> str:
        """Create or replace an object durably, and return its version. `fill` writes the content of the object."""
        path = self._path(key)
        with _translating(path):
            # `replace_file` is not used: the fence and the condition are checked between the write and the rename.
            working, descriptor = self._create_working(path)
            try:
                try:
                    fill(descriptor)
                    os.fsync(descriptor)
                    version = _version(os.fstat(descriptor))
                finally:
                    os.close(descriptor)
                if fence is not None:
                    fence()
                self._rename(working, path, condition)
            finally:
                no_links.unlink(working, below=self._root)
            return version

    def _create_working(self, path: Path) -> tuple[Path, int]:
        """Create and open an empty file in the folder of `path`; create this folder if necessary.

        Return the path and the descriptor of the file.
        """
        working = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
        for _ in range(_MOST_TRIES):
            # After `make_folder`, another process may delete the folder, because the folder is empty.
            try:
                files.make_folder(path.parent, below=self._root)
                return working, no_links.create_file(working, below=self._root)
            except FileNotFoundError:
                continue
            except FileExistsError:
                # `mkdir` also raises this error if another process deletes an existing folder during the call.
                if path.parent.exists() and not path.parent.is_dir():
                    raise
        raise StorageError(f"another process deletes {path.parent} each time that it is created; nothing was written")

    def _rename(self, working: Path, path: Path, condition: Condition | None) -> None:
        # Each writer that uses this class locks the folder during the comparison and the rename. So no other writer
        # changes the object between the comparison and the rename. There are two exceptions: the file system has no
        # locks (`_locked`), or a writer does not get the lock in time and continues without the lock
        # (`_wait_for_lock`).
        with _locked(path.parent) as folder:
            if condition is not None:
                try:
                    present = _version(os.stat(path, follow_symlinks=False))
                except FileNotFoundError:
                    present = None
                if present != condition.version:
                    raise ConditionError(
                        f"{path} {'exists already' if condition.version is None else 'has changed'}; "
                        "nothing was written",
                        hint="another run writes to the same location; stop one of the two runs",
                    )
            no_links.rename(working, path, below=self._root)
            # After the rename, another process may delete the object, and then the empty folder. So the folder is
            # synchronized by its open descriptor, and not by its path.
            os.fsync(folder)

    def delete(self, key: str, *, deadline_s: float | None = None) -> None:
        """See `Store`. Folders that become empty are deleted too."""
        path = self._path(key)
        with _translating(path):
            try:
                with no_links.located(path, below=self._root) as (name, folder):
                    os.unlink(name, dir_fd=folder)
            except (FileNotFoundError, NotADirectoryError):
                return
            parent = path.parent
            with contextlib.suppress(OSError):  # keep a folder that holds other objects
                while parent != self._root:
                    parent.rmdir()
                    parent = parent.parent
            # `parent` is now the first folder that this process did not delete. If `parent` does not exist, another
            # process has deleted it because it was empty. That process calls `fsync` for the folder above `parent`,
            # so this process does not need to call `fsync`.
            with contextlib.suppress(FileNotFoundError):
                files.fsync_folder(parent)

    def sweep(
        self,
        *,
        only: Callable[[str], bool] = lambda key: True,
        keys: Iterable[str] = (),
        below: str = "",
        begun_before_s: float | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """See `Store`. `keys` is ignored: in a folder, all unfinished uploads are found, whatever their keys are."""
        num_swept = 0
        folder = self._path(below) if below else self._root
        if below and folder.is_symlink():
            return 0
        with _translating(folder), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path, status in list(files.walk_files(folder, skip_unreadable=True)):
                if begun_before_s is not None and status.st_mtime >= begun_before_s:
                    continue
                place = folder / path
                match = _WORKING.fullmatch(place.name)
                if match and only((place.parent / match[1]).relative_to(self._root).as_posix()):
                    no_links.unlink(place, below=self._root)
                    num_swept += 1
        return num_swept

    def _path(self, key: str) -> Path:
        path = self._root / check_key(key)
        for parent in path.parents:
            if parent == self._root:
                break
            if parent.is_symlink():
                raise StorageError(f"{parent} is a link, and links are not followed; nothing was done")
        return path

    @contextlib.contextmanager
    def _open(self, key: str) -> Generator[int]:
        path = self._path(key)
        try:
            descriptor = no_links.open_file(path, os.O_RDONLY | os.O_NONBLOCK, below=self._root)
        except OSError as error:
            raise _translated(error, path) from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ObjectNotFoundError(f"{path} is not a file")
            with _translating(path):
                yield descriptor
        finally:
            os.close(descriptor)


def _object(key: str, status: os.stat_result) -> StoredObject:
    return StoredObject(
        key=key, size_bytes=status.st_size, version=_version(status), modified_s=status.st_mtime_ns / 1e9
    )


def _version(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


def _copy(source: OpenFile, target: int, progress: Progress | None) -> None:
    done = 0
    # Copy at most one byte more than the size. This byte shows that the file has grown, and the copy ends even if the
    # file grows faster than it is copied.
    while count := os.sendfile(target, source.descriptor, done, min(_CHUNK_BYTES, source.size_bytes + 1 - done)):
        done += count
        if progress is not None:
            progress(count)
    if done != source.size_bytes:
        raise StorageError(f"{source.name} changed while it was copied; nothing was written")


def _receive(content: Content, target: int, progress: Progress | None) -> None:
    done = 0

    def take(block: memoryview) -> None:
        nonlocal done
        files.write_at(target, block, done)
        done += len(block)
        if progress is not None:
            progress(len(block))

    content.write_to(take)
    check_length(content, done)


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # On a file system without locks, comparison and rename are not one atomic step.
        with contextlib.suppress(OSError):
            _wait_for_lock(descriptor, folder)
        yield descriptor
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, folder: Path) -> None:
    """Lock a folder. The wait is limited, because any user who may read the folder can hold this lock without end."""
    give_up_s = clock.monotonic_s() + (_LOCK_WITHIN_S if folder not in _held else 0)
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if clock.monotonic_s() >= give_up_s:
            break
        clock.sleep(_LOCK_AGAIN_S)
    if folder not in _held:
        _held.add(folder)
        _log.warning(
            "another process does not release the lock of %s; files are written there without a lock: "
            "make sure that no other run writes to this folder",
            printable(str(folder)),
        )


@contextlib.contextmanager
def _translating(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise _translated(error, path) from error


def _translated(error: OSError, path: Path) -> StorageError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ObjectNotFoundError(f"there is no {path}")
    if isinstance(error, PermissionError):
        return AccessDeniedError(f"{path} cannot be used: {error.strerror}", hint="check owner and mode")
    return StorageError(f"{path} cannot be used: {error.strerror or error}")
