"""Whether the pods of a job can make process images, as far as the objects of a cluster show it.

A pod needs the rights in `RIGHTS_FOR_IMAGES`, and has to run as root. The namespace or the runtime may forbid that.
Not checked: whether the container image has CRIU and the Python packages. The pod itself checks that when it starts.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

from safepoint.errors import AccessDeniedError, NotFoundError, SafepointError, TransientError, UnsupportedError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.manifests import RIGHTS_FOR_IMAGES, Runtime
from safepoint.jobs.cluster.objects import Object, at, items, name_of, texts
from safepoint.jobs.cluster.transport.admission import ABOUT_AMOUNTS, RefusedError

_ENFORCED = "pod-security.kubernetes.io/enforce"
"""The label of a namespace with the Pod Security Standard that its pods have to meet."""
_REFUSING = {"baseline", "restricted"}
_SIZE = {"cpu": "1m", "memory": "1Mi"}


def check_may_make_images(api: ClusterApi, runtime: Runtime, patches: Sequence[Any] = ()) -> None:
    """Check that the pods of a job that makes images would be accepted, and would have what CRIU needs.

    Args:
        api: the API of the cluster, in the namespace of the job.
        runtime: the runtime of the job.
        patches: the patches of the user for the runtime.

    Raises:
        UnsupportedError: the pods would be refused, or would lack something that CRIU needs.
    """
    why = why_not_in_namespace(api) or why_not_with(runtime, patches)
    if why is not None:
        raise UnsupportedError(
            f"--freeze-as-last-resort is not possible: {why}; nothing was submitted",
            hint="leave the option out, and `suspend` saves a checkpoint; or ask for a namespace or a runtime that "
            "allows these rights",
        )


def why_not_in_namespace(api: ClusterApi) -> str | None:
    """Why the namespace refuses the pods of a job that makes images; None if it does not, or if that is not known."""
    with contextlib.suppress(AccessDeniedError, NotFoundError):
        namespace = api.read(f"/api/v1/namespaces/{api.namespace}")
        enforced = texts(namespace, "metadata", "labels").get(_ENFORCED)
        if enforced in _REFUSING:
            return (
                f"namespace {api.namespace} enforces the Pod Security Standard {enforced}, which refuses the rights "
                f"that CRIU needs ({_rights()})"
            )
    return None


def why_not_with(runtime: Runtime, patches: Sequence[Any] = ()) -> str | None:
    """Why the pods of a runtime cannot make images; None if no reason is known.

    Args:
        runtime: the runtime.
        patches: the patches of the user for the runtime.
    """
    pods = [*runtime.pods_of(patches)[::-1], runtime.pod]
    name = name_of(runtime.document)
    container = at(runtime.container, "name")
    user = _first(pods, container, "runAsUser")
    if user or _first(pods, container, "runAsNonRoot") is True:
        return f"the pods of runtime {name} do not run as root" + (f", but as user {user}" if user else "")
    if _first(pods, container, "allowPrivilegeEscalation") is False:
        return f"the pods of runtime {name} have allowPrivilegeEscalation: false, and CRIU needs {_rights()}"
    if next((found for pod in pods if (found := at(pod, "hostUsers")) is not None), True) is False:
        return f"the pods of runtime {name} have user IDs of their own (hostUsers: false), where CRIU lacks rights"
    return None


def refusal_of_pod(api: ClusterApi) -> SafepointError | None:
    """Why the cluster refuses a pod with the rights that CRIU needs, according to a request that creates nothing.

    None if it does not, or if you may not create pods. Other programs than the namespace's own check may refuse a
    pod, such as OpenShift's security context constraints. The cluster may also refuse the pod for another reason than
    these rights, see `is_about_rights`.
    """
    if not api.may("create", "pods"):
        return None
    container = {"name": "node", "image": "safepoint", "securityContext": RIGHTS_FOR_IMAGES}
    container["resources"] = {"requests": _SIZE, "limits": _SIZE}
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "safepoint-doctor-"},
        "spec": {"containers": [container], "restartPolicy": "Never"},
    }
    try:
        api.create("pods", pod, is_dry_run=True)
    except SafepointError as error:
        return error
    return None


def is_about_rights(error: SafepointError) -> bool:
    """Whether a cluster would always refuse a pod with these rights. Otherwise, such as with a quota that is used up,
    it is not known whether the cluster allows these rights.

    Args:
        error: what `refusal_of_pod` has returned.
    """
    is_about_amounts = isinstance(error, RefusedError) and error.rule in ABOUT_AMOUNTS
    return not is_about_amounts and not isinstance(error, TransientError)


def _rights() -> str:
    return f"{', '.join(RIGHTS_FOR_IMAGES['capabilities']['add'])}, and no seccomp filter"


def _first(pods: Sequence[Any], container: Any, field: str) -> Any:
    """The value of a field in the security context of the container with this name. If the container does not set the
    field, the container inherits the value of its pod; None if the pod does not set the field either."""
    of_name = [one for pod in pods for one in items(pod, "containers") if at(one, "name") == container]
    contexts = [at(one, "securityContext") for one in (*of_name, *pods)]
    return next((value for context in contexts if (value := at(context, field)) is not None), None)
