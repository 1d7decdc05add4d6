"""The launcher's temporary folder, through which launcher and ranks exchange records and events.

The launcher removes its folder when it ends. If the launcher was killed, its keeper removes the folder. The keeper is
the process that writes snapshots to disk; each node has one keeper. If the keeper was killed too, the next launcher
of the same user on this machine removes the folder.
"""

import contextlib
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path

from safepoint.foundation.bounded_json import read_object
from safepoint.foundation.events.stream import EVENTS_NAME, append_lines
from safepoint.foundation.files import FolderLock, is_locked, write_atomic
from safepoint.foundation.processes import with_number_inside
from safepoint.foundation.temporary_folders.abandoned import LOCK_NAME, remove_if_abandoned
from safepoint.foundation.temporary_folders.places import (
    COMPILED_CODE,
    keep_temporary_folder,
    possible_parents,
    private_parent,
)
from safepoint.foundation.volumes.mounts import without_mounts_of_others

_PREFIX = "safepoint-"
_STREAM = "stream"
_STOP_SIGNAL = "stop-signal"
_RESERVED = "reserved"
_FROZEN = "frozen"
SMALL_FILES_BYTES = 16 << 20
"""The free space that ranks need in this folder for the small files of a save. If there is less, saves are
synchronous."""


@contextlib.contextmanager
def launcher_folder() -> Generator[Path]:
    """Create a folder for this launcher, and remove it after the block. First remove folders of ended launchers.

    Raises:
        StorageError: there is no folder for temporary files.
    """
    # Ranks also write the small files of each save to this folder. On a disk, the creation of a file would wait while
    # the keeper flushes the files of a checkpoint to the same disk. So a folder in memory is preferred.
    parent = private_parent(prefers_memory=True)
    _remove_abandoned(parent)
    folder, lock = _make(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.release()


def _make(parent: Path) -> tuple[Path, FolderLock | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        try:
            return folder, FolderLock.acquire(folder / LOCK_NAME, {"pid": os.getpid()})
        except (BlockingIOError, FileNotFoundError):
            # Another launcher has found the new folder before it was locked, and removes it as abandoned.
            continue


def _remove_abandoned(parent: Path) -> None:
    for folder in without_mounts_of_others(parent, f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # its launcher still runs, or another launcher removes the folder
            if _is_ours(folder):
                remove_if_abandoned(folder)


def running_launchers() -> list[tuple[Path, int]]:
    """The folder and the process id of each launcher that this user runs on this machine."""
    found: list[tuple[Path, int]] = []
    for parent in possible_parents():
        for folder in without_mounts_of_others(parent, f"{_PREFIX}*"):
            with contextlib.suppress(OSError, ValueError):
                if _is_ours(folder) and is_locked(folder / LOCK_NAME):
                    number = int(read_object(folder / LOCK_NAME)["pid"])
                    # A launcher that was restored in a PID namespace of its own has another number here.
                    pid = with_number_inside(number, folder / LOCK_NAME)
                    found += [] if pid is None else [(folder, pid)]
    return found


def _is_ours(folder: Path) -> bool:
    """Whether this user owns `folder`, and no other user may write to it.

    This check is needed, because other users may make folders in the same place.
    """
    status = folder.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_private and status.st_uid == os.geteuid()


def keep_rank_in_its_folder(folder: str | None) -> None:
    """Let this process use only TMPDIR or a folder of its launcher for temporary files; see `keep_temporary_folder`.

    The process is a rank, or the template from which ranks are forked. Call this function before torch is imported:
    packages compute paths of compiled code while they are imported. A rank that was forked from the template calls
    this function again, because TMPDIR may be full by then.

    Args:
        folder: the launcher's folder; None or empty without a launcher.
    """
    if folder:
        keep_temporary_folder(Path(folder, "temporary"), moving=COMPILED_CODE)


def share_event_stream(folder: str | None, stream: Path) -> None:
    """Report the file of the run's events to the launcher, so that the launcher writes its own events there."""
    if folder is not None:
        with contextlib.suppress(OSError):
            write_atomic(Path(folder) / _STREAM, str(stream.absolute()).encode(), durable=False)


def shared_event_stream(folder: Path) -> Path | None:
    """The stream that the run's events go to; None before a rank has shared it."""
    with contextlib.suppress(OSError, ValueError):
        return Path((folder / _STREAM).read_text(encoding="utf-8"))
    return None


def forwarded_mark(signal_name: str) -> str:
    """The name of the file that the launcher creates immediately before it sends this signal to its ranks."""
    return f"forwarded-{signal_name}"


def note_stop_signal(folder: Path, number: int) -> None:
    """Record the signal that the launcher has received; called before the launcher sends its ranks SIGTERM."""
    with contextlib.suppress(OSError):
        (folder / _STOP_SIGNAL).write_text(str(number), encoding="utf-8")


def stop_signal_of(folder: Path | None, number: int) -> int:
    """The signal that requested the stop, for a rank that has received the signal `number`.

    If `number` is the SIGTERM that the launcher sends to its ranks, the result is the signal that the launcher itself
    has received. If not, the result is `number`.
    """
    if folder is None or number != signal.SIGTERM:
        return number
    try:
        return signal.Signals(int((folder / _STOP_SIGNAL).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return number


def reserve(folder: Path, seconds: float) -> None:
    """Record that the last `seconds` of the grace period are needed for a process image.

    The caller is a process that watches the launcher: the supervisor of the job, or `safepoint run`. If the ranks
    still run when these seconds begin, the caller freezes the launcher and its ranks.
    """
    with contextlib.suppress(OSError):
        write_atomic(folder / _RESERVED, str(seconds).encode(), durable=False)


def reserved_s(folder: Path | None) -> float:
    """The seconds that `reserve` has recorded.

    The result is 0 if no process image will be made, if the launcher has received no stop signal, or if the launcher
    is or was frozen (see `was_frozen`).
    """
    try:
        if folder is None or not (folder / _STOP_SIGNAL).exists() or was_frozen(folder):
            return 0.0
        return float((folder / _RESERVED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0.0


def note_frozen(folder: Path, *, is_frozen: bool) -> None:
    """Record that the launcher and its ranks are being frozen. After a failure, record that they are not frozen.

    The record is kept with the process image. Restored processes find the record, and their deadline does not count
    any more.
    """
    with contextlib.suppress(OSError):
        if is_frozen:
            (folder / _FROZEN).touch()
        else:
            (folder / _FROZEN).unlink(missing_ok=True)


def was_frozen(folder: Path | None) -> bool:
    """Whether the launcher of this folder and its ranks are being frozen, or were frozen and restored."""
    return folder is not None and (folder / _FROZEN).exists()


def pending_events(folder: Path) -> Path:
    """The file to which the launcher writes its events until a rank has shared the run's stream."""
    return folder / EVENTS_NAME


def deliver_pending_events(folder: Path, stream: Path) -> None:
    """Move the pending events to `stream`, once."""
    taken = folder / f"{EVENTS_NAME}.taken"
    with contextlib.suppress(OSError):
        pending_events(folder).rename(taken)
        append_lines(stream, taken.read_bytes())
