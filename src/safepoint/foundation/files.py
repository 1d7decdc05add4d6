"""Durable and atomic file operations, and the lock of a folder.

`fsync_file` makes the content of a file survive a power loss, and `fsync_folder` the names in a folder. A reader sees
the result of `write_atomic` and of `replace_folder` completely or not at all, even on another node that shares the
folder.
"""

import contextlib
import ctypes
import errno
import fcntl
import fnmatch
import functools
import itertools
import json
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from safepoint.errors import printable
from safepoint.foundation.bounded_json import read_object
from safepoint.foundation.processes import close_in_children
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.access_lists import let_only_writers_read
from safepoint.foundation.shared_folders.opening import NOT_A_FILE, count_names, open_regular, open_shared
from safepoint.foundation.shared_folders.record_locks import CANNOT_LOCK, GET_LOCK, IS_HELD, SET_LOCK, lock_file

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
_log = logging.getLogger("safepoint")
_NUM_LOCK_TRIES = 10


def make_folder(path: Path, *, below: Path | None = None) -> None:
    """Create a folder, and the missing folders above it. The names of the new folders survive a power loss.

    Args:
        path: the folder.
        below: a folder above `path`; the folders between the two, and `path` itself, may not be links.

    Raises:
        OSError: the folder cannot be created, or `path` is not a folder.
    """
    path = path.absolute()
    made = list(itertools.takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    no_links.make_folders(path, below=None if below is None else below.absolute())
    for folder in made:
        with contextlib.suppress(PermissionError):  # the user may create names in the parent, but may not open it
            fsync_folder(folder.parent)


def make_private_folder(path: Path) -> None:
    """Create a folder, and the missing folders above it, with access for this user only, whatever the umask is.

    Use it for the folders that programs keep in a home folder. If others could write to one of them, they could
    replace the settings, keys and code in it.

    Raises:
        OSError: the folder cannot be created, or `path` is not a folder.
    """
    for missing in reversed([one for one in (path, *path.parents) if not one.exists()]):
        missing.mkdir(exist_ok=True, mode=0o700)
    path.mkdir(exist_ok=True, mode=0o700)  # raises an error if `path` is not a folder


def fsync_file(path: Path) -> None:
    """Make the content of `path` survive a power loss."""
    _fsync(path, os.O_NOFOLLOW | os.O_NONBLOCK)  # `path` may be a link or a pipe by now


def fsync_folder(path: Path) -> None:
    """Make the names in `path` survive a power loss."""
    _fsync(path, os.O_DIRECTORY)


def _fsync(path: Path, flag: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, *, durable: bool, below: Path | None = None) -> None:
    """Write `data` so that a reader sees the old content or the new, never a part of it.

    Args:
        path: the file. Its folder must exist.
        data: the whole content.
        durable: whether the new content also survives a power loss. This costs about a millisecond.
        below: a folder above the file; the folders between the two may not be links.
    """

    def fill(file: BinaryIO) -> None:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())

    no_links.replace_file(path, fill, below=below)
    if durable:
        fsync_folder(path.parent)


