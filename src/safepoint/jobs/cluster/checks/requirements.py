"""Checks, before a job is created, that its runtime, its claim (volume), its queue and its Secret exist.

A runtime is a template of a job's pods, with their container image and their volumes.
"""

import contextlib

from safepoint.errors import AccessDeniedError, ConflictError, NotFoundError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.checks.image_rights import check_may_make_images
from safepoint.jobs.cluster.checks.values import check_pod_names, check_scaled_names, check_values
from safepoint.jobs.cluster.manifests import KEY_VARIABLES, Manifests, Runtime, manifests_for
from safepoint.jobs.cluster.objects import Object, at, event_time, items, name_of, texts
from safepoint.jobs.cluster.records.submitted_record import read_submitted
from safepoint.jobs.cluster.spec import ClusterSpec, check_freezable, check_shared
from safepoint.storage.location import parse_location

_RUNTIMES = (("trainingruntimes", "TrainingRuntime"), ("clustertrainingruntimes", "ClusterTrainingRuntime"))


def needs_of(spec: ClusterSpec) -> list[tuple[str, str]]:
    """The kinds and names of the objects that `manifests_of` looks up."""
    output = spec.settings.output_dir
    given = {
        **{kind: spec.runtime for kind, _ in _RUNTIMES},
        "persistentvolumeclaims": parse_location(output).claim if output is not None else None,
        "localqueues": spec.queue,
        "workloadpriorityclasses": spec.priority_class if spec.queue is not None else None,
        "secrets": spec.connection,
    }
    return [(kind, name) for kind, name in given.items() if name is not None]


def manifests_of(api: ClusterApi, spec: ClusterSpec, *, asks: bool = True) -> Manifests:
    """Check what a job needs, and make its objects.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        spec: the specification of the job.
        asks: if True, ask the cluster which optional objects you may create, and make only these. If False, make all
            objects.

    Raises:
        NotFoundError: the runtime, the claim, the Secret, the queue or its priority class does not exist.
        UsageError: a value is invalid, the pods would not share the output location, or the script and the code of
            the job are too large to store on the cluster.
        ConflictError: the claim cannot be used, see `check_claim`.
        AccessDeniedError: the Secret has no keys.
        UnsupportedError: the pods of the job cannot make process images, see `check_may_make_images`.
    """
    runtime = find_runtime(api, spec.runtime)
    check_claim(api, spec.settings.output_dir, spec.num_nodes)
    check_pod_names(spec.name, spec.num_nodes, str(at(runtime.replicated_job, "name")))
    check_values(spec)
    check_queue(api, spec)
    if spec.settings.freeze_as_last_resort:
        check_may_make_images(api, runtime, spec.patches)
    is_own_grace = spec.grace_s not in {None, runtime.grace_s}
    return manifests_for(
        spec,
        runtime,
        secret_keys=secret_keys(api, spec),
        with_secret=not asks or spec.num_nodes == 1 or api.may("create", "secrets"),
        with_runtime=not asks or not is_own_grace or api.may("create", "trainingruntimes"),
    )


def find_runtime(api: ClusterApi, name: str) -> Runtime:
    """The TrainingRuntime of this name in the namespace; if there is none, the ClusterTrainingRuntime of this name.

    Raises:
        NotFoundError: there is no such runtime; the hint lists the ClusterTrainingRuntimes.
    """
    for kind, title in _RUNTIMES:
        found = api.find(kind, name)
        if found is not None:
            return Runtime(document={**found, "kind": title})
    known = sorted({name_of(item) for kind, _ in _RUNTIMES for item in api.objects(kind)})
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
    """Check that all pods of a job can use its output location. Object stores are not checked here.

    Raises:
        UsageError: the job has several pods, and each of them would have a folder of its own.
        NotFoundError: the claim of the location does not exist.
        ConflictError: there are several pods and the claim is not ReadWriteMany; or the claim is read-only, is being
            deleted, has lost its volume, or gets no volume.
    """
    check_shared(output, num_nodes)
    claim = parse_location(output).claim if output is not None else None
    if claim is None:
        return
    found = api.find("persistentvolumeclaims", claim)
    if found is None:
        raise NotFoundError(
            f"there is no claim {claim} in namespace {api.namespace}; nothing was done",
            hint=f"`kubectl get pvc -n {api.namespace}` lists the claims",
        )
    if at(found, "metadata", "deletionTimestamp"):
        raise ConflictError(f"claim {claim} is being deleted; nothing was done", hint="use another claim")
    modes = set(map(str, items(found, "spec", "accessModes")))
    if modes and modes <= {"ReadOnlyMany"}:
        fitting = "ReadWriteMany or ReadWriteOnce" if num_nodes == 1 else "ReadWriteMany"
        raise ConflictError(
            f"claim {claim} is ReadOnlyMany, so the job cannot save to it; nothing was done",
            hint=f"use a claim that is {fitting}, or an object store",
        )
    if num_nodes > 1 and not modes & {"ReadWriteMany"}:
        raise ConflictError(
            f"claim {claim} is {', '.join(sorted(modes))}, and the {num_nodes} pods of the job may run on "
            "different nodes; nothing was done",
            hint="use a claim that is ReadWriteMany, an object store, or one pod",
        )
    if at(found, "status", "phase") == "Lost":
        raise ConflictError(f"claim {claim} has lost its volume; nothing was done", hint="use another claim")
    if at(found, "status", "phase") == "Pending":
        _check_gets_volume(api, claim)


