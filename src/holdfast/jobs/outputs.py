"""What is at the place of a job's checkpoints, seen from any process and any folder."""

import os
from pathlib import Path

from holdfast.checkpoint.inventory import Inventory, Kind, open_inventory
from holdfast.errors import ConflictError, UsageError
from holdfast.jobs.connections import connected, keys_of
from holdfast.jobs.spec import JobSpec
from holdfast.storage.location import Location, Scheme, claim_folder, parse_location
from holdfast.storage.opening import open_store
from holdfast.storage.options import StorageOptions
from holdfast.training.output_place import place_output


def open_output(spec: JobSpec, output: str) -> Inventory:
    """What there is, with the job's own keys and folders of claims; nothing is asked of it yet.

    Args:
        spec: the job.
        output: its location.

    Raises:
        UsageError: it cannot be meant here.
        NotFoundError: the keys are not there any more.
    """
    environ = {**os.environ, **spec.env}
    try:
        location = parse_location(output)
        if location.scheme is Scheme.PVC:
            location = claim_folder(location, environ.get("HOLDFAST_PVC_MOUNTS", ""))
        options = _options(spec, location, environ)
        return Inventory(open_store(location, options))
    except ValueError as error:
        raise UsageError(f"the output of job {spec.name}: {error}") from error


def _options(spec: JobSpec, location: Location, environ: dict[str, str]) -> StorageOptions | None:
    if not location.is_remote:
        return None
    keys = keys_of(spec.data_connection) if spec.data_connection is not None else {}
    return StorageOptions.from_environment({**environ, **keys, **spec.env})


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


__all__ = ["open_output", "remove_checkpoints"]
