"""Opens files in a folder that other users may write to: regular files only, and no links.

A file that is opened for writing has no second name (a hard link): a second name may be in another folder, and a
write would change the file there too.
"""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from safepoint.foundation.shared_folders import no_links

NOT_A_FILE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.EINVAL}
)
"""The errors of `open_shared` that mean that `path` names no regular file. After other errors, `path` may name
one."""
_MAX_COPIED_BYTES = 256 << 20
_NUM_OPENS = 10
_CHUNK_BYTES = 1 << 20


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a file: all of it, or the first `max_bytes` + 1 bytes if it is longer than `max_bytes`.

    Raises:
        OSError: the file cannot be read, is a link, or is not a regular file.
    """
    with open_regular(path) as file:
        return file.read(max_bytes + 1)


def copy_at_most(source: BinaryIO, write: Callable[[bytes], object], num_bytes: int) -> int:
    """Copy a file from its position to its end, but at most `num_bytes` and one byte more.

    The byte more shows that the file has grown. Without a limit, the owner of a file could let it grow as a sparse
    file while it is copied, and so fill the disk of the copy.

    Args:
        source: the file.
        write: receives the bytes, in order.
        num_bytes: the size that the file should have, or the size of the largest file that is allowed.

    Returns:
        The number of bytes that were copied. If it is larger than `num_bytes`, the caller must not use the copy.

    Raises:
        OSError: the file cannot be read, and whatever `write` raises.
    """
    done = 0
    while piece := source.read(min(_CHUNK_BYTES, num_bytes + 1 - done)):
        write(piece)
        done += len(piece)
    return done


def open_regular(path: Path, *, below: Path | None = None) -> BinaryIO:
    """Open a file to read it; see `open_file`.

    Args:
        path: the file.
        below: a folder above the file; the folders between the two may not be links.
    """
    return os.fdopen(open_shared(path, os.O_RDONLY, below=below), "rb")


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file. A link is refused, so that it cannot lead to a file outside the folder.

    A pipe is refused too, without waiting for the process at its other end.

    If `flags` allow writing and the file has a second name (a hard link, as in a backup by `cp -al`), a copy replaces
    the file at `path` first. So a write does not change the file under the other name. A file of more than 256 MiB is
    not copied, but refused.

    Args:
        path: the file.
        flags: the flags for `os.open`, without `O_TRUNC`.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or has a second name and cannot be copied.
    """
    for _ in range(_NUM_OPENS):
        descriptor = open_shared(path, flags)
        num_names = 1 if flags & os.O_ACCMODE == os.O_RDONLY else count_names(path, descriptor)
        if num_names == 1:
            return descriptor
        size_bytes = os.fstat(descriptor).st_size
        os.close(descriptor)
        if num_names > 1:
            _replace_by_copy(path, size_bytes)
    raise OSError(errno.EAGAIN, "it was replaced again and again while it was opened", str(path))


def _replace_by_copy(path: Path, size_bytes: int) -> None:
    def fill(copy: BinaryIO) -> None:
        # The file may have grown since its size was read.
        if copy_at_most(file, copy.write, _MAX_COPIED_BYTES) > _MAX_COPIED_BYTES:
            raise _too_large(path)

    if size_bytes > _MAX_COPIED_BYTES:
        raise _too_large(path)
    with open_regular(path) as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        no_links.replace_file(path, fill, mode)


def _too_large(path: Path) -> OSError:
    return OSError(
        errno.EFBIG, "it has a second hard link, and is too large to be copied before it is written", str(path)
    )


def count_names(path: Path, descriptor: int) -> int:
    """How many names the open file has; 0 if `path` is not one of them any more.

    The number of names, and whether `path` is one of them, come from the same call of `stat`. Between two calls,
    another user could give the file the name `path`, or remove this name.
    """
    try:
        with no_links.located(path) as (name, folder):
            now = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return 0
    return now.st_nlink if os.path.samestat(now, os.fstat(descriptor)) else 0


def open_shared(path: Path, flags: int, mode: int = 0o666, *, below: Path | None = None) -> int:
    """Open a file as `open_file` does, but never replace it. The caller must not write to a file with a second name.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    descriptor = no_links.open_file(path, flags | os.O_NONBLOCK, mode, below=below)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor
