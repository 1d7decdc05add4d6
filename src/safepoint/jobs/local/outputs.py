"""Opens, checks and empties the output location of a job.

These functions access the location as the job itself does: with the keys of the job's data connection, and with the
folders that the job uses for claims (volumes of a cluster, `pvc://`).

The environment of this process does not change, because a client of the SDK may use several jobs at once.
"""

from collections.abc import Mapping
from pathlib import Path

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.checkpoint.tools.removal import remove_all
from safepoint.errors import UsageError
from safepoint.jobs.local.attempt.launchers import launcher_environment
from safepoint.jobs.model.connections import keys_of
from safepoint.jobs.model.spec import JobSpec
from safepoint.settings.run_settings import OutputPlace, place_output
from safepoint.storage.location import CLAIMS, Location, parse_location, resolve_claim
from safepoint.storage.opening import open_store
from safepoint.storage.options import StorageOptions
from safepoint.training.context.outputs import open_checked


def open_output(spec: JobSpec, output: str) -> Inventory:
    """The inventory of the output location. This sends no request.

    Args:
        spec: the specification of the job.
        output: the output location.

    Raises:
        UsageError: the location is invalid on this machine.
        NotFoundError: the data connection does not exist.
    """
    environ = _environment(spec)
    try:
        location = resolve_claim(parse_location(output), environ.get(CLAIMS, ""))
        return Inventory(open_store(location, _options(location, environ)))
    except ValueError as error:
        raise UsageError(f"the output of job {spec.name}: {error}") from error


def check_output(spec: JobSpec, output: str) -> None:
    """Check that a job can write to its output location.

    Raises:
        UsageError: the location is invalid on this machine.
        StorageError: the object store or the folder cannot be used.
    """
    environ = _environment(spec)
    place = place_output(output, local_dir=spec.settings.local_dir, environ=environ)
    if place.remote is not None:
        open_checked(place.remote, verify_access=spec.settings.verify_access, environ=environ)
    OutputFolder(_folder(spec, place)).prepare()


def remove_checkpoints(output: str, spec: JobSpec) -> int:
    """Delete the checkpoints and the final model of a job.

    Args:
        output: the output location; other files in it stay. For an object store, the checkpoints in the local folder
            are deleted too, because the next run would resume from them.
        spec: the job, with its data connection.

    Returns:
        The number of deleted checkpoints. A checkpoint in both places is counted once.

    Raises:
        ConflictError: a checkpoint is being read; the other checkpoints are deleted.
        StorageError: the location cannot be reached.
        UsageError: the location is invalid on this machine.
    """
    environ = _environment(spec)
    place = place_output(output, local_dir=spec.settings.local_dir, environ=environ)
    folder = _folder(spec, place)
    stores = [open_store(place.remote, _options(place.remote, environ))] if place.remote is not None else []
    if folder.is_dir():
        stores.append(open_store(parse_location(str(folder))))
    return remove_all(map(Inventory, stores), output)


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