def _check_gets_volume(api: ClusterApi, claim: str) -> None:
    """Raise ConflictError if the cluster's last message about a claim says why the claim gets no volume.

    A claim may be Pending because it waits for its first pod, or because it was just created. Then the job can start.
    """
    with contextlib.suppress(AccessDeniedError):
        fields = f"involvedObject.kind=PersistentVolumeClaim,involvedObject.name={claim}"
        last = max(api.objects("events", fields=fields), key=event_time, default=None)
        if at(last, "reason") in {"FailedBinding", "ProvisioningFailed"}:
            raise ConflictError(
                f"claim {claim} is Pending, and gets no volume: {at(last, 'message')}; nothing was done",
                hint=f"`kubectl describe pvc {claim} -n {api.namespace}` shows more; or use another claim",
            )


def check_queue(api: ClusterApi, spec: ClusterSpec) -> None:
    """Raise NotFoundError if the job's queue or priority class does not exist.

    Objects that you may not read are not checked.
    """
    if spec.queue is None:
        return
    with contextlib.suppress(AccessDeniedError):  # some users may submit to a queue, but not read it
        if api.find("localqueues", spec.queue) is None:
            known = sorted(map(name_of, api.objects("localqueues")))
            raise NotFoundError(
                f"there is no queue {spec.queue} in namespace {api.namespace}; nothing was submitted",
                hint=f"use one of {', '.join(known)}" if known else "leave --queue out: the namespace has no queues",
            )
    if spec.priority_class is None:
        return
    with contextlib.suppress(AccessDeniedError):  # some users may read only objects of a namespace, not these classes
        if api.find("workloadpriorityclasses", spec.priority_class) is None:
            known = sorted(map(name_of, api.objects("workloadpriorityclasses")))
            raise NotFoundError(
                f"there is no priority class {spec.priority_class} on cluster {api.connection.name}, and Kueue would "
                "never admit the job; nothing was submitted",
                hint=f"use one of {', '.join(known)}" if known else "leave --priority-class out: there are none",
            )


def secret_keys(api: ClusterApi, spec: ClusterSpec) -> tuple[str, ...] | None:
    """The names of the keys in the Secret of the job's connection.

    None if the job has no connection, or if you may not read the Secret.

    Raises:
        NotFoundError: the Secret does not exist.
        AccessDeniedError: the Secret has no keys.
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
            hint="create it (a data connection with the keys of the object store), or name another Secret",
        )
    keys = tuple(sorted(texts(found, "data")))
    if not keys:
        raise AccessDeniedError(
            f"Secret {spec.connection} in namespace {api.namespace} has no keys; nothing was submitted",
            hint=f"add {' and '.join(KEY_VARIABLES[:2])} to it, or name another Secret",
        )
    return keys


def check_trainer(api: ClusterApi) -> None:
    """Raise NotFoundError if the cluster does not have the kind TrainJob."""
    if api.serves("trainjobs"):
        return
    place, versions, own = api.connection.name, api.versions_of("trainjobs"), api.version_of("trainjobs")
    if versions:
        raise NotFoundError(
            f"Kubeflow Trainer on cluster {place} has the API {', '.join(versions)}, and this release of Safepoint "
            f"uses the API {own}; nothing was done",
            hint=f"install a release of Safepoint that uses the API {', '.join(versions)}",
        )
    raise NotFoundError(
        f"cluster {place} has no Kubeflow Trainer; nothing was done",
        hint="ask the cluster's administrator to install Kubeflow Trainer, or name another cluster with --on",
    )


def check_scaled(api: ClusterApi, trainjob: Object, output: str | None, num_nodes: int) -> None:
    """Check that a job can have another number of nodes.

    Raises:
        UnsupportedError: the pods of the job make process images, and `num_nodes` is more than 1; see
            `check_freezable`.
        SafepointError: see `check_claim` and `check_scaled_names`.
    """
    submitted = read_submitted(trainjob)
    if submitted is not None and submitted.makes_images:
        check_freezable(output, num_nodes)
    check_claim(api, output, num_nodes)
    check_scaled_names(trainjob, num_nodes)
