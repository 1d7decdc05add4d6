"""Checks whether a namespace of a cluster has what jobs need: rights, Trainer, JobSet, Kueue, runtimes, storage."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from safepoint.doctor.finding import Finding, Status
from safepoint.errors import AccessDeniedError, NotFoundError, UsageError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.checks.image_rights import (
    is_about_rights,
    refusal_of_pod,
    why_not_in_namespace,
    why_not_with,
)
from safepoint.jobs.cluster.manifests import Runtime
from safepoint.jobs.cluster.objects import Object, at, items, name_of, texts
from safepoint.jobs.cluster.spec import JOB_LABEL

_ALL = ("get", "list", "watch", "create", "patch", "delete")
_MADE = ("get", "list", "create", "patch", "delete")
_NEEDED = (
    ("trainjobs", "", _ALL, ""),
    ("configmaps", "", _MADE, ""),
    ("clustertrainingruntimes", "", ("get", "list"), ""),
    ("trainingruntimes", "", ("get", "list"), ""),
    ("jobsets", "", ("get",), ""),
    ("pods", "", ("list", "watch"), ""),
    ("pods", "log", ("get",), ""),
    (
        "pods",
        "exec",
        ("create", "get"),
        "`suspend` requests no save before it stops the pods: they save at SIGTERM, in the grace period",
    ),
    ("persistentvolumeclaims", "", ("get", "list"), ""),
    ("events", "", ("list",), "if a job does not start, its state is shown without a reason"),
    ("secrets", "", _MADE, "the pods of a job recognize each other by a secret in the output location instead"),
    (
        "jobs",
        "",
        ("get", "create", "patch", "delete"),
        "checkpoints in a claim can be neither read nor deleted from outside of the cluster",
    ),
    (
        "trainingruntimes",
        "",
        ("create", "patch", "delete"),
        "`submit --grace` has no effect: the pods keep the grace period of the runtime",
    ),
)
"""The rights that jobs use: kind, subresource, verbs, and what happens without the right. An empty text means that no
job works without the right."""
_OF_QUEUES = (
    ("workloads", "", ("list", "watch"), "the state of a job in a queue is incomplete"),
    (
        "workloads",
        "",
        ("patch",),
        "a job in a queue can be neither suspended nor resumed nor scaled: Kueue would start it again at once",
    ),
    ("localqueues", "", ("get", "list"), "`submit` accepts the wrong name of a queue, and the job waits for ever"),
    (
        "workloadpriorityclasses",
        "",
        ("get", "list"),
        "`submit` accepts the wrong name of a priority class, and the job waits for ever",
    ),
)
_VISIBILITY = "visibility.kueue.x-k8s.io"
_OF_PLACES = (
    (
        f"localqueues.{_VISIBILITY}",
        "pendingworkloads",
        ("get",),
        "`status` does not show the position of a job among the jobs that wait in its queue",
    ),
)
"""The right that is needed if the cluster has Kueue's visibility server."""
_METRICS = "metrics.k8s.io"
_OF_METRICS = ((f"pods.{_METRICS}", "", ("list",), "`status` does not show the memory that the pods of a job use"),)
"""The right that is needed if the cluster has a metrics server."""
_PROGRAMS = (
    (
        "Trainer",
        "trainjobs",
        "kubeflow-trainer-controller-manager",
        ("kubeflow-system", "opendatahub", "redhat-ods-applications"),
    ),
    ("JobSet", "jobsets", "jobset-controller-manager", ("jobset-system", "openshift-jobset-operator")),
    ("Kueue", "workloads", "kueue-controller-manager", ("kueue-system", "openshift-kueue-operator")),
)
"""For each program: its name, a kind that it adds, its deployment, and the namespaces where the deployment may be."""


def examine_cluster(api: ClusterApi) -> list[Finding]:
    """Run all checks, with about twenty requests.

    Raises:
        TransientError: the cluster does not answer.
        AccessDeniedError: the cluster does not accept your login.
    """
    found = [_cluster(api)]
    groups = {str(at(one, "name")): one for one in items(api.read("/apis"), "groups")}
    found += [_program(api, *program, groups) for program in _PROGRAMS]
    of_queues = _OF_QUEUES if "kueue.x-k8s.io" in groups else ()
    of_places = _OF_PLACES if _VISIBILITY in groups else ()
    of_metrics = _OF_METRICS if _METRICS in groups else ()
    found += _rights(api, [*_NEEDED, *of_queues, *of_places, *of_metrics])
    if "trainer.kubeflow.org" in groups:
        found += [_runtimes(api), _images(api)]
    found.append(_storage(api))
    if "kueue.x-k8s.io" in groups:
        found += _queues(api)
    return found


