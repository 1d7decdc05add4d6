"""Finds where a job on a cluster saves, and with which keys. Deletes and lists the checkpoints of the job.

The job saves to a claim (a volume of the cluster) or to an object store.
"""

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, cast

from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.checkpoint.tools.removal import COMMAND, remove_all
from safepoint.errors import AccessDeniedError, ConflictError, NotFoundError, UsageError
from safepoint.foundation.bounded_json import parse_value
from safepoint.foundation.events.answer_frames import Part
from safepoint.jobs.cluster import pod_archive
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.made_objects import shipped_files
from safepoint.jobs.cluster.helper.helper import HelperError, run_helper
from safepoint.jobs.cluster.helper.helper_objects import HelperRequest
from safepoint.jobs.cluster.manifests import config_map_name
from safepoint.jobs.cluster.objects import Object, at, items, name_of, texts
from safepoint.jobs.cluster.records.storage_record import CERTIFICATES, named_output, read_storage_record
from safepoint.jobs.cluster.records.storage_record import FILE as STORAGE_FILE
from safepoint.jobs.cluster.spec import RECORD, REMOVAL, read_record
from safepoint.jobs.model.connections import keys_in_secret, plain_variables, with_keys
from safepoint.storage.location import Location, parse_location
from safepoint.storage.opening import open_store

_MOST_BYTES = 64 << 20
_MOST_CHECKPOINTS = 10**9
_KEYS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "where", "kind"), (str,)),
    **dict.fromkeys(("files", "bytes"), (int,)),
    "created_s": (float, int),
    "faults": (list,),
    "step": (int, NoneType),
    "trigger": (str, NoneType),
}
_OUTPUT = "SAFEPOINT_OUTPUT_DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStorage:
    """Where a job saves.

    Args:
        output: its output location; None if it is not known.
        connection: the Secret with the keys of the object store, or None.
        env: the variables for helper pods: the region, the account and the certificates of the store.
        env_here: the variables in `env` that may be used on this machine.
    """

    output: str | None
    connection: str | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    env_here: Mapping[str, str] = field(default_factory=dict[str, str])


def storage_of(api: ClusterApi, trainjob: Object) -> JobStorage:
    """Where a job saves, according to its config map; see `storage_record`.

    If the job names no output location, `output` is None.

    Raises:
        ConflictError: the location is not certain: another program has submitted the job, or another person has
            changed it.
        AccessDeniedError: you may not read the config map.
    """
    named = named_output(trainjob)
    digest = pod_archive.digest_in(items(trainjob, "spec", "trainer", "command"))
    if digest is None and named is None:
        return JobStorage(output=None)
    if digest is None:
        raise _not_certain(trainjob, "Safepoint did not submit it")
    map_name = config_map_name(name_of(trainjob), digest)
    files = shipped_files(api.find("configmaps", map_name) or {}) or {}
    if pod_archive.digest_of_files(files) != digest:
        raise _not_certain(trainjob, f"config map {map_name} is missing, or was changed after the job was submitted")
    record = read_storage_record(files.get(STORAGE_FILE))
    if record is None or record.job != name_of(trainjob):
        raise _not_certain(trainjob, f"config map {map_name} does not name the location of this job")
    annotated = at(read_record(texts(trainjob, "metadata", "annotations").get(RECORD)), "settings", _OUTPUT)
    for said in (named, record.output if annotated is None else annotated):
        if said != record.output:
            raise _not_certain(trainjob, f"it was submitted to save to {record.output}, but now names {said}")
    plain = plain_variables(record.env)  # not all variables, because another person may have submitted the job
    return JobStorage(output=record.output, connection=record.connection, env=record.env, env_here=plain)


def _not_certain(trainjob: Object, reason: str) -> ConflictError:
    name = name_of(trainjob)
    return ConflictError(
        f"it is not certain where job {name} saves: {reason}; nothing was done",
        hint=f"give the location instead of job {name}, with --connection if the location needs keys; "
        f"`safepoint delete {name}` keeps the checkpoints",
    )


def secret_values(api: ClusterApi, name: str) -> dict[str, str]:
    """The keys in a connection's Secret; see `keys_in_secret`.

    Raises:
        NotFoundError: there is no such Secret.
        AccessDeniedError: you may not read the Secret.
        UsageError: a value is not text.
    """
    found = api.find("secrets", name)
    if found is None:
        raise NotFoundError(
            f"there is no Secret {name} in namespace {api.namespace}; nothing was done",
            hint=f"`kubectl get secrets -n {api.namespace}` lists the Secrets",
        )
    values: dict[str, str] = {}
    for key, text in texts(found, "data").items():
        try:
            values[str(key)] = base64.b64decode(str(text), validate=True).decode()
        except ValueError as error:  # a value is never shown: it may be a key
            raise UsageError(f"the value of {key} in Secret {name} is not text; nothing was done") from error
    return keys_in_secret(values)


