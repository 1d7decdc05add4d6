"""Jobs, removed; their checkpoints stay (`outputs.remove_checkpoints`)."""

import contextlib
import shutil

from safepoint.errors import StorageError
from safepoint.foundation.processes import kill, processes_of
from safepoint.jobs.local.history import History
from safepoint.jobs.local.paths import job_folder


def remove_job(name: str, history: History) -> None:
    """Forget a job that has no processes: its folder first, so that nothing is left that nobody knows of.

    Raises:
        StorageError: the folder cannot be removed; the job is not forgotten.
    """
    folder = job_folder(name)
    try:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
    except OSError as error:
        raise StorageError(
            f"the folder of job {name} cannot be removed: {error.strerror}: {error.filename}; the job is still known",
            hint=f"remove {folder} yourself, or what keeps it from being removed, and delete the job again",
        ) from error
    history.forget(name)


def remove_remains(name: str, history: History) -> None:
    """End and remove what is left of a job that the history does not know."""
    with history.transaction():  # nobody submits a new one of this name meanwhile
        if not history.knows(name):
            kill(processes_of(job_folder(name)))
            shutil.rmtree(job_folder(name), ignore_errors=True)