def _cluster(api: ClusterApi) -> Finding:
    version = at(api.read("/version"), "gitVersion")
    return Finding(
        check="cluster",
        status=Status.OK,
        found=f"{api.connection.name}, namespace {api.namespace}, Kubernetes {version}",
        why="the API server answers and accepts the login",
    )


def _program(
    api: ClusterApi, title: str, kind: str, deployment: str, namespaces: Sequence[str], groups: dict[str, Any]
) -> Finding:
    check, group, own = title.lower(), api.group_of(kind), api.version_of(kind)
    if group in groups:
        served = [str(at(one, "version")) for one in items(groups[group], "versions")]
        version = _version(api, deployment, namespaces)
        what = f"{title} {version}" if version else f"{title}, but its release cannot be read"
        found = f"{what}; API {', '.join(served)}"
        if own in served:
            return Finding(check=check, status=Status.OK, found=found, why="jobs use it")
        return Finding(
            check=check,
            status=Status.FAILURE,
            found=found,
            why=f"this release of Safepoint uses the API {own}, which the cluster does not have",
            fix=f"install a release of Safepoint that uses the API {', '.join(served)}",
        )
    if title == "Kueue":
        why = "without Kueue there are no queues: the pods of a job start as soon as a node has room for them"
        return Finding(check=check, status=Status.OK, found="not installed", why=why)
    return Finding(
        check=check,
        status=Status.FAILURE,
        found="not installed",
        why="a job is a TrainJob, and Trainer makes a JobSet from it",
        fix=f"ask the cluster's administrator to install Kubeflow {title}",
    )


def _version(api: ClusterApi, deployment: str, namespaces: Sequence[str]) -> str:
    """A program's release, from a label of its deployment or the tag of its image; empty if it cannot be read."""
    for namespace in namespaces:
        try:
            found = api.read(f"/apis/apps/v1/namespaces/{namespace}/deployments/{deployment}")
        except (AccessDeniedError, NotFoundError):
            continue
        images = [str(at(one, "image")) for one in items(found, "spec", "template", "spec", "containers")]
        label = texts(found, "metadata", "labels").get("app.kubernetes.io/version", "")
        tags = [image.rpartition(":")[2] for image in images if ":" in image.rpartition("/")[2] and "@" not in image]
        return label or next(iter(tags), "")
    return ""


def _rights(api: ClusterApi, needed: Sequence[tuple[str, str, Sequence[str], str]]) -> Iterator[Finding]:
    """Yield a finding for each kind for which a right is missing. If no right is missing, yield one finding that says
    so."""
    allowed = api.rights()
    has_all = True
    for kind, subresource, verbs, without in needed:
        # Some authorizers do not list their rules, so a right that is not listed is checked by a request of its own.
        missing = [
            verb
            for verb in verbs
            if not allowed(verb, kind, subresource) and not api.may(verb, kind, subresource=subresource)
        ]
        if not missing:
            continue
        has_all = False
        resource = api.resource_of(kind) + (f"/{subresource}" if subresource else "")
        group = api.group_of(kind) or '""'
        role = "ClusterRole" if api.is_of_cluster(kind) else "Role"
        yield Finding(
            check="rights",
            status=Status.WARNING if without else Status.FAILURE,
            found=f"you are not allowed to {', '.join(missing)} {resource}",
            why=without or "jobs do not work without this right",
            fix=f"ask for a {role} with apiGroups [{group}], resources [{resource}], verbs [{', '.join(missing)}]",
        )
    if has_all:
        yield Finding(
            check="rights",
            status=Status.OK,
            found=f"you have all rights that jobs need in namespace {api.namespace}",
            why="commands act with your own rights",
        )