def location_of(output: str, job: str) -> Location:
    """The output location of a job.

    Raises:
        ConflictError: the location is not valid, or is a folder in the job's pods.
    """
    try:
        location = parse_location(output)
    except ValueError as error:
        raise ConflictError(f"the output location of job {job} is not valid: {error}; nothing was done") from error
    if location.is_folder:
        raise ConflictError(
            f"job {job} saves to {output}, a folder inside its pods, which is deleted with them; nothing was done"
        )
    return location


def remove_checkpoints(api: ClusterApi, trainjob: Object) -> int:
    """Delete all checkpoints of a stopped job.

    Before that, the job gets the annotation `REMOVAL`, which stays until the job is deleted.

    Returns:
        The number of deleted checkpoints.
    """
    name, storage = name_of(trainjob), storage_of(api, trainjob)
    location = location_of(storage.output or "", name)
    api.patch("trainjobs", name, {"metadata": {"annotations": {REMOVAL: "true"}}})
    inventory = open_directly(api, storage, location)
    if inventory is not None:
        return remove_all([inventory], str(location))
    answer = ask(api, (COMMAND, str(location)), location, storage, is_read_only=False)
    num_deleted = at(answer, "deleted")
    if type(num_deleted) is not int or not 0 <= num_deleted <= _MOST_CHECKPOINTS:
        raise _not_understood("it does not say how many checkpoints were deleted")
    return num_deleted


def open_directly(api: ClusterApi, storage: JobStorage, location: Location) -> Inventory | None:
    """The checkpoints in an object store, opened with the keys of the job; None if only a pod can reach them.

    Only a pod can reach a claim, use a Secret that you may not read, or use a certificate that only the pods have.
    """
    is_only_in_pods = any(name in storage.env and name not in storage.env_here for name in CERTIFICATES)
    if location.claim is not None or is_only_in_pods:
        return None
    try:
        keys = {} if storage.connection is None else secret_values(api, storage.connection)
        return Inventory(open_store(location, environ={**with_keys(os.environ, keys), **storage.env_here}))
    except (AccessDeniedError, ValueError):
        return None


def open_store_of(api: ClusterApi, trainjob: Object) -> Inventory | None:
    """The checkpoints of a job in its object store; None if the job has no output location, or if only a pod can
    reach the checkpoints.

    Raises:
        ConflictError: it is not certain where the job saves, see `storage_of`, or it saves inside its pods.
    """
    storage = storage_of(api, trainjob)
    if storage.output is None:
        return None
    return open_directly(api, storage, location_of(storage.output, name_of(trainjob)))


def list_in_pod(api: ClusterApi, storage: JobStorage, location: Location) -> list[dict[str, Any]]:
    """What `safepoint checkpoints list --json` prints in a pod; empty if the output location does not exist yet."""
    try:
        listed: Any = ask(
            api, ("checkpoints", "list", "--json", "--", str(location)), location, storage, is_read_only=True
        )
    except HelperError as error:
        if "there is no folder" in error.message:
            return []
        raise
    if not isinstance(listed, list) or not all(map(_is_checkpoint, cast("list[Any]", listed))):
        raise _not_understood("it is not a list of checkpoints")
    return cast("list[dict[str, Any]]", listed)


def _is_checkpoint(document: Any) -> bool:
    """Whether a document of `safepoint checkpoints list --json` has the keys that are used here, with their types."""
    return isinstance(document, dict) and all(type(at(document, key)) in kinds for key, kinds in _KEYS.items())


def ask(
    api: ClusterApi, arguments: Sequence[str], location: Location, storage: JobStorage, *, is_read_only: bool
) -> Any:
    """Run a command in a pod that has the claim or the keys of a job; returns the JSON that it prints.

    Raises:
        HelperError: the command prints something other than JSON.
        SafepointError: see `run_helper`.
    """
    answer: list[str] = []
    request = HelperRequest(
        arguments=tuple(arguments),
        claims=() if location.claim is None else (location.claim,),
        is_read_only=is_read_only,
        connection=storage.connection,
        env=storage.env,
    )
    run_helper(api, request, lambda part, text: answer.append(text) if part is Part.STDOUT else None)
    try:
        return parse_value("".join(answer), max_bytes=_MOST_BYTES)
    except ValueError as error:
        raise _not_understood(str(error)) from error


def _not_understood(why: str) -> HelperError:
    return HelperError(
        f"the command in the pod has ended, and its answer cannot be understood: {why}",
        hint="`safepoint checkpoints list job:NAME` shows which checkpoints there are",
    )
