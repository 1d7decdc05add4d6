"""What a job needs of its namespace: a runtime, a claim, a queue, the Secret of a connection. Checked first."""

import contextlib

from safepoint.errors import AccessDeniedError, ConflictError, NotFoundError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.manifests import Runtime
from safepoint.jobs.cluster.objects import at, items, name_of, texts
from safepoint.jobs.cluster.spec import ClusterSpec, check_shared
from safepoint.storage.location import parse_location

_RUNTIMES = (("trainingruntimes", "TrainingRuntime"), ("clustertrainingruntimes", "ClusterTrainingRuntime"))


def find_runtime(api: ClusterApi, name: str) -> Runtime:
    """The TrainingRuntime of the namespace with this name, else the ClusterTrainingRuntime.

    Raises:
        NotFoundError: there is none; the message lists those that there are.
    """
    for kind, title in (
        ("trainingruntimes", "TrainingRuntime"),
        ("clustertrainingruntimes", "ClusterTrainingRuntime"),
    ):
        found = api.find(kind, name)
        if found is not None:
            return Runtime(document={**found, "kind": title})
    known = sorted({name_of(item) for item in api.objects("clustertrainingruntimes")})
    if not known:
        raise NotFoundError(
            f"cluster {api.connection.name} has no training runtimes; nothing was submitted",
            hint="ask the cluster's administrator to install Kubeflow Trainer and its runtimes",
        )
    raise NotFoundError(
        f"there is no runtime {name!r} on cluster {api.connection.name}; nothing was submitted",
        hint=f"use one of {', '.join(known)}",
    )


def check_claim(api: ClusterApi, output: str | None, num_nodes: int) -> None:
    """Check that all pods of a job can use its output location.

    Raises:
        UsageError: it is a folder, of which each pod has its own.
        NotFoundError: there is no such claim.
        ConflictError: only one node may mount it, or its volume is lost.
    """
    check_shared(output, num_nodes)
    claim = parse_location(output).claim if output is not None else None
    if claim is None:
        return
    found = api.find("persistentvolumeclaims", claim)
    if found is None:
        raise NotFoundError(
            f"there is no claim {claim} in namespace {api.namespace}; nothing was done",
            hint="`kubectl get pvc` lists the claims",
        )
    modes = set(map(str, items(found, "spec", "accessModes")))
    if num_nodes > 1 and not modes & {"ReadWriteMany"}:
        raise ConflictError(
            f"claim {claim} is {', '.join(sorted(modes))}, and the {num_nodes} pods of the job may run on "
            "different nodes; nothing was done",
            hint="use a claim that is ReadWriteMany, an object store, or one pod",
        )
    if at(found, "status", "phase") == "Lost":
        raise ConflictError(f"claim {claim} has lost its volume; nothing was done")


def check_queue(api: ClusterApi, spec: ClusterSpec) -> None:
    """Raise NotFoundError if there is no such queue."""
    if spec.queue is None:
        return
    with contextlib.suppress(AccessDeniedError):  # a user of a queue may not always read it
        if api.find("localqueues", spec.queue) is None:
            known = sorted(map(name_of, api.objects("localqueues")))
            raise NotFoundError(
                f"there is no queue {spec.queue} in namespace {api.namespace}; nothing was submitted",
                hint=f"use one of {', '.join(known)}" if known else "leave --queue out: there are no queues here",
            )


def secret_keys(api: ClusterApi, spec: ClusterSpec) -> tuple[str, ...] | None:
    """The keys of the connection's Secret; None without a connection, and if they may not be read.

    Raises:
        NotFoundError: there is no such Secret.
    """
    if spec.connection is None:
        return None
    try:
        found = api.find("secrets", spec.connection)
    except AccessDeniedError:
        return None
    if found is None:
        raise NotFoundError(
            f"there is no Secret {spec.connection} in namespace {api.namespace}; nothing was submitted",
            hint="make a data connection of this name, or give the name of another one",
        )
    return tuple(sorted(texts(found, "data")))