def _runtimes(api: ClusterApi) -> Finding:
    check = "runtimes"
    why = "a job names a runtime, which sets the image of its pods, their grace period, and how often they restart"
    try:
        found = _all_runtimes(api)
    except AccessDeniedError as error:
        return Finding(
            check=check, status=Status.FAILURE, found=error.message, why=why, fix="ask for the right to list runtimes"
        )
    shown = sorted(shown for document in found if (shown := _runtime(document)))
    if shown:
        return Finding(check=check, status=Status.OK, found=", ".join(shown), why=why)
    return Finding(
        check=check,
        status=Status.FAILURE,
        found="there is no runtime that trains PyTorch",
        why=why,
        fix="ask the cluster's administrator for the ClusterTrainingRuntime torch-distributed",
    )


def _runtime(document: Object) -> str:
    """A runtime with its grace period and limit of restarts; empty if the runtime does not train PyTorch."""
    runtime = Runtime(document=document)
    try:
        return f"{name_of(document)} (grace {runtime.grace_s} s, fails at restart {max(1, runtime.backoff_limit)})"
    except UsageError:
        return ""


def _images(api: ClusterApi) -> Finding:
    """Whether the pods of jobs can make process images, as far as that is known before a pod runs."""
    refused = why_not_in_namespace(api)
    error = refusal_of_pod(api) if refused is None else None
    if error is not None and not is_about_rights(error):
        return Finding(
            check="process images",
            status=Status.WARNING,
            found=f"not known: the cluster refuses a pod like those of jobs: {error.message}",
            why="the check only asks whether a pod would be accepted; pods of jobs may be refused for this reason",
            fix=error.hint or "try again later",
        )
    if error is not None:
        refused = f"the cluster refuses a pod with the rights that CRIU needs: {error.message}"
    parts = [] if refused is None else [f"not possible: {refused}"]
    with contextlib.suppress(AccessDeniedError):  # `_runtimes` has reported that the right is missing
        for document in [] if parts else _all_runtimes(api):
            if _runtime(document):
                runtime = Runtime(document=document)
                image = at(runtime.container, "image")
                possible = f"possible with runtime {name_of(document)}, if its container image {image} has CRIU 4.2"
                parts.append(why_not_with(runtime) or possible)
    return Finding(
        check="process images",
        status=Status.OK,
        found="; ".join(sorted(parts)) or "there is no runtime that trains PyTorch",
        why="the pods of jobs with --freeze-as-last-resort make them; other jobs do not need them",
    )


def _all_runtimes(api: ClusterApi) -> list[Object]:
    """The runtimes, without the copies that jobs with --grace have.

    Raises:
        AccessDeniedError: you may not list them.
    """
    found = api.objects("trainingruntimes") + api.objects("clustertrainingruntimes")
    return [document for document in found if JOB_LABEL not in texts(document, "metadata", "labels")]


def _storage(api: ClusterApi) -> Finding:
    check, why = "storage", "a job on several pods saves to a claim that is ReadWriteMany, or to an object store"
    try:
        claims = api.objects("persistentvolumeclaims")
    except AccessDeniedError as error:
        return Finding(
            check=check, status=Status.FAILURE, found=error.message, why=why, fix="ask for the right to list claims"
        )
    shown = [
        f"{name_of(claim)} ({', '.join([*items(claim, 'spec', 'accessModes'), str(at(claim, 'status', 'phase'))])})"
        for claim in claims
    ]
    try:
        classes = items(api.read("/apis/storage.k8s.io/v1/storageclasses"), "items")
        known = f"; storage classes {', '.join(map(name_of, classes)) or 'none'}"
    except AccessDeniedError:
        known = ""
    if any("ReadWriteMany" in items(claim, "spec", "accessModes") for claim in claims):
        return Finding(check=check, status=Status.OK, found=f"claims {', '.join(shown)}{known}", why=why)
    return Finding(
        check=check,
        status=Status.WARNING,
        found=(f"claims {', '.join(shown)}" if shown else "there is no claim") + known,
        why=why,
        fix="make a claim with accessModes [ReadWriteMany], or use an object store with --connection",
    )


def _queues(api: ClusterApi) -> Iterator[Finding]:
    try:
        names = sorted(map(name_of, api.objects("localqueues")))
    except AccessDeniedError:
        return  # `_rights` has reported that the right is missing
    yield Finding(
        check="queues",
        status=Status.OK,
        found=", ".join(names) if names else f"none in namespace {api.namespace}",
        why="`submit --queue` names one of them",
    )
