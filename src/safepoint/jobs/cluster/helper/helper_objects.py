"""The objects of a helper: a Job that the cluster deletes after its end, and config maps.

A helper is a short-lived Kubernetes Job that runs one command of Safepoint. This module sends no requests.
"""

import base64
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from safepoint.checkpoint.remote.code import PIECES
from safepoint.errors import UsageError
from safepoint.foundation.quantities import parse_bytes
from safepoint.jobs.cluster import pod_archive
from safepoint.jobs.cluster.manifests import KEY_VARIABLES, REGION_VARIABLES
from safepoint.jobs.cluster.objects import Object, at, items, name_of, uid_of
from safepoint.jobs.cluster.spec import DOMAIN
from safepoint.storage.location import CLAIMS

HELPER_LABEL = f"{DOMAIN}/helper"
"""The label of a helper's objects, with the name of its Job."""
CONTAINER = "safepoint"
DEADLINE_S = 120
"""After this number of seconds, the cluster ends a helper. The process that created the helper extends this limit."""
DEFAULT_MEMORY = "2Gi"
_KEPT_AFTER_END_S = 10
_USUAL_MEMORY = "256Mi"
_GRACE_S = 10
_PLACE, _CLAIMS_PLACE = "/opt/safepoint", "/mnt/safepoint"
_OURS = ("SAFEPOINT_", "PET_", "KUBEFLOW_", "TRAINER_")
_OF_JOBS = {
    "safepoint",
    "safepoint-nodes",
    "safepoint-images",
    "safepoint-tmp",
    "safepoint-shm",
    "checkpoint-storage",
}
_NO_SOURCE = {"name", "emptyDir", "projected"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperRequest:
    """What a helper does.

    Args:
        arguments: the command line after `safepoint`.
        claims: the names of the claims (volumes) to mount, without repetition.
        is_read_only: whether the command only reads the claims.
        connection: the name of a Secret with the keys of an object store, or None.
        secret_keys: the names of the keys in this Secret; None if you may not read the Secret.
        env: further variables.
        image: the image of the pod; None for the image of a job or a runtime.
        memory: the limit of the pod's memory, as Kubernetes writes it.
        pieces: the pieces of a large file, in order. Each piece gets a config map of its own.
        may_bind: whether a claim without a volume may get a volume for this helper.
    """

    arguments: tuple[str, ...]
    claims: tuple[str, ...]
    is_read_only: bool
    connection: str | None = None
    secret_keys: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    image: str | None = None
    memory: str = DEFAULT_MEMORY
    pieces: Sequence[bytes] = field(default=(), repr=False)
    may_bind: bool = False

    def __post_init__(self) -> None:
        try:
            parse_bytes(self.memory)
        except ValueError as error:
            raise UsageError(f"--memory: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PodBasis:
    """What a helper's pod takes from a job or a runtime: an image with Python, and a user with access to files.

    Args:
        pod: the specification of a pod of a job or a runtime; empty if only the image is known.
        container: the container of this pod that trains; empty if only the image is known.
        image: the image.
        origin: where the image comes from, for messages.
        node: the node on which the pod has to run, or None.
        tolerations: the tolerations of the pods that use the claim on this node.
    """

    pod: Object
    container: Object
    image: str
    origin: str
    node: str | None = None
    tolerations: Sequence[Any] = ()


def helper_job(name: str, request: HelperRequest, basis: PodBasis) -> Object:
    """The Job. The cluster ends the Job at its deadline, and soon afterwards deletes the Job and its pod."""
    labels = {HELPER_LABEL: name}
    volumes, mounts = _volumes(name, request, basis)
    container: Object = {
        "name": CONTAINER,
        "image": basis.image,
        "command": [*pod_archive.command_of(_PLACE, _files(request)), *request.arguments],
        "env": _environment(request, basis),
        "volumeMounts": mounts,
        "resources": {
            "requests": {
                "cpu": "100m",
                "memory": _USUAL_MEMORY if request.memory == DEFAULT_MEMORY else request.memory,
            },
            "limits": {"cpu": "2", "memory": request.memory},
        },
        "securityContext": {
            **(at(basis.container, "securityContext") or {}),
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    # `seccompProfile` is removed, because a job with process images runs without a seccomp filter. The helper uses
    # the profile of its pod, see below. `privileged` is removed, because the API server refuses a privileged
    # container without privilege escalation.
    for right in ("seccompProfile", "privileged"):
        container["securityContext"].pop(right, None)
    if basis.image == at(basis.container, "image") and at(basis.container, "imagePullPolicy"):
        container["imagePullPolicy"] = at(basis.container, "imagePullPolicy")
    pod: Object = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _GRACE_S,
        "securityContext": {
            "seccompProfile": {"type": "RuntimeDefault"},
            **(at(basis.pod, "securityContext") or {}),
        },
        "containers": [container],
        "volumes": volumes,
    }
    for key in ("serviceAccountName", "imagePullSecrets", "nodeSelector"):
        if at(basis.pod, key):
            pod[key] = copy.deepcopy(at(basis.pod, key))
    tolerations = [*items(basis.pod, "tolerations"), *basis.tolerations]
    if tolerations:
        pod["tolerations"] = [item for number, item in enumerate(tolerations) if item not in tolerations[:number]]
    if basis.node is not None:
        pod["affinity"] = _on_node(basis.node)
        pod.pop("nodeSelector", None)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": DEADLINE_S,
            "ttlSecondsAfterFinished": _KEPT_AFTER_END_S,
            "template": {
                # This keeps a service mesh from adding a container. Such a container never ends, so the Job would not
                # end either.
                "metadata": {"labels": labels, "annotations": {"sidecar.istio.io/inject": "false"}},
                "spec": pod,
            },
        },
    }


def config_maps(request: HelperRequest, job: Object) -> list[Object]:
    """The config maps that the pod mounts. The Job owns them from the start, so they are deleted with the Job."""
    contents: list[dict[str, bytes]] = [_files(request)]
    contents += [{f"{number:04d}": piece} for number, piece in enumerate(request.pieces)]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name_of(job), "uid": uid_of(job)}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": _map_name(name_of(job), number),
                "labels": {HELPER_LABEL: name_of(job)},
                "ownerReferences": [owner],
            },
            "immutable": True,
            "binaryData": {name: base64.b64encode(data).decode() for name, data in content.items()},
        }
        for number, content in enumerate(contents)
    ]


