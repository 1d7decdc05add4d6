"""What is at the place of a job's checkpoints, seen from any process and any folder.

Everything is asked with the job's own keys and claims, and nothing of this process's environment is changed for it: a
client of the SDK may look at several jobs at once.
"""

from collections.abc import Mapping
from pathlib import Path

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.tools.inventory import Inventory, Kind, open_inventory
from safepoint.errors import ConflictError, UsageError
from safepoint.jobs.local.attempt.launchers import launcher_environment
from safepoint.jobs.model.connections import keys_of
from safepoint.jobs.model.spec import JobSpec
from safepoint.settings.output_place import OutputPlace, place_output
from safepoint.storage.location import CLAIMS, Location, parse_location, resolve_claim
from safepoint.storage.opening import open_store
from safepoint.storage.options import StorageOptions
from safepoint.training.context.store_access import open_tried


def open_output(spec: JobSpec, output: str) -> Inventory:
    """What there is, with the job's own keys and folders of claims; nothing is asked of it yet.

    Args:
        spec: the job.
        output: its location.

    Raises:
        UsageError: it cannot be meant here.
        NotFoundError: the keys are not there any more.
    """
    environ = _environment(spec)
    try:
        location = resolve_claim(parse_location(output), environ.get(CLAIMS, ""))
        return Inventory(open_store(location, _options(location, environ)))
    except ValueError as error:
        raise UsageError(f"the output of job {spec.name}: {error}") from error


def check_output(spec: JobSpec, output: str) -> None:
    """See that a job can write there: that is better known now than when its ranks have started.

    Raises:
        UsageError: it cannot be meant here.
        StorageError: the object store, or the folder, cannot be used.
    """
    environ = _environment(spec)
    place = place_output(output, local_dir=spec.settings.local_dir, environ=environ)
    if place.remote is not None:
        open_tried(place.remote, verify_access=spec.settings.verify_access, environ=environ)
    OutputFolder(_folder(spec, place)).prepare()


def remove_checkpoints(output: str, spec: JobSpec) -> int:
    """Delete everything that Safepoint has written for a job: checkpoints and the final model.

    Args:
        output: where they are; what else lies there stays. Where that is an object store, the folder in front of it
            is emptied too: the next run there would go on from what it holds.
        spec: the job, with its data connection.

    Returns:
        How many were deleted; one that was in both counts once.

    Raises:
        ConflictError: somebody reads one of them; the others are gone.
        StorageError: the place does not answer.
        UsageError: it cannot be meant here.
    """
    environ = _environment(spec)
    place = place_output(output, local_dir=spec.settings.local_dir, environ=environ)
    folder = _folder(spec, place)
    places = [(str(place.remote), _options(place.remote, environ))] if place.remote is not None else []
    if folder.is_dir():
        places.append((str(folder), None))
    deleted: set[str] = set()
    kept: list[str] = []
    for where, options in places:
        inventory, one = open_inventory(where, options)
        if one is not None:  # the folder has a checkpoint's name; what lies beside it is another run's
            inventory = Inventory(open_store(parse_location(where), options))
        for item in inventory.items():
            if item.kind is Kind.FOREIGN:
                continue
            if inventory.delete(item):
                deleted.add(item.name)
            else:
                kept.append(item.name)
    if kept:
        raise ConflictError(f"{', '.join(kept)} in {output} is in use and was not deleted", hint="try again later")
    return len(deleted)


def _environment(spec: JobSpec) -> dict[str, str]:
    keys = keys_of(spec.data_connection) if spec.data_connection is not None else {}
    return launcher_environment(spec, keys, None)


def _options(location: Location, environ: Mapping[str, str]) -> StorageOptions | None:
    if not location.is_remote:
        return None
    try:
        return StorageOptions.from_environment(environ)
    except ValueError as error:
        raise UsageError(f"{location}: {error}") from error


def _folder(spec: JobSpec, place: OutputPlace) -> Path:
    return Path(spec.working_dir) / place.folder
