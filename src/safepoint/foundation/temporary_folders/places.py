"""Chooses places for temporary folders and for a home folder, so that this process and its children can trust the
content of these folders.

Another user who can rename a folder of this process can put another folder in its place, and so decide which files
this process reads and writes. If the folder of this process is in a folder with the sticky bit, such as /tmp, other
users cannot rename it.
"""

import contextlib
import functools
import logging
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from safepoint.errors import UsageError, printable
from safepoint.foundation.environment import check_home, fallback_home, temporary_folder
from safepoint.foundation.processes import is_seeing_all
from safepoint.foundation.shared_folders.ownership import is_planted, looked_up
from safepoint.foundation.units import format_bytes

TEMPORARY = "TMPDIR"
"""The variable that names the temporary folder."""
COMPILED_CODE = (
    "TORCHINDUCTOR_CACHE_DIR",
    "QUACK_CACHE_DIR",
    "CUTE_DSL_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
)
"""The variables with folders for compiled code. The launcher sets them for its ranks."""
_IN_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 256 << 20
_log = logging.getLogger("safepoint")


def private_parent(*, prefers_memory: bool = False) -> Path:
    """The folder in which to create a temporary folder.

    It is the usual temporary folder. If other users could replace folders there, it is `/dev/shm`. If they could also
    replace folders in `/dev/shm`, or if `/dev/shm` has too little free space or cannot be written, a warning is
    logged, and the result is the folder that would be chosen if there were no other users.

    Args:
        prefers_memory: prefer `/dev/shm`, if it has enough free space and the user has not set TMPDIR.

    Raises:
        StorageError: there is no folder for temporary files.
    """
    # If no temporary folder can be written, raise an error even if /dev/shm could be used: torch elastic and most
    # scripts need a temporary folder too.
    usual = Path(temporary_folder())
    obstacle = _obstacle()
    candidates = [usual] if obstacle else [usual, _IN_MEMORY]
    if prefers_memory and TEMPORARY not in os.environ:
        candidates.reverse()
    for folder in candidates:
        if not may_be_replaced(folder):
            return folder
    _warn_of_others(usual, obstacle)
    return candidates[0]


def keep_temporary_folder(private: Path, *, moving: Iterable[str] = ()) -> None:
    """Let this process use the temporary folder that TMPDIR names, or `private`, and no other.

    Without this call, Python uses /var/tmp or the current folder if the temporary folder is full. Another user can
    fill the temporary folder on purpose, and may have put files into /var/tmp or the current folder, under fixed
    names that libraries read. If Python has chosen a temporary folder before this call, it chooses again: this folder
    may be full by now, and a process that was copied by fork has the choice of its parent.

    Args:
        private: the folder to use if the folder in TMPDIR cannot be written now. It is created if it is missing.
        moving: environment variables with paths of folders. A path in the folder that cannot be written is replaced
            by a path in `private`.
    """
    named = os.environ.get(TEMPORARY)
    if not named:
        return
    tempfile.tempdir = None
    with contextlib.suppress(FileNotFoundError):  # neither this folder nor any of Python's can be written
        if tempfile.gettempdir() == os.path.abspath(named):
            return
    with contextlib.suppress(OSError):  # without `private`, no temporary file can be created, and that is intended
        private.mkdir(mode=0o700, exist_ok=True)
    tempfile.tempdir = os.environ[TEMPORARY] = str(private)
    for variable in moving:
        folder = Path(os.environ.get(variable, ""))
        if folder.is_relative_to(named):
            os.environ[variable] = str(private / folder.relative_to(named))


def provide_home(private: Path) -> None:
    """If the user has no home folder, set HOME to one for the programs that this process starts.

    Without HOME, libraries would use a folder with the name `~` in the current folder, and run code that others may
    have put there. A folder in the temporary folder may be deleted while this process runs. Another user can then
    make a folder with the same name. So call this function again before programs are started later.

    Args:
        private: a path in a private folder, for the case that the home folder cannot be created, or that others could
            replace it.

    Raises:
        UsageError: see `check_home`. Not raised if an earlier call has set HOME: then `private` becomes the home.
        StorageError: there is no folder for temporary files.
        OSError: `private` is needed, and cannot be created.
    """
    home = fallback_home()
    was_provided = os.environ.get("HOME") == home
    if os.path.isabs(os.path.expanduser("~")) and not was_provided:
        return
    try:
        check_home(home)
        if not may_be_replaced(Path(home).parent, by_everyone=True):
            os.makedirs(home, mode=0o700, exist_ok=True)
            os.environ["HOME"] = check_home(home)  # checked again: another user may have made it just now
            return
    except OSError:
        pass
    except UsageError:
        if not was_provided:
            raise
    private.mkdir(mode=0o700, exist_ok=True)
    os.environ["HOME"] = str(private)


def possible_parents() -> set[Path]:
    """The folders in which launchers with this environment may have created their temporary folders.

    If TMPDIR is not set, a launcher chooses its folder by the memory that is free when it starts.
    """
    usual = Path(temporary_folder())
    return {usual} if TEMPORARY in os.environ and not may_be_replaced(usual) else {usual, _IN_MEMORY}


def may_be_replaced(folder: Path, *, by_everyone: bool = False) -> bool:
    """Whether another user can replace what this user creates in `folder`.

    Args:
        folder: the folder. All folders on the way to it are checked too, also those with links that lead to it.
        by_everyone: ignore folders that belong to another user, or to which only a group can write, because the user
            may have chosen such a folder on purpose.
    """
    others = stat.S_IWOTH if by_everyone else stat.S_IWOTH | stat.S_IWGRP
    owners = None if by_everyone else {os.geteuid(), 0}
    if is_planted(folder):  # or a link on the way to it
        return True
    for one in {os.path.realpath(folder), *map(os.path.dirname, looked_up(folder))}:
        try:
            status = os.stat(one)
        except OSError:
            return True
        is_open = status.st_mode & others and not status.st_mode & stat.S_ISVTX
        if is_open or (owners is not None and status.st_uid not in owners):
            return True
    return False


def _obstacle() -> str:
    """Why this process cannot use `/dev/shm`, even if there were no other users; empty if it can."""
    try:
        status = os.statvfs(_IN_MEMORY)
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    if not os.access(_IN_MEMORY, os.W_OK):
        return "cannot be written"
    has_room = status.f_bavail * status.f_frsize >= _ROOM_BYTES
    return "" if has_room else f"has less than {format_bytes(_ROOM_BYTES)} of free space"


@functools.cache
def _warn_of_others(folder: Path, obstacle: str) -> None:
    if is_seeing_all():  # do not warn in a container, whose processes trust each other
        _log.warning(
            "other users can replace the temporary folders of this run, because they may write to %s or a folder "
            "above it, and %s; set TMPDIR to a folder to which only you may write",
            printable(str(folder)),
            f"/dev/shm {obstacle}" if obstacle else "to /dev/shm",
        )
