"""Jobs and, when somebody says so, their checkpoints: removed."""

import shutil
from pathlib import Path

from holdfast.checkpoint.inventory import Inventory, Kind, open_inventory
from holdfast.errors import ConflictError
from holdfast.jobs.connections import connected
from holdfast.jobs.history import History
from holdfast.jobs.places import job_folder
from holdfast.jobs.processes import kill, processes_of
from holdfast.jobs.spec import JobSpec
from holdfast.storage.location import parse_location
from holdfast.storage.opening import open_store
from holdfast.training.output_place import place_output


def remove_job(name: str, history: History) -> None:
    """Forget a job that has no processes: its folder first, so that nothing is left that nobody knows of."""
    shutil.rmtree(job_folder(name), ignore_errors=True)
    history.forget(name)


def remove_remains(name: str, history: History) -> None:
    """End and remove what is left of a job that the history does not know."""
    with history.transaction():  # nobody submits a new one of this name meanwhile
        if not history.knows(name):
            kill(processes_of(job_folder(name)))
            shutil.rmtree(job_folder(name), ignore_errors=True)


def remove_checkpoints(output: str, spec: JobSpec) -> int:
    """Delete everything that Holdfast has written for a job: checkpoints and the final model.

    Args:
        output: where they are; what else lies there stays. Where that is an object store, the folder in front of it
            is emptied too: the next run there would go on from what it holds.
        spec: the job, with its data connection.

    Returns:
        How many were deleted.

    Raises:
        ConflictError: somebody reads one of them; the others are gone.
        StorageError: the place does not answer.
    """
    num_deleted = 0
    kept: list[str] = []
    with connected(spec.data_connection, spec.env):
        place = place_output(output, local_dir=spec.settings.local_dir)
        folder = Path(spec.working_dir) / place.folder
        for where in ([output] if place.remote is not None else []) + ([str(folder)] if folder.is_dir() else []):
            inventory, one = open_inventory(where)
            if one is not None:  # the folder has a checkpoint's name; what lies beside it is another run's
                inventory = Inventory(open_store(parse_location(where)))
            for item in inventory.items():
                if item.kind is Kind.FOREIGN:
                    continue
                if inventory.delete(item):
                    num_deleted += 1
                else:
                    kept.append(item.name)
    if kept:
        raise ConflictError(f"{', '.join(kept)} in {output} is in use and was not deleted", hint="try again later")
    return num_deleted


__all__ = ["remove_checkpoints", "remove_job", "remove_remains"]