def write_in_room(path: Path, data: bytes, room: Path) -> None:
    """Write `data` to a file even if the disk is full: use the disk space of a file that is no longer needed.

    A reader may see a part of the data.

    Args:
        path: the file.
        data: the whole content.
        room: the file that is no longer needed. It is in the same folder, has at least as many bytes, and is renamed
            to `path`. It may also be the file at `path` itself.
    """
    descriptor = no_links.open_file(room, os.O_WRONLY)
    try:
        write_at(descriptor, memoryview(data), 0)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)
    if room != path:
        no_links.rename(room, path)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` from byte `offset` of the file, with as many system calls as are needed."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def replace_folder(source: Path, target: Path, *, trash: Path) -> None:
    """Give the finished folder `source` its final name, durably. A folder that has this name already is replaced.

    If the file system can exchange two names in one call, a folder of this name exists at every moment. On other
    file systems the name is missing for a moment.

    Args:
        source: a complete folder on the same file system as `target`.
        target: the path at which readers look for the folder.
        trash: an existing folder on the same file system, into which the replaced folder is moved.
    """
    if not os.path.lexists(target):
        no_links.rename(source, target)
    elif target.is_symlink() or not target.is_dir():
        _replace(source, target, trash)
    else:
        _exchange(source, target, trash)
    fsync_folder(target.parent)


def _exchange(source: Path, target: Path, trash: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    renameat2 = getattr(libc, "renameat2", None)
    if renameat2 is not None:
        with no_links.located(source) as old, no_links.located(target) as new:
            names = [(_AT_FDCWD if one.folder is None else one.folder, os.fsencode(one.name)) for one in (old, new)]
            done = renameat2(*names[0], *names[1], _RENAME_EXCHANGE)
            error = ctypes.get_errno()
        if done == 0:
            no_links.rename(source, trash / uuid.uuid4().hex)
            return
        if error not in _CANNOT_EXCHANGE:
            raise OSError(error, os.strerror(error), str(target))
    # Network file systems cannot exchange two names. For a moment the name is missing. A reader that looks for it
    # at that moment uses the next older checkpoint.
    _replace(source, target, trash)


def _replace(source: Path, target: Path, trash: Path) -> None:
    # Until `source` has its new name, the replaced folder's name in the trash begins with its old name. So after a
    # crash `restore_replaced` can give the old name back.
    doomed = trash / uuid.uuid4().hex
    replaced = trash / f"{target.name}.{doomed.name}"
    no_links.rename(target, replaced)
    try:
        no_links.rename(source, target)
    except OSError:
        no_links.rename(replaced, target)  # a failed save must not remove the checkpoint that it was to replace
        raise
    no_links.rename(replaced, doomed)


def restore_replaced(folder: Path, *, trash: Path, is_name: Callable[[str], bool]) -> None:
    """Undo a `replace_folder` that a crash has interrupted: move the replaced folder from the trash back to its name.

    Args:
        folder: the parent of the `target` of `replace_folder`.
        trash: as for `replace_folder`. It may also contain folders that were replaced in other places than `folder`.
        is_name: whether a replaced folder with this name was in `folder`.
    """
    for path in trash.glob("*.????????????????????????????????"):
        target = folder / path.stem
        if is_name(path.stem) and not os.path.lexists(target):
            # If a folder cannot be moved, for example because it is immutable, the run starts all the same.
            with contextlib.suppress(OSError):
                no_links.rename(path, target)
                fsync_folder(folder)


def refresh(folder: Path) -> None:
    """Ask the server of a network file system whether another node has changed the names in `folder`.

    An NFS client caches for half a minute that a name did not exist, unless the folder is opened. A caller that waits
    for another node's file calls this function each time before it looks for the file.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def discard(path: Path, *, trash: Path) -> None:
    """Move `path` to the trash in one step, then delete it there. So after a crash `path` is complete or absent."""
    doomed = trash / uuid.uuid4().hex
    no_links.rename(path, doomed)
    fsync_folder(path.parent)
    delete_tree(doomed)


def delete_tree(path: Path, *, below: Path | None = None) -> None:
    """Delete a file, link, pipe or folder. Links are never followed, and a missing path is not an error.

    Args:
        path: what to delete.
        below: a folder above `path`. If a folder between the two is a link, nothing is deleted.
    """
    # If a folder above `path` is missing, or was replaced by a link, there is nothing to delete.
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        no_links.located(path, below=below) as (name, folder),
    ):
        _delete_entry(name, folder)


def delete_entries(root: Path, *below: str, pattern: str) -> int:
    """Delete entries of a folder, and nothing outside it, even if another process replaces folders by links.

    If an entry cannot be deleted, such as an immutable file or a mount point, it stays, and a warning is logged.

    Args:
        root: where `below` begins. Its own path may contain links.
        below: the names of the folders from `root` down to the folder. A link is refused. If a folder is missing,
            nothing is deleted.
        pattern: a pattern for the names of the entries, as for `fnmatch`.

    Returns:
        The number of entries that were deleted.

    Raises:
        OSError: a folder cannot be read, or is a link.
    """
    with contextlib.ExitStack() as stack:
        descriptor = stack.enter_context(_opened(root))
        try:
            for name in below:
                descriptor = stack.enter_context(_opened(name, os.O_NOFOLLOW, parent=descriptor))
        except FileNotFoundError:
            return 0
        names = fnmatch.filter(os.listdir(descriptor), pattern)
        for name in names:
            with contextlib.suppress(OSError):
                _delete_entry(name, descriptor)
        left = sorted(set(names) & set(os.listdir(descriptor)))
        for name in left:
            place = printable(str(Path(root, *below, name)))
            _log.warning("an earlier run has left %s; it cannot be deleted, so it stays, and is not used", place)
        return len(names) - len(left)


@contextlib.contextmanager
def _opened(path: str | Path, flags: int = 0, *, parent: int | None = None) -> Generator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _delete_entry(name: str, parent: int | None = None) -> None:
    try:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
            os.unlink(name, dir_fd=parent)
            return
        with contextlib.suppress(RecursionError):
            shutil.rmtree(name, ignore_errors=True, dir_fd=parent)
        os.lstat(name, dir_fd=parent)
    except FileNotFoundError:
        return
    with contextlib.suppress(OSError):
        _delete_deep(name, parent)


def _delete_deep(path: str, parent: int | None) -> None:
    """Delete a folder whose tree is too deep for recursion.

    The folders in each sub-folder are moved up, and the sub-folder is deleted. This is repeated while there are
    sub-folders.
    """
    with _opened(path, os.O_NOFOLLOW, parent=parent) as top:
        while folders := [entry.name for entry in os.scandir(top) if entry.is_dir(follow_symlinks=False)]:
            for folder in folders:
                with _opened(folder, os.O_NOFOLLOW, parent=top) as inner:
                    for entry in list(os.scandir(inner)):
                        if entry.is_dir(follow_symlinks=False):
                            os.rename(entry.name, uuid.uuid4().hex, src_dir_fd=inner, dst_dir_fd=top)
                        else:
                            os.unlink(entry.name, dir_fd=inner)
                os.rmdir(folder, dir_fd=top)
    shutil.rmtree(path, dir_fd=parent)


def walk_files(folder: Path, *, skip_unreadable: bool = False) -> Iterator[tuple[str, os.stat_result]]:
    """Yield `(relative path with /, stat)` of everything below `folder` that is not a folder, sorted by path.

    That includes links, sockets and devices: a caller that needs regular files checks `stat.S_ISREG`. Links are not
    followed. A file that disappears while the folder is listed, such as another process's working file, is left out.

    Args:
        folder: the folder.
        skip_unreadable: leave out sub-folders that cannot be read, such as `lost+found`, with a warning. Use it only
            where files that are left out count as missing.

    Raises:
        FileNotFoundError: `folder` itself does not exist.
        OSError: `folder` cannot be read, or a sub-folder cannot be read and `skip_unreadable` is False.
    """

    def note(path: str, error: OSError) -> None:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return
        if not skip_unreadable:
            raise error
        _warn_of_unreadable(path, error.strerror)

    found: list[tuple[str, os.stat_result]] = []
    pending = [os.fspath(folder)]
    while pending:
        current = pending.pop()
        try:
            entries = list(os.scandir(current))
        except OSError as error:
            if current == os.fspath(folder):
                raise
            note(current, error)
            continue
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError as error:
                note(entry.path, error)
                continue
            if stat.S_ISDIR(status.st_mode):
                pending.append(entry.path)
            else:
                found.append((Path(entry.path).relative_to(folder).as_posix(), status))
    yield from sorted(found, key=lambda item: item[0])


@functools.cache
def _warn_of_unreadable(path: str, reason: str) -> None:
    _log.warning("%s cannot be read (%s): its content is ignored", printable(path), reason)


class FolderLock:
    """A lock that makes this process the only writer of a folder, until `release` or the end of the process.

    The lock belongs to the open file, so user code that opens and closes the same file does not release it. A forked
    child closes its copy, so a data loader that outlives its parent does not keep the lock. On file systems without
    locks, `acquire` returns None.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        close_in_children(file)

    @classmethod
    def acquire(cls, path: Path, owner: dict[str, Any] | None) -> "FolderLock | None":
        """Take the lock, and write `owner` into its file. Another process that does not get the lock can name the
        owner. If `owner` is None, the content of the file is not changed.

        Returns:
            The lock, or None where the file system has no locks.

        Raises:
            BlockingIOError: another process, or this one, holds the lock.
            OSError: the file cannot be opened, see `open_shared`.
        """
        for _ in range(_NUM_LOCK_TRIES):
            file = os.fdopen(open_shared(path, os.O_RDWR | os.O_CREAT, 0o622), "r+b", buffering=0)
            try:
                lock_file(file, SET_LOCK, fcntl.F_WRLCK)
            except OSError as error:
                file.close()
                if error.errno in CANNOT_LOCK:
                    return None
                if error.errno in IS_HELD:
                    raise BlockingIOError(error.errno, "held by another process", str(path)) from error
                raise
            try:
                if cls._is_own(file, path):
                    break
            except BaseException:
                file.close()
                raise
            file.close()
        else:
            raise BlockingIOError(errno.EAGAIN, "replaced again and again by another process", str(path))
        _let_only_writers_read(file)
        if owner is None:
            return cls(file)
        with contextlib.suppress(OSError):  # on a full disk, the lock is held although `owner` cannot be written
            # The file is overwritten, then set to the new length. If it were emptied first, a full disk might have no
            # block left for the new content.
            os.ftruncate(file.fileno(), os.pwrite(file.fileno(), json.dumps(owner).encode(), 0))
        return cls(file)

    @staticmethod
    def _is_own(file: IO[bytes], path: Path) -> bool:
        """Whether `path` still names the locked file, and the file has no second name.

        If the file has a second name, a new file replaces it at `path`, and the result is False. The caller changes
        the file only if the result is True, because another user may have given the name `path` to any file of this
        user.
        """
        num_names = count_names(path, file.fileno())
        if num_names > 1:  # this process may replace the file, because it holds the lock
            write_atomic(path, b"", durable=False)
        return num_names == 1

    def release(self) -> None:
        """Release the lock."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                lock_file(self._file, SET_LOCK, fcntl.F_UNLCK)
            self._file.close()


def _let_only_writers_read(file: IO[bytes]) -> None:
    """Remove the read permission of users who may not write: a reader could keep writers out with a shared lock."""
    with contextlib.suppress(OSError):  # the file belongs to another user
        if let_only_writers_read(file.fileno()):
            return
        old = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        mode = old & 0o622
        mode |= (mode & 0o022) << 1
        if mode != old:
            os.fchmod(file.fileno(), mode)


def is_locked(path: Path) -> bool:
    """Whether a process holds the `FolderLock` at `path`; False where the file system has no locks.

    True if an error other than a missing file prevents this process from reading the lock: a process may hold it.

    The check takes no lock, so that concurrent checks do not affect each other.
    """
    try:
        file = open_regular(path)
    except OSError as error:
        return error.errno not in NOT_A_FILE
    with file:
        try:
            return lock_file(file, GET_LOCK, fcntl.F_WRLCK) != fcntl.F_UNLCK
        except OSError as error:
            return error.errno not in CANNOT_LOCK


def read_lock_owner(path: Path) -> dict[str, Any]:
    """The `owner` in the lock at `path`; empty when it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return read_object(path)
    return {}
