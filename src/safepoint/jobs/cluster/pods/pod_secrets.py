"""The Secrets that Safepoint makes for the pods of a job. This module sends no requests.

There are two. By the first Secret, the pods of a job recognize each other. The second Secret has the key of the job's
process images.
"""

import secrets
from dataclasses import dataclass

from safepoint.jobs.cluster.objects import Object
from safepoint.jobs.cluster.spec import JOB_LABEL, SECRET_TYPE

NODES, IMAGES = "safepoint-nodes", "safepoint-images"
"""The volumes of the two Secrets."""
NODES_VARIABLE = "SAFEPOINT_JOB_SECRET_FILE"
_PLACE = "/var/run/safepoint"
_FILES = {NODES: (NODES_VARIABLE, "job-secret", 0o444), IMAGES: ("SAFEPOINT_IMAGES_KEY", "images-key", 0o400)}
"""For each volume: the variable with the path of the file, the name of the file, and its mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretMount:
    """What the pods of a job need to read a Secret.

    Args:
        volume: the volume of the pods.
        mount: the mount of the container that trains.
        variable: the entry of `env` with the path of the file.
    """

    volume: Object
    mount: Object
    variable: Object


def mount_secret(volume: str, secret: str) -> SecretMount:
    """The mount of a Secret.

    Args:
        volume: `NODES` or `IMAGES`.
        secret: the name of the Secret.
    """
    variable, file, mode = _FILES[volume]
    return SecretMount(
        volume={"name": volume, "secret": {"secretName": secret, "defaultMode": mode}},
        mount={"name": volume, "mountPath": _PLACE, "readOnly": True},
        variable={"name": variable, "value": f"{_PLACE}/{file}"},
    )


def nodes_secret(job: str) -> Object:
    """The Secret by which the pods recognize each other."""
    return {**_secret(job, "nodes"), "stringData": {_FILES[NODES][1]: secrets.token_hex(32)}}


def images_secret(job: str) -> Object:
    """The Secret with the key of the job's process images: 32 characters with 192 random bits."""
    return {**_secret(job, "images"), "stringData": {_FILES[IMAGES][1]: secrets.token_urlsafe(24)}}


def _secret(job: str, purpose: str) -> Object:
    """A Secret without content. Its name is random, so that it cannot be predicted."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{job}-{purpose}-{secrets.token_hex(4)}", "labels": {JOB_LABEL: job}},
        "type": SECRET_TYPE,
        "immutable": True,
    }
