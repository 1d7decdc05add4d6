"""What is at the place of a job's checkpoints, seen from any process and any folder."""

import os

from holdfast.checkpoint.inventory import Inventory
from holdfast.errors import UsageError
from holdfast.jobs.connections import keys_of
from holdfast.jobs.spec import JobSpec
from holdfast.storage.location import Location, Scheme, claim_folder, parse_location
from holdfast.storage.opening import open_store
from holdfast.storage.options import StorageOptions


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


__all__ = ["open_output"]
