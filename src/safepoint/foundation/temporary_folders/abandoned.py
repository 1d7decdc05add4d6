"""Temporary folders of programs that were killed: the next program removes them.

A program locks a file in its folder, so a folder whose file is not locked is abandoned. A program that is restored
from a process image is an exception: CRIU locks its file again in the middle of the restore, and fails if another
process has the lock at this moment. So a removal and a restore lock a second file first, the guard.
"""

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Generator
from pathlib import Path

from safepoint.foundation import clock
from safepoint.foundation.files import FolderLock, is_locked

LOCK_NAME = "lock"
"""The file in a program's temporary folder that the program locks."""
_GUARD = "guard"
_REMOVED = ".abandoned"
_WITHIN_S = 1.0
_LOOK_S = 0.01


def remove_if_abandoned(folder: Path) -> None:
    """Remove a folder, unless its program runs or is being restored, or another process removes the folder.

    The folder gets another name first, so that no process finds the folder when only a part of it is left. A folder
    without a lock file stays.

    Raises:
        OSError: the folder is in use, or cannot be removed.
    """
    path = folder / LOCK_NAME
    if folder.name.endswith(_REMOVED):  # the process that was removing it was killed
        shutil.rmtree(folder, ignore_errors=True)
    elif path.exists():
        if is_locked(path):
            raise BlockingIOError(errno.EAGAIN, "its program runs", str(folder))
        with _guarded(folder):
            # The content of the file is not changed: CRIU restores an open file only if its length is as before.
            lock = FolderLock.acquire(path, owner=None)
            if lock is not None:
                try:
                    # The new name is random, because another user may have taken any name that can be guessed.
                    removed = folder.rename(folder.with_name(f"{folder.name}.{uuid.uuid4().hex}{_REMOVED}"))
                    shutil.rmtree(removed, ignore_errors=True)
                finally:
                    lock.release()


@contextlib.contextmanager
def kept(folder: Path) -> Generator[None]:
    """Keep other processes from removing the folder, and from locking its lock file, while the `with` block runs.

    A removal that has begun is awaited.

    Raises:
        FileNotFoundError: the folder does not exist any more.
        OSError: the folder cannot be protected.
    """
    deadline_s = clock.monotonic_s() + _WITHIN_S
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(_guarded(folder))
                break
            except BlockingIOError:
                if clock.monotonic_s() >= deadline_s:
                    raise
            clock.sleep(_LOOK_S)
        yield


@contextlib.contextmanager
def _guarded(folder: Path) -> Generator[None]:
    """Hold the guard of the folder.

    Root may restore the processes of another user. This user cannot open the guard of root.

    Raises:
        BlockingIOError: another process holds the guard.
        FileNotFoundError: the folder does not exist any more.
        OSError: the guard cannot be opened.
    """
    path = folder / _GUARD
    guard = FolderLock.acquire(path, {"pid": os.getpid()})
    try:
        yield
    finally:
        # The file is deleted before the lock is released. A process that has opened it finds that it has no name.
        path.unlink(missing_ok=True)
        if guard is not None:
            guard.release()
