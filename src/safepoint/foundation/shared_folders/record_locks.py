"""Locks of the kernel on bytes of a file (`fcntl`). A lock belongs to the open file. If the kernel does not support
this, the lock belongs to the process.

A process can get an exclusive lock only if it has opened the file for writing. For a shared lock, reading is enough.
"""

import errno
import fcntl
import os
import struct
from typing import IO

SET_LOCK = fcntl.F_OFD_SETLK, fcntl.F_SETLK
GET_LOCK = fcntl.F_OFD_GETLK, fcntl.F_GETLK
"""`SET_LOCK` and `GET_LOCK` have two commands each. The first is for a lock that belongs to the open file. The second
is for kernels without such locks; there, the lock belongs to the process."""
CANNOT_LOCK = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
"""The errors of file systems and kernels that do not support the lock."""
IS_HELD = {errno.EACCES, errno.EAGAIN}
"""The errors that mean that another process holds a conflicting lock."""
_FLOCK = "hhqqi4x"
"""`struct flock` of 64-bit Linux: type, whence, start, length, process."""


def call_lock(file: IO[bytes] | int, command: int, kind: int, *, start: int = 0, length: int = 0) -> int:
    """Set or query a lock; returns the kind of lock that the kernel reports.

    Args:
        file: the open file, or its descriptor.
        command: a value of `SET_LOCK` or `GET_LOCK`.
        kind: `F_RDLCK` (shared), `F_WRLCK` (exclusive) or `F_UNLCK`.
        start: the first byte.
        length: the number of bytes; 0 for all that follow.

    Raises:
        OSError: the call failed. `IS_HELD` and `CANNOT_LOCK` have the error numbers of the usual causes.
    """
    query = struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)
    return struct.unpack(_FLOCK, fcntl.fcntl(file, command, query))[0]


def lock_file(file: IO[bytes] | int, commands: tuple[int, int], kind: int) -> int:
    """Call `call_lock` for the whole file, with the second command if the kernel does not have the first."""
    try:
        return call_lock(file, commands[0], kind)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return call_lock(file, commands[1], kind)
