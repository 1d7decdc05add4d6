"""The file in a job's config map that records where the job saves, and with which keys.

This module sends no requests. Commands that delete checkpoints, or that send keys, read the location from this file
and not from the TrainJob. A person who may change TrainJobs could replace the location in a TrainJob by the location
of another job. The config map cannot be changed, and the command of the job's pods contains the digest of the config
map.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from safepoint.jobs.cluster.objects import Object, at, items, texts
from safepoint.jobs.model.connections import plain_variables

FILE = "safepoint-storage.json"
"""The name of the file."""
CERTIFICATES = ("AWS_CA_BUNDLE", "SAFEPOINT_VERIFY_TLS")
_OUTPUT = "SAFEPOINT_OUTPUT_DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRecord:
    """Where a job saves.

    Args:
        job: the name of the job.
        output: its output location; None if it has none.
        connection: the name of the Secret with the keys of the object store, or None.
        env: the variables that select the region, the account and the certificates of the store.
    """

    job: str
    output: str | None
    connection: str | None
    env: Mapping[str, str] = field(repr=False)

    def to_json(self) -> bytes:
        """The content of the file."""
        document = {"job": self.job, "output": self.output, "connection": self.connection, "env": dict(self.env)}
        return json.dumps(document, sort_keys=True).encode()


def storage_record_of(job: str, entries: Iterable[Object], connection: str | None) -> StorageRecord:
    """Where a job saves.

    Args:
        job: the name of the job.
        entries: the variables of its pods, as the TrainJob has them.
        connection: the name of the Secret with the keys of the object store, or None.
    """
    env = {str(at(entry, "name")): str(at(entry, "value")) for entry in entries if at(entry, "value") is not None}
    return StorageRecord(job=job, output=env.get(_OUTPUT) or None, connection=connection, env=_of_store(env))


def read_storage_record(data: bytes | None) -> StorageRecord | None:
    """The content of the file; None if there is no file, or if it is not valid."""
    try:
        document: Any = json.loads(data or b"")
    except (ValueError, RecursionError):
        return None
    job, output, connection = (at(document, name) for name in ("job", "output", "connection"))
    are_texts = all(text is None or isinstance(text, str) for text in (output, connection))
    if not isinstance(job, str) or not are_texts:
        return None
    env = {str(name): str(text) for name, text in texts(document, "env").items()}
    return StorageRecord(job=job, output=output, connection=connection, env=_of_store(env))


def _of_store(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that select the region, the account and the certificates of the store.

    All other variables are dropped, because another person may have submitted the job. A variable such as
    SAFEPOINT_PACKAGES would run that person's code in a pod of the user who runs this command.
    """
    return plain_variables(env) | {name: env[name] for name in CERTIFICATES if name in env}


def named_output(trainjob: Object) -> str | None:
    """The output location that a TrainJob names; None if it names none. Another person may have changed it."""
    entries = items(trainjob, "spec", "trainer", "env")
    found = [at(entry, "value") for entry in entries if at(entry, "name") == _OUTPUT]
    return str(found[-1]) if found and found[-1] else None
