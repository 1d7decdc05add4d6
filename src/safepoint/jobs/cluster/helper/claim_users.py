"""Finds what a helper needs: its claims (volumes), the node on which it has to run, and an image with Python.

A helper is a short-lived Kubernetes Job that runs one command of Safepoint.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, cast

from safepoint.errors import AccessDeniedError, ConflictError, NotFoundError, UsageError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.checks.requirements import find_runtime
from safepoint.jobs.cluster.helper.helper_objects import HelperRequest, PodBasis
from safepoint.jobs.cluster.manifests import Runtime
from safepoint.jobs.cluster.objects import Object, at, items, name_of, texts
from safepoint.jobs.cluster.spec import DEFAULT_RUNTIME, is_plan

_OVER = {"Succeeded", "Failed"}


def find_basis(api: ClusterApi, request: HelperRequest) -> PodBasis:
    """Find what the pod of a helper is made from, and the node on which it has to run.

    Raises:
        NotFoundError: there is no such claim, or no job or runtime from which to take an image.
        ConflictError: a claim cannot be mounted now.
        AccessDeniedError: you may not read the claims or the runtimes.
    """
    claims = [_find_claim(api, name, may_bind=request.may_bind) for name in request.claims]
    node, tolerations = _node_of(api, claims)
    pod, container, image, origin = _image_for(api, request)
    return PodBasis(pod=pod, container=container, image=image, origin=origin, node=node, tolerations=tolerations)


# ---- claims ----------------------------------------------------------------------------------------------------


def _find_claim(api: ClusterApi, name: str, *, may_bind: bool) -> Object:
    found = api.find("persistentvolumeclaims", name)
    if found is None:
        raise NotFoundError(
            f"there is no claim {name} in namespace {api.namespace}; nothing was done",
            hint=f"`kubectl get pvc -n {api.namespace}` lists the claims",
        )
    if at(found, "metadata", "deletionTimestamp"):
        raise ConflictError(f"claim {name} is being deleted; nothing was done")
    phase = at(found, "status", "phase")
    if phase == "Lost":
        raise ConflictError(f"claim {name} has lost its volume; nothing was done")
    if phase != "Bound" and not may_bind:
        raise ConflictError(
            f"claim {name} is {phase or 'Pending'}: it has no volume yet, and so no checkpoints; nothing was done",
            hint=f"`kubectl describe pvc {name} -n {api.namespace}` shows what it waits for; many claims wait for "
            "their first pod",
        )
    return found


def _node_of(api: ClusterApi, claims: list[Object]) -> tuple[str | None, list[Any]]:
    """Find the node on which the helper has to run. If only one node can mount a claim, and a pod uses the claim now,
    the helper has to run on the node of this pod.

    Returns:
        The node, and the tolerations of the pods that use such claims. If no pod uses such a claim, the node is None.
    """
    bound: dict[str, tuple[str, str]] = {}
    tolerations: list[Any] = []
    alone = [claim for claim in claims if _is_for_one_node(claim)]
    pods: list[Object] = []
    if alone:
        with contextlib.suppress(AccessDeniedError):
            pods = api.objects("pods")
    for claim in alone:
        for pod in pods:
            node = at(pod, "spec", "nodeName")
            if not node or at(pod, "status", "phase") in _OVER or name_of(claim) not in set(claims_in(pod)):
                continue
            if "ReadWriteOncePod" in items(claim, "spec", "accessModes"):
                raise ConflictError(
                    f"claim {name_of(claim)} is ReadWriteOncePod, and pod {name_of(pod)} uses it; nothing was done",
                    hint="try again when that pod has ended",
                )
            bound[str(node)] = (name_of(claim), name_of(pod))
            tolerations += items(pod, "spec", "tolerations")
    if len(bound) > 1:
        users = " and ".join(f"{claim} by pod {pod} on node {node}" for node, (claim, pod) in bound.items())
        raise ConflictError(
            f"claims that only one node can mount are in use on different nodes: {users}; nothing was done",
            hint="try again when the pods that use these claims have ended on all of these nodes except one",
        )
    return next(iter(bound), None), tolerations


def _is_for_one_node(claim: Object) -> bool:
    """Whether a pod on another node may be unable to mount a claim that a pod uses.

    The mode `ReadWriteMany` lets several nodes mount the claim. `ReadOnlyMany` does the same if it is the only mode.
    If the claim has another mode as well, a pod may have mounted it for writing, and then no other node can.
    """
    modes = set(items(claim, "spec", "accessModes"))
    return "ReadWriteMany" not in modes and modes != {"ReadOnlyMany"}


def claims_in(value: Any) -> Iterator[str]:
    """The names of all claims that an object mounts."""
    if isinstance(value, dict):
        document = cast("dict[str, Any]", value)
        claim = at(document, "persistentVolumeClaim", "claimName")
        if isinstance(claim, str):
            yield claim
        value = list(document.values())
    if isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from claims_in(item)


def find_secret_keys(api: ClusterApi, connection: str | None) -> tuple[str, ...] | None:
    """The names of the keys in a connection's Secret; None if `connection` is None, or if you may not read the
    Secret.

    Raises:
        NotFoundError: there is no such Secret.
    """
    if connection is None:
        return None
    try:
        found = api.find("secrets", connection)
    except AccessDeniedError:
        return None
    if found is None:
        raise NotFoundError(
            f"there is no Secret {connection} in namespace {api.namespace}; nothing was done",
            hint=f"`kubectl get secrets -n {api.namespace}` lists the Secrets",
        )
    return tuple(sorted(texts(found, "data")))


# ---- image -----------------------------------------------------------------------------------------------------


def _image_for(api: ClusterApi, request: HelperRequest) -> tuple[Object, Object, str, str]:
    """Find an image for the helper, and the specification of a pod in which this image is used.

    Returns:
        The specification of a pod of a job or a runtime, its container that trains, the image, and where the image
        comes from. If no job and no runtime can be used, the specification and the container are empty.
    """
    try:
        found = _of_jobs(api, request.claims) or _of_runtimes(api)
    except AccessDeniedError:
        if request.image is None:
            raise
        found = None
    if found is None and request.image is None:
        raise NotFoundError(
            f"no job uses claim {' or '.join(request.claims)}, and namespace {api.namespace} has no runtime whose "
            "image could be used; nothing was done",
            hint="give --image IMAGE, an image with Python, PyTorch, xxhash and typer",
        )
    if found is None:
        return {}, {}, str(request.image), "--image"
    runtime, image, origin = found
    chosen = request.image or image or str(at(runtime.container, "image") or "")
    return cast(Object, runtime.pod), cast(Object, runtime.container), chosen, "--image" if request.image else origin


def _of_jobs(api: ClusterApi, claims: Iterable[str]) -> tuple[Runtime, str, str] | None:
    """Find the newest job that uses one of the claims. Return its runtime, its image, and the text `job <name>`; None
    if no such job can be used.

    The runtime and the image come from the job's JobSet or, if the JobSet cannot be used, from the job's runtime.
    """
    wanted = set(claims)
    jobs = [job for job in api.objects("trainjobs") if not is_plan(job)] if wanted else []
    using = [job for job in jobs if wanted & set(claims_in(at(job, "spec")))]
    for job in sorted(using, key=lambda job: str(at(job, "metadata", "creationTimestamp")), reverse=True):
        origin = f"job {name_of(job)}"
        image = str(at(job, "spec", "trainer", "image") or "")
        jobset = None
        with contextlib.suppress(AccessDeniedError):
            jobset = api.find("jobsets", name_of(job))
        with contextlib.suppress(NotFoundError, UsageError):
            if jobset is not None:
                made = Runtime(document={"metadata": at(jobset, "metadata"), "spec": {"template": jobset}})
                if at(made.container, "image"):
                    return made, str(at(made.container, "image")), origin
            return find_runtime(api, str(at(job, "spec", "runtimeRef", "name") or "")), image, origin
    return None


def _of_runtimes(api: ClusterApi) -> tuple[Runtime, str, str] | None:
    with contextlib.suppress(NotFoundError, UsageError):
        runtime = find_runtime(api, DEFAULT_RUNTIME)
        return runtime, str(at(runtime.container, "image") or ""), f"runtime {DEFAULT_RUNTIME}"
    for kind in ("trainingruntimes", "clustertrainingruntimes"):
        for document in sorted(api.objects(kind), key=name_of):
            with contextlib.suppress(UsageError):
                runtime = Runtime(document=document)
                if image := str(at(runtime.container, "image") or ""):
                    return runtime, image, f"runtime {name_of(document)}"
    return None
