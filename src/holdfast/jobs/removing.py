"""Jobs and, when somebody says so, their checkpoints: removed."""

import shutil

from holdfast.checkpoint.inventory import Kind
from holdfast.errors import ConflictError
from holdfast.jobs.history import History
from holdfast.jobs.outputs import open_output
from holdfast.jobs.places import job_folder
from holdfast.jobs.spec import JobSpec


def remove_job(name: str, history: History) -> None:
    """Forget a job that has no processes: its folder first, so that nothing is left that nobody knows of."""
    shutil.rmtree(job_folder(name), ignore_errors=True)
    history.forget(name)


def remove_checkpoints(spec: JobSpec, output: str) -> int:
    """Delete everything at a location that Holdfast has written there: checkpoints and the final model.

    Args:
        spec: the job.
        output: its location; what else lies there stays.

    Returns:
        How many were deleted.

    Raises:
        ConflictError: somebody reads or writes one of them; the others are gone.
        StorageError: the place does not answer.
    """
    inventory = open_output(spec, output)
    items = [item for item in inventory.items() if item.kind is not Kind.FOREIGN]
    kept = [item.name for item in items if not inventory.delete(item)]
    if kept:
        raise ConflictError(f"{', '.join(kept)} in {output} is in use and was not deleted", hint="try again later")
    return len(items)


__all__ = ["remove_checkpoints", "remove_job"]
