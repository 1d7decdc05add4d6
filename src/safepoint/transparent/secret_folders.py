"""Temporary folders for data that no other user may read, such as the memory of processes.

Promises: such a folder is deleted at the end of the `with` block. If the process is killed in this block, the folder
is deleted when a process of the same user next makes a secret folder with the same prefix in the same parent folder.
"""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

from safepoint.foundation.files import delete_tree
from safepoint.foundation.volumes.mounts import without_mounts_of_others

_NUM_TRIES = 100


@contextlib.contextmanager
def secret_folder(parent: Path, prefix: str) -> Generator[Path]:
    """Make an empty folder that only this user can open, and delete the folders that killed processes have left.

    Args:
        parent: an existing folder.
        prefix: how the names of these folders begin, such as `safepoint-image-`.

    Raises:
        OSError: the folder cannot be made.
    """
    for path in without_mounts_of_others(parent, f"{prefix}*"):
        with contextlib.suppress(OSError):
            _delete_left(path)
    folder, descriptor = _make(parent, prefix)
    try:
        yield folder
    finally:
        delete_tree(folder)
        os.close(descriptor)


def _make(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder, and its lock: a descriptor, which no child process inherits."""
    for _ in range(_NUM_TRIES):
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        descriptor = -1
        try:
            descriptor = _lock(folder)
            # Another process may have deleted the folder before it was locked.
            if os.path.samestat(os.stat(folder), os.fstat(descriptor)):
                return folder, descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        if descriptor >= 0:
            os.close(descriptor)
    raise FileExistsError(f"other processes delete each folder that is made in {parent}")


def _delete_left(path: Path) -> None:
    """Delete the folder if it belongs to this user, and no process has locked it.

    Raises:
        BlockingIOError: a process has locked the folder.
        OSError: the folder cannot be opened.
    """
    descriptor = _lock(path)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            delete_tree(path)
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
