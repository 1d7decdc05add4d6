"""The files of jobs on this machine, below the XDG state folder: the history, and a folder for each job."""

import functools
import os
import uuid
from pathlib import Path

from safepoint.errors import StorageError
from safepoint.foundation.configuration import xdg_folder
from safepoint.foundation.files import make_private_folder
from safepoint.foundation.shared_folders.ownership import is_planted, is_planted_folder


def state_folder() -> Path:
    """`$XDG_STATE_HOME/safepoint`, or `~/.local/state/safepoint`.

    Symbolic links are resolved, because processes of a job are found by the path of its folder.
    """
    return _resolved(xdg_folder("XDG_STATE_HOME", ".local/state")) / "safepoint"


@functools.cache  # cached: a list of jobs needs the path of each job, and realpath reads the file system
def _resolved(folder: Path) -> Path:
    if is_planted(folder):
        raise _of_other_user(folder, "state folder", "XDG_STATE_HOME")
    return Path(os.path.realpath(folder))


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/safepoint`, or `~/.cache/safepoint`."""
    return xdg_folder("XDG_CACHE_HOME", ".cache") / "safepoint"


def history_file() -> Path:
    """The history of all jobs."""
    return state_folder() / "jobs.sqlite3"


def job_folder(name: str) -> Path:
    """The folder of one job: its function, its logs, its progress, and the lock of its supervisor (the process that
    starts its launchers)."""
    return state_folder() / "jobs" / name


def images_of(name: str) -> Path:
    """The folder for the process images of a job. The folder is deleted with the job."""
    return job_folder(name) / "images"


def new_job_folder() -> Path:
    """A temporary folder, which is renamed to the job's folder when the job is stored."""
    return state_folder() / "jobs" / f".new-{uuid.uuid4().hex}"


def supervisor_lock(name: str) -> Path:
    """The lock that the job's supervisor holds."""
    return job_folder(name) / "supervisor.lock"


def make_private(folder: Path, *, what: str = "state folder", variable: str = "XDG_STATE_HOME") -> Path:
    """Create a folder, and the missing folders above it, with access for their owner only.

    Args:
        folder: the folder.
        what: what the folder is, in messages.
        variable: the environment variable that sets another folder.

    Raises:
        StorageError: the folder cannot be created or written, or another user may have created it.
    """
    try:
        make_private_folder(folder)
    except OSError as error:
        raise StorageError(
            f"the {what} {folder} cannot be created: {error.strerror}",
            hint=f"set {variable} to a folder that you can write",
        ) from error
    if is_planted_folder(folder):
        raise _of_other_user(folder, what, variable)
    if not os.access(folder, os.W_OK):
        raise StorageError(
            f"the {what} {folder} cannot be written", hint=f"set {variable} to a folder that you can write"
        )
    return folder


def _of_other_user(folder: Path | str, what: str, variable: str) -> StorageError:
    return StorageError(
        f"another user may have created the {what} {folder}, or a folder or link on the way to it, because every "
        f"user can write there; the {what} was not used",
        hint=f"set {variable} to a folder of your own",
    )
