"""Checks the values of a job that a cluster would not check, or would refuse with an unclear message.

A cluster accepts some values in a TrainJob although no pod can start with them.
"""

import contextlib
import re
from collections.abc import Mapping

from safepoint.errors import UsageError
from safepoint.foundation.quantities import parse_bytes
from safepoint.jobs.cluster import pod_archive
from safepoint.jobs.cluster.objects import Object, at, items, name_of
from safepoint.jobs.cluster.records import storage_record
from safepoint.jobs.cluster.spec import DOMAIN, ClusterSpec

_MOST_NAME = 63
_UNIQUE = "-12345"
"""A sample of the characters that Kubernetes adds to the name of a pod."""
_QUANTITY = re.compile(r"(?P<number>\d+(\.\d+)?)(m|[kMGTPE]|[KMGTPE]i|[eE][+-]?\d{1,2})?", re.ASCII)
_LEAST_MEMORY_BYTES = 16 << 20
"""A Python interpreter does not start with less memory. A smaller value probably lacks its unit."""
_DOMAIN = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:\d+)?"
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(rf"({_DOMAIN}/)?{_PART}(/{_PART})*(:[\w][\w.-]{{0,127}})?(@[a-z0-9]+:[0-9a-f]{{32,}})?", re.ASCII)
_FILE = re.compile(r"[-._A-Za-z0-9]{1,253}")
_NOTHING = "nothing was submitted"
_RESERVED = "PET_"
_MOST_GRACE_S = 365 * 86400


def check_pod_names(name: str, num_nodes: int, replicated_job: str) -> None:
    """Raise UsageError when no valid names of pods can be derived from the name of a job.

    Args:
        name: the name of the job.
        num_nodes: the number of its pods.
        replicated_job: the name of the replicated job that trains, in the runtime of the job.
    """
    longest = f"{name}-{replicated_job}-0-{num_nodes - 1}{_UNIQUE}"
    if not name[:1].isalpha():
        raise UsageError(
            f"the job name {name!r} begins with a digit, which is invalid on a cluster; nothing was done",
            hint="begin it with a letter",
        )
    if len(longest) > _MOST_NAME:
        raise UsageError(
            f"the job name {name!r} is too long: the names of its pods, such as {longest}, would have more than "
            f"{_MOST_NAME} characters; nothing was done",
            hint=f"use at most {_MOST_NAME - len(longest) + len(name)} characters",
        )


def check_scaled_names(trainjob: Object, num_nodes: int) -> None:
    """Raise UsageError when the names of the pods of a job would become too long with more nodes.

    Args:
        trainjob: the TrainJob of the job.
        num_nodes: the new number of its pods.
    """
    path = ("trainingRuntimeSpec", "template", "spec", "replicatedJobs")
    parts = [
        str(at(one, "name"))
        for patch in items(trainjob, "spec", "runtimePatches")
        if str(at(patch, "manager")).startswith(f"{DOMAIN}/")
        for one in items(patch, *path)
    ]
    # A TrainJob for Trainer 2.1 has no patch. In Kubeflow's runtimes, the replicated job that trains has the name
    # `node`.
    check_pod_names(name_of(trainjob), num_nodes, next(iter(parts), "node"))


def check_values(spec: ClusterSpec) -> None:
    """Check resources, image, grace period, variables and the names of files.

    Raises:
        UsageError: one of these values is invalid.
    """
    _check_resources(spec.resources)
    if spec.image is not None and not _IMAGE.fullmatch(spec.image):
        raise UsageError(
            f"{spec.image!r} is not a valid name of an image; {_NOTHING}",
            hint="write it as REGISTRY/PATH:TAG, such as quay.io/team/train:1",
        )
    if spec.grace_s is not None and not 1 <= spec.grace_s <= _MOST_GRACE_S:
        raise UsageError(
            f"a grace period of {spec.grace_s} s is not possible on a cluster; {_NOTHING}",
            hint="use whole seconds, from 1 to a year",
        )
    reserved = sorted(name for name in spec.env if name.startswith(_RESERVED))
    if reserved:
        raise UsageError(
            f"env has {', '.join(reserved)}, which Kubeflow Trainer sets itself; {_NOTHING}",
            hint=f"leave out {', '.join(reserved)}",
        )
    for name in spec.files:
        if not _FILE.fullmatch(name) or name in {pod_archive.NAME, storage_record.FILE}:
            raise UsageError(
                f"the file {name!r} cannot be sent under its name; {_NOTHING}",
                hint="rename it, with letters, digits, dots, dashes and underscores; Safepoint itself uses the names "
                f"{pod_archive.NAME} and {storage_record.FILE}",
            )


def _check_resources(resources: Mapping[str, str]) -> None:
    for name, text in resources.items():
        match = _QUANTITY.fullmatch(text)
        if match is None:
            example = "32Gi" if name == "memory" else "4"
            raise UsageError(
                f"{name} {text!r} is not a quantity of Kubernetes; {_NOTHING}", hint=f"write it like {example}"
            )
        if not float(match["number"]):
            raise UsageError(f"{name} {text!r} is zero; {_NOTHING}", hint="leave it out, or ask for more")
        if "/" in name and not text.isdecimal():
            raise UsageError(
                f"{name} {text!r} is not a whole number, and devices cannot be divided; {_NOTHING}",
                hint="ask for a whole number of them",
            )
        if name == "memory" and _bytes(text) < _LEAST_MEMORY_BYTES:
            raise UsageError(f"memory {text!r} is too little for a pod; {_NOTHING}", hint="add a unit, such as 32Gi")


def _bytes(text: str) -> float:
    with contextlib.suppress(ValueError):
        return parse_bytes(text)
    return float(text.rstrip("m")) / (1000 if text.endswith("m") else 1)
