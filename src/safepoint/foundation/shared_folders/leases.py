"""Leases: locks on the manifest of a checkpoint that is being read, so that no run deletes the checkpoint meanwhile.

A lock is shared or exclusive. Everyone who may read a file can take a shared lock on it, even from another machine or
container. It cannot be found out who holds such a lock: the pid of the process that took the lock may belong to
another process by now. An exclusive lock says more, because only a process that may write to the file can take it. So
a reader takes an exclusive lock if it can. A reader that may not write, such as a pod in which the volume is
read-only, takes a shared lock. Each reader locks one byte of its own, far after the end of the file; so readers do
not exclude each other.

If the locks cannot be read, for example because this process has too many open files, `lease_on` returns
`Lease.UNREADABLE`. The caller of `lease_on` keeps the checkpoint, and finds out later whether it may be deleted.

For a shared lock of an unknown process, `lease_on` returns `Lease.UNKNOWN`. The caller of `lease_on` keeps only a few
checkpoints for which it gets this result. Otherwise, everyone who may read the folder could prevent the deletion of
all checkpoints.
"""

import contextlib
import enum
import errno
import fcntl
import os
from collections.abc import Generator
from pathlib import Path
from typing import IO

from safepoint.foundation import clock
from safepoint.foundation.processes import close_in_children, find_lock, is_seeing_all
from safepoint.foundation.shared_folders.opening import NOT_A_FILE, open_regular, open_shared
from safepoint.foundation.shared_folders.record_locks import CANNOT_LOCK, IS_HELD, call_lock

_FIRST_BYTE = 1 << 61
_NUM_BITS = 56
_NUM_TRIES = 50
_AGAIN_S = 0.01
_MAY_NOT_WRITE = {errno.EACCES, errno.EPERM, errno.EROFS}


class Lease(enum.Enum):
    """What is known about the readers of a file."""

    NONE = "no process of this user reads it"
    READER = "it is being read by a process that may write to it, or by a process of this user on this machine"
    UNKNOWN = "a process of any user on another machine or in a container holds a shared lock on it"
    UNREADABLE = "an error prevented this process from reading the locks; a process may read it"


@contextlib.contextmanager
def reading(path: Path) -> Generator[None]:
    """Hold a lease on the file `path` while the `with` block runs.

    A process that is about to delete the file calls `lease_on` first. If the locks of other processes prevent a lease
    for half a second, or if the file system has no locks, the block runs without a lease.

    Raises:
        OSError: the file cannot be opened.
    """
    with _open_to_lock(path) as file:
        close_in_children(file)
        with contextlib.suppress(OSError):
            for _ in range(_NUM_TRIES):
                if _has_lock(file):
                    break
                clock.sleep(_AGAIN_S)
        yield


def lease_on(path: Path) -> Lease:
    """What is known about the processes that hold a `reading` lease on `path`.

    NONE if `path` is not a regular file, or if the file system has no locks: then no process holds a lease. After
    any other error, the result is UNREADABLE.

    The file is opened for writing, because only then does an NFS server ask its clients for their locks.
    """
    try:
        file = _open_to_lock(path)
    except OSError as error:
        return Lease.NONE if error.errno in NOT_A_FILE else Lease.UNREADABLE
    with file:
        try:
            return _lease_of(file)
        except OSError:
            return Lease.UNREADABLE


def _lease_of(file: IO[bytes]) -> Lease:
    try:
        # A query for a shared lock is in conflict only with exclusive locks.
        if call_lock(file, fcntl.F_OFD_GETLK, fcntl.F_RDLCK) != fcntl.F_UNLCK:
            return Lease.READER
        if call_lock(file, fcntl.F_OFD_GETLK, fcntl.F_WRLCK) == fcntl.F_UNLCK:
            return Lease.NONE
    except OSError as error:
        if error.errno not in CANNOT_LOCK:
            raise
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Lease.UNKNOWN
        except OSError as no_flock:
            if no_flock.errno not in CANNOT_LOCK:
                raise
        return Lease.NONE
    is_here, is_own = find_lock(os.fstat(file.fileno()))
    if is_own:
        return Lease.READER
    # Outside of containers all of this user's processes were seen, so the lock belongs to another user.
    return Lease.NONE if is_here and is_seeing_all() else Lease.UNKNOWN


def _has_lock(file: IO[bytes]) -> bool:
    """Try to lock one byte; False if another process holds a conflicting lock.

    Raises:
        OSError: the file system does not support locks.
    """
    start = _FIRST_BYTE + (int.from_bytes(os.urandom(8)) >> (64 - _NUM_BITS))
    # If another user holds a shared lock on all bytes, no exclusive lock is possible. A shared lock is tried then.
    for kind in (fcntl.F_RDLCK,) if _is_read_only(file) else (fcntl.F_WRLCK, fcntl.F_RDLCK):
        try:
            call_lock(file, fcntl.F_OFD_SETLK, kind, start=start, length=1)
        except OSError as error:
            if error.errno in IS_HELD:
                continue
            if error.errno not in CANNOT_LOCK:
                raise
            return _has_flock(file)
        return True
    return False


def _has_flock(file: IO[bytes]) -> bool:
    """Try `flock`, for kernels on which a process loses its locks on bytes when it closes any descriptor of the file.

    Raises:
        OSError: the file system does not support locks.
    """
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    return False


def _open_to_lock(path: Path) -> IO[bytes]:
    try:
        return os.fdopen(open_shared(path, os.O_RDWR), "r+b", buffering=0)
    except OSError as error:
        if error.errno not in _MAY_NOT_WRITE:
            raise
        return open_regular(path)


def _is_read_only(file: IO[bytes]) -> bool:
    return fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
