"""Where jobs are kept on this machine: the history and a folder for each job, below the XDG state folder."""

import functools
import os
import uuid
from pathlib import Path

from safepoint.errors import StorageError


def state_folder() -> Path:
    """`$XDG_STATE_HOME/safepoint`, or `~/.local/state/safepoint`.

    Without links: a job's processes are known by the name of its folder. A relative one would be another folder for
    each process, and is ignored, as its specification says.
    """
    return _below(os.environ.get("XDG_STATE_HOME", ""))


@functools.cache  # a list of jobs asks a thousand times, and each link is looked up in the file system
def _below(said: str) -> Path:
    home = said if os.path.isabs(said) else os.path.expanduser("~/.local/state")
    return Path(os.path.realpath(home), "safepoint")


def history_file() -> Path:
    """The history of all jobs."""
    return state_folder() / "jobs.sqlite3"


def job_folder(name: str) -> Path:
    """What belongs to one job: its function, its output, its progress, the lock of its supervisor."""
    return state_folder() / "jobs" / name


def new_job_folder() -> Path:
    """A folder in the making; it becomes a job's own when the history knows the job."""
    return state_folder() / "jobs" / f".new-{uuid.uuid4().hex}"


def supervisor_lock(name: str) -> Path:
    """Held by the job's supervisor while it lives."""
    return job_folder(name) / "supervisor.lock"


def make_private(folder: Path) -> Path:
    """Make a folder that only its owner can look into.

    Raises:
        StorageError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(
            f"the state folder {folder} cannot be made: {error.strerror}",
            hint="set XDG_STATE_HOME to a folder that you can write",
        ) from error
    if not os.access(folder, os.W_OK):
        raise StorageError(
            f"the state folder {folder} cannot be written", hint="set XDG_STATE_HOME to a folder that you can write"
        )
    return folder
