"""Removes jobs; their checkpoints stay (`outputs.remove_checkpoints` deletes them)."""

import contextlib
import shutil

from safepoint.errors import StorageError
from safepoint.foundation.processes import kill, processes_of
from safepoint.jobs.local.history import History
from safepoint.jobs.local.paths import job_folder


def remove_job(name: str, history: History) -> None:
    """Remove a job without processes: first its folder, then its entry in the history.

    Raises:
        StorageError: the folder cannot be removed; the entry stays.
    """
    folder = job_folder(name)
    try:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
    except OSError as error:
        raise StorageError(
            f"the folder of job {name} cannot be removed: {error.strerror}: {error.filename}; the job stays",
            hint=f"remove {folder} by hand, and delete the job again",
        ) from error
    history.forget(name)


def remove_remains(name: str, history: History) -> None:
    """End the processes and remove the folder of a job that the history does not have."""
    with history.transaction():  # no new job of this name can be submitted meanwhile
        if not history.knows(name):
            kill(processes_of(job_folder(name)))
            shutil.rmtree(job_folder(name), ignore_errors=True)
