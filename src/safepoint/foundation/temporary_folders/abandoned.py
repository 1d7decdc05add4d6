"""Temporary folders of programs that were killed: the next program removes them.

A program locks a file in its folder. If another process gets the lock, the program has ended. A program that is
restored from a process image is an exception: it gets its lock again in the middle of the restore. Until then, `kept`
protects the folder.
"""

import contextlib
import os
import shutil
import uuid
from collections.abc import Generator
from pathlib import Path

from safepoint.foundation import clock
from safepoint.foundation.files import FolderLock, is_locked

LOCK_NAME = "lock"
"""The file in a program's temporary folder that the program locks."""
_RESTORING = "restoring"
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
    if folder.name.endswith(_REMOVED):  # the process that was removing it was killed
        shutil.rmtree(folder, ignore_errors=True)
    elif (folder / LOCK_NAME).exists():
        # The content of the file is not changed: CRIU restores an open file only if its length is as before.
        lock = FolderLock.acquire(folder / LOCK_NAME, owner=None)
        if lock is not None:
            try:
                if not _is_kept(folder / _RESTORING):
                    # The new name is random, because another user may have taken any name that can be guessed.
                    removed = folder.rename(folder.with_name(f"{folder.name}.{uuid.uuid4().hex}{_REMOVED}"))
                    shutil.rmtree(removed, ignore_errors=True)
            finally:
                lock.release()


@contextlib.contextmanager
def kept(folder: Path) -> Generator[None]:
    """Keep other processes from removing the folder while the `with` block runs.

    Raises:
        FileNotFoundError: the folder does not exist any more.
        OSError: the folder cannot be protected.
    """
    path = folder / _RESTORING
    own = FolderLock.acquire(path, {"pid": os.getpid()})
    try:
        _wait_for_removal(folder)
        yield
    finally:
        path.unlink(missing_ok=True)
        if own is not None:
            own.release()


def _wait_for_removal(folder: Path) -> None:
    """Wait for a process that found the folder abandoned before `kept` protected it, and may be removing it.

    Raises:
        FileNotFoundError: the folder was removed.
    """
    deadline_s = clock.monotonic_s() + _WITHIN_S
    # If the lock is held for longer, the program is still running, and its restore will fail.
    while is_locked(folder / LOCK_NAME) and clock.monotonic_s() < deadline_s:
        clock.sleep(_LOOK_S)
    os.stat(folder)


def _is_kept(path: Path) -> bool:
    # Root may restore the processes of another user, who may not be able to read the file.
    return path.exists() and (not os.access(path, os.R_OK) or is_locked(path))
