"""The launcher's temporary folder, in which ranks tell how they ended; gone after it, however it ends.

A launcher removes its own. One that was killed cannot: its keeper does, and when that was killed too, the next
launcher of the same user on this machine.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path

from safepoint.foundation.files import FolderLock

_PREFIX = "safepoint-"
_LOCK = "lock"
_IN_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 256 << 20


@contextlib.contextmanager
def record_folder() -> Generator[Path]:
    """A new folder for this launcher; those of dead ones are removed first."""
    place = _place()
    _remove_left(place)
    folder, lock = _make(place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.release()


def _place() -> Path:
    """In memory, where the user has not said otherwise and there is room.

    Ranks also put the small files of each save there, and creating one on a disk waits while a keeper syncs to it.
    """
    with contextlib.suppress(OSError):
        status = os.statvfs(_IN_MEMORY)
        has_room = status.f_bavail * status.f_frsize >= _ROOM_BYTES
        if "TMPDIR" not in os.environ and has_room and os.access(_IN_MEMORY, os.W_OK):
            return _IN_MEMORY
    return Path(tempfile.gettempdir())


def _make(place: Path) -> tuple[Path, FolderLock | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        try:
            return folder, FolderLock.acquire(folder / _LOCK, {"pid": os.getpid()})
        except BlockingIOError:
            continue  # another launcher took it for a dead one's in this very moment, and removes it


def _remove_left(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody lives in it, or just removes it
            if _is_ours(folder) and (folder / _LOCK).exists():
                lock = FolderLock.acquire(folder / _LOCK, {"pid": os.getpid()})
                if lock is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    lock.release()


def _is_ours(folder: Path) -> bool:
    """Whether no other user can have written there, as in a shared temporary folder."""
    status = folder.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_private and status.st_uid == os.geteuid()