def _files(request: HelperRequest) -> dict[str, bytes]:
    is_about_images = request.arguments[:1] == ("images",)
    return {pod_archive.NAME: pod_archive.build_archive(with_image_commands=is_about_images)}


def _map_name(helper: str, number: int) -> str:
    return f"{helper}-{number}"


def _on_node(node: str) -> Object:
    fields = [{"key": "metadata.name", "operator": "In", "values": [node]}]
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": fields}]}
        }
    }


def _environment(request: HelperRequest, basis: PodBasis) -> list[Object]:
    """The variables of the pod, from the job or runtime, from the request, and from Safepoint itself.

    Secrets of the job or runtime are left out, and so are its variables for a training. Access keys are references to
    a Secret.
    """
    kept: dict[str, str] = {
        str(at(entry, "name")): str(at(entry, "value"))
        for entry in items(basis.container, "env")
        if at(entry, "value") is not None and not str(at(entry, "name")).startswith(_OURS)
    }
    chosen = {
        **kept,
        **request.env,
        CLAIMS: ",".join(f"{claim}={_CLAIMS_PLACE}/{claim}" for claim in request.claims),
        "SAFEPOINT_HELPER": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    entries: list[Object] = [{"name": name, "value": text} for name, text in chosen.items()]
    if request.connection is None:
        return entries
    names = (*KEY_VARIABLES, *REGION_VARIABLES) if request.secret_keys is None else request.secret_keys
    is_optional = {} if request.secret_keys is not None else {"optional": True}
    return entries + [
        {
            "name": name,
            "valueFrom": {"secretKeyRef": {"name": request.connection, "key": name, **is_optional}},
        }
        for name in names
        if name not in chosen
    ]


def _volumes(name: str, request: HelperRequest, basis: PodBasis) -> tuple[list[Object], list[Object]]:
    """The volumes of the helper's pod, and the mounts of these volumes.

    The pod gets the volumes of the job or runtime (one of them may contain Python), the claims, and the helper's
    config maps.
    """
    kept = {
        str(at(volume, "name")): copy.deepcopy(volume)
        for volume in items(basis.pod, "volumes")
        if at(volume, "name") not in _OF_JOBS and set(volume) - _NO_SOURCE
    }
    mounts: list[Object] = [
        {**mount, "readOnly": True}
        for mount in items(basis.container, "volumeMounts")
        if at(mount, "name") in kept and str(at(mount, "mountPath")).rstrip("/") not in {_PLACE, PIECES, "/tmp"}
    ]
    used = {str(at(mount, "name")) for mount in mounts}
    volumes: list[Object] = [volume for key, volume in kept.items() if key in used]

    def add(volume: str, path: str, source: Mapping[str, Any], *, is_read_only: bool) -> None:
        volumes.append({"name": volume, **source})
        mounts.append({"name": volume, "mountPath": path, **({"readOnly": True} if is_read_only else {})})

    add(_volume_name("archive"), _PLACE, {"configMap": {"name": _map_name(name, 0)}}, is_read_only=True)
    for number, claim in enumerate(request.claims):
        source = {"persistentVolumeClaim": {"claimName": claim}}
        add(_volume_name(f"claim-{number}"), f"{_CLAIMS_PLACE}/{claim}", source, is_read_only=request.is_read_only)
    if request.pieces:
        maps = [{"configMap": {"name": _map_name(name, number + 1)}} for number in range(len(request.pieces))]
        add(_volume_name("pieces"), PIECES, {"projected": {"sources": maps}}, is_read_only=True)
    # The pod copies Safepoint's files to this folder.
    add(_volume_name("tmp"), "/tmp", {"emptyDir": {}}, is_read_only=False)
    return volumes, mounts


def _volume_name(what: str) -> str:
    return f"safepoint-helper-{what}"
