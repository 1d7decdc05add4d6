"""Makes the objects of a job: its TrainJob, its config map, its Secrets and its runtime.

A runtime is a template of a job's pods, with their container image and their volumes. This module sends no requests.
"""

import base64
import copy
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from safepoint.errors import UsageError
from safepoint.foundation.volumes.room import STORAGE_LIMIT
from safepoint.jobs.cluster import large_code, pod_archive, shared_memory
from safepoint.jobs.cluster.large_code import LargeCode
from safepoint.jobs.cluster.objects import Object, at, items, name_of, texts
from safepoint.jobs.cluster.planned_sizes import sentences_of, with_planned_limit
from safepoint.jobs.cluster.pods.pod_secrets import (
    IMAGES,
    NODES,
    NODES_VARIABLE,
    SecretMount,
    images_secret,
    mount_secret,
    nodes_secret,
)
from safepoint.jobs.cluster.records.storage_record import FILE as STORAGE_FILE
from safepoint.jobs.cluster.records.storage_record import storage_record_of
from safepoint.jobs.cluster.spec import (
    DOMAIN,
    JOB_LABEL,
    QUEUE_LABEL,
    RECORD,
    SECRET_TYPE,
    ClusterSpec,
    own_runtime_name,
)
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.location import CLAIMS, parse_location

CHECKPOINTS = "/mnt/kubeflow-checkpoints"
"""The mount path of the claim, as in OpenShift AI. If the job saves to an object store, the mount path of the local
folder for checkpoints."""
_STORAGE, _SHIPPED = "checkpoint-storage", "safepoint"
SHIPPED_TO = "/opt/safepoint"
"""The path at which the pods mount the config map of the job."""
_CODE = "code.zip"
_MANAGER = f"{DOMAIN}/job"
_MOST_SHIPPED_BYTES = (1 << 20) - (16 << 10)
_STORAGE_RECORD_BYTES = 4 << 10
"""How many bytes of a config map with code are kept free for the storage record."""
RIGHTS_FOR_IMAGES: Object = {
    "capabilities": {"add": ["SYS_ADMIN", "NET_ADMIN", "SYS_TIME"]},
    "seccompProfile": {"type": "Unconfined"},  # CRIU cannot suspend a filter that also applies to CRIU itself
}
"""What CRIU needs in a container (docs/process-images.md)."""
_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_PRIORITY = "kueue.x-k8s.io/priority-class"
TRACKING = "trainer.opendatahub.io"
"""The domain of the annotations that make OpenShift AI's controller read the progress."""
_POLL_S = 30
DEFAULT_GRACE_S = 30
_DEFAULT_BACKOFF_LIMIT = 6
KEY_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_S3_ENDPOINT")
REGION_VARIABLES = ("AWS_DEFAULT_REGION", "AWS_S3_BUCKET")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The runtime of a job, and the fields of the runtime that the job's objects depend on.

    Args:
        document: the TrainingRuntime or ClusterTrainingRuntime.
    """

    document: Object

    @property
    def replicated_job(self) -> Any:
        """The entry of `replicatedJobs` whose pods train."""
        jobs = items(self.document, "spec", "template", "spec", "replicatedJobs")
        trains = [job for job in jobs if at(job, "template", "metadata", "labels", _STEP) == "trainer"]
        trains = trains or [job for job in jobs if at(job, "name") == "node"]
        if not trains:
            namespace = at(self.document, "metadata", "namespace")
            kinds = (
                f"clustertrainingruntimes,trainingruntimes -n {namespace}" if namespace else "clustertrainingruntimes"
            )
            raise UsageError(
                f"runtime {name_of(self.document)} has no replicated job that trains: none is named `node` or has "
                f"the label `{_STEP}=trainer`",
                hint=f"`kubectl get {kinds}` lists the runtimes",
            )
        return trains[0]

    def initializes(self, what: str) -> bool:
        """Whether the runtime has an initializer for `what`, which is `dataset` or `model`."""
        jobs = items(self.document, "spec", "template", "spec", "replicatedJobs")
        return any(at(job, "template", "metadata", "labels", _STEP) == f"{what}-initializer" for job in jobs)

    @property
    def pod(self) -> Any:
        """The specification of the pods that train."""
        return at(self.replicated_job, "template", "spec", "template", "spec")

    @property
    def container(self) -> Any:
        """The container that trains, in each of the pods that train."""
        containers = items(self.pod, "containers")
        named = [container for container in containers if at(container, "name") == "node"]
        if not containers:
            raise UsageError(f"the pods of runtime {name_of(self.document)} have no container; nothing was submitted")
        return (named or containers)[0]

    @property
    def grace_s(self) -> int:
        """The grace period of the pods: seconds between SIGTERM and SIGKILL."""
        found = at(self.pod, "terminationGracePeriodSeconds")
        return DEFAULT_GRACE_S if found is None else int(found)

    @property
    def backoff_limit(self) -> int:
        """The number of failed pods and restarts of containers after which Kubernetes ends the Job."""
        found = at(self.replicated_job, "template", "spec", "backoffLimit")
        return _DEFAULT_BACKOFF_LIMIT if found is None else int(found)

    def pods_of(self, patches: Sequence[Any]) -> list[Any]:
        """The pod specifications in these patches. Patches that do not change the pods that train are skipped."""
        jobs = [
            job
            for patch in patches
            for job in items(patch, "trainingRuntimeSpec", "template", "spec", "replicatedJobs")
            if at(job, "name") == at(self.replicated_job, "name")
        ]
        return [at(job, "template", "spec", "template", "spec") for job in jobs]

    def mounted(self, patches: Sequence[Any]) -> set[str]:
        """The paths at which the container that trains mounts volumes, including those that the patches add."""
        name = at(self.container, "name")
        changed = [
            one for pod in self.pods_of(patches) for one in items(pod, "containers") if at(one, "name") == name
        ]
        mounts = [mount for one in (self.container, *changed) for mount in items(one, "volumeMounts")]
        return {str(at(mount, "mountPath")).rstrip("/") for mount in mounts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifests:
    """All objects of a job.

    Args:
        trainjob: the TrainJob.
        before: the objects that must exist when the pods start, as pairs of kind and object. The TrainJob becomes
            their owner.
        code: the code that must be in the output location when the pods start, or None.
    """

    trainjob: Object
    before: tuple[tuple[str, Object], ...] = field(repr=False)
    code: LargeCode | None = None

    @property
    def documents(self) -> list[Object]:
        """The objects in the order in which they are created."""
        return [*(item for _, item in self.before), self.trainjob]


def manifests_for(
    spec: ClusterSpec,
    runtime: Runtime,
    *,
    secret_keys: tuple[str, ...] | None = None,
    with_secret: bool = True,
    with_runtime: bool = True,
) -> Manifests:
    """The objects of a job.

    Args:
        spec: the specification of the job.
        runtime: its runtime.
        secret_keys: the names of the keys in the connection's Secret; None if you may not read the Secret.
        with_secret: whether to make a Secret by which the pods recognize each other, if the job has several pods. If
            False, the pods write a secret into the output location.
        with_runtime: whether to make a copy of the runtime with the grace period of the job, if the two grace periods
            differ. If False, the job gets the grace period of the runtime.

    Raises:
        UsageError: the script and the code of the job are too large, the runtime cannot train or has no initializer
            that the job needs, a patch has a volume with one of Safepoint's names, or the job has a size limit of
            /dev/shm although the runtime or a patch mounts a volume there.
    """
    own_runtime = None
    if spec.grace_s not in {None, runtime.grace_s} and with_runtime:
        own_runtime = _own_runtime(spec, runtime)
    grace_s = runtime.grace_s if own_runtime is None or spec.grace_s is None else spec.grace_s
    is_mounted = CHECKPOINTS in runtime.mounted(spec.patches)
    spec = with_planned_limit(spec, CHECKPOINTS, is_mounted=is_mounted)
    planned = sentences_of(spec, CHECKPOINTS, grace_s=grace_s, is_mounted=is_mounted)
    makes_images = spec.settings.freeze_as_last_resort
    own_secrets = {NODES: nodes_secret(spec.name)} if spec.num_nodes > 1 and with_secret else {}
    if makes_images:
        own_secrets[IMAGES] = images_secret(spec.name)
    mounted = [mount_secret(volume, name_of(secret)) for volume, secret in own_secrets.items()]
    archive = pod_archive.build_archive(with_images=makes_images)
    spec, code = large_code.split(spec, room_bytes=_MOST_SHIPPED_BYTES - len(archive) - _STORAGE_RECORD_BYTES)
    env = _environment(spec, grace_s, secret_keys)
    env += (one.variable for one in mounted if one.variable["name"] not in spec.env)
    record = storage_record_of(spec.name, env, spec.connection)
    files = _files(spec, {pod_archive.NAME: archive, STORAGE_FILE: record.to_json()})
    before: list[tuple[str, Object]] = [("configmaps", _shipped(spec.name, files))]
    runtime_reference = {"name": spec.runtime, "kind": str(at(runtime.document, "kind"))}
    if own_runtime is not None:
        before.append(("trainingruntimes", own_runtime))
        runtime_reference = {"name": name_of(own_runtime), "kind": "TrainingRuntime"}
    before += (("secrets", secret) for secret in own_secrets.values())
    initializer = _initializer(spec, runtime)
    before += (("secrets", _initializer_secret(spec, what)) for what in spec.initializer_secrets)
    volumes, mounts = _volumes(spec, runtime, name_of(before[0][1]), mounted)
    trainer: Object = {
        "command": [*pod_archive.command_of(SHIPPED_TO, files), "run", *_program(spec)],
        "env": env,
        "numNodes": spec.num_nodes,
    }
    if code is not None:
        trainer["env"] += code.variables(CHECKPOINTS)
    if spec.image is not None:
        trainer["image"] = spec.image
    if spec.ranks_per_node is not None:
        trainer["numProcPerNode"] = spec.ranks_per_node
    if spec.resources:
        trainer["resourcesPerNode"] = {"requests": dict(spec.resources), "limits": dict(spec.resources)}
    container: Object = {"name": at(runtime.container, "name"), "volumeMounts": mounts}
    if makes_images:
        container["securityContext"] = RIGHTS_FOR_IMAGES
    patch = {"volumes": volumes, "containers": [container]}
    labels = {JOB_LABEL: spec.name, **spec.labels}
    labels |= {name: text for name, text in ((QUEUE_LABEL, spec.queue), (_PRIORITY, spec.priority_class)) if text}
    trainjob: Object = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {
            "name": spec.name,
            "labels": labels,
            "annotations": {RECORD: spec.to_record(planned), **_tracking(spec), **spec.annotations},
        },
        "spec": {
            "runtimeRef": runtime_reference,
            "trainer": trainer,
            "runtimePatches": [*spec.patches, _patch(at(runtime.replicated_job, "name"), patch)],
            **({"initializer": initializer} if initializer else {}),
            **({} if spec.deadline_s is None else {"activeDeadlineSeconds": spec.deadline_s}),
        },
    }
    return Manifests(trainjob=trainjob, before=tuple(before), code=code)


def _patch(replicated_job: str, pod: Object) -> Object:
    template = {"spec": {"template": {"spec": pod}}}
    jobs = [{"name": replicated_job, "template": template}]
    return {
        "manager": _MANAGER,
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
    }


def with_secret(trainjob: Object, secret: str) -> Object:
    """A copy of a TrainJob that also mounts the Secret by which its pods recognize each other.

    A TrainJob with one pod has no such Secret. The job needs the Secret when `scale` changes its number of pods.

    Args:
        trainjob: the TrainJob.
        secret: the name of the Secret, see `nodes_secret`.
    """
    changed, mounted = copy.deepcopy(trainjob), mount_secret(NODES, secret)
    changed["spec"]["trainer"].setdefault("env", []).append(mounted.variable)
    for pod in _own_pods(changed):
        pod["volumes"].append(mounted.volume)
        pod["containers"][0]["volumeMounts"].append(mounted.mount)
    return changed


def lacks_secret(trainjob: Object) -> bool:
    """Whether the pods of a TrainJob have no Secret by which they recognize each other, and `with_secret` can add it.

    `with_secret` cannot change a TrainJob that was made for Trainer 2.1.
    """
    env = items(trainjob, "spec", "trainer", "env")
    return bool(_own_pods(trainjob)) and not any(at(entry, "name") == NODES_VARIABLE for entry in env)


def mounted_secret(trainjob: Object) -> str | None:
    """The name of the Secret by which the pods of a TrainJob recognize each other; None if they have none."""
    volumes = [volume for pod in _own_pods(trainjob) for volume in items(pod, "volumes")]
    names = [at(volume, "secret", "secretName") for volume in volumes if at(volume, "name") == NODES]
    return next((name for name in names if isinstance(name, str)), None)


def _own_pods(trainjob: Object) -> list[Any]:
    """The pod specifications in the patch that Safepoint has put into a TrainJob."""
    return [
        at(job, "template", "spec", "template", "spec")
        for patch in items(trainjob, "spec", "runtimePatches")
        if at(patch, "manager") == _MANAGER
        for job in items(patch, "trainingRuntimeSpec", "template", "spec", "replicatedJobs")
    ]


def _own_runtime(spec: ClusterSpec, runtime: Runtime) -> Object:
    """A copy of the runtime with the job's grace period.

    A patch in the TrainJob could also set the grace period. But Kueue 0.19 removes this field from the patch, and the
    job would never start."""
    document = copy.deepcopy(runtime.document)
    own = Runtime(document=document)
    own.pod["terminationGracePeriodSeconds"] = spec.grace_s
    labels = {**texts(document, "metadata", "labels"), JOB_LABEL: spec.name}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": own_runtime_name(spec.name, spec.grace_s), "labels": labels},
        "spec": document["spec"],
    }


def _files(spec: ClusterSpec, own: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files that the pods mount: Safepoint's own, the script and the code.

    Raises:
        UsageError: the files are too large for a config map.
    """
    files = {**own, **spec.files}
    if spec.code is not None:
        files[_CODE] = spec.code
    own_bytes = sum(map(len, own.values()))
    size, room = sum(map(len, files.values())) - own_bytes, _MOST_SHIPPED_BYTES - own_bytes
    if size > room:
        raise UsageError(
            f"the job's code has {size:,} bytes, and a config map has room for {room:,}; nothing was submitted",
            hint="move data out of the code, or put the code into the image or on the claim",
        )
    return files


def _shipped(job: str, files: Mapping[str, bytes]) -> Object:
    digest = pod_archive.digest_of_files(files)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": config_map_name(job, digest), "labels": {JOB_LABEL: job}},
        "immutable": True,
        "binaryData": {name: base64.b64encode(data).decode() for name, data in sorted(files.items())},
    }


def config_map_name(job: str, digest: str) -> str:
    """The name of a job's config map.

    Args:
        job: the name of the job.
        digest: the digest of the content of the config map.
    """
    return f"{job[:40].rstrip('-')}-{digest[:12]}"


def _initializer(spec: ClusterSpec, runtime: Runtime) -> Object:
    """The TrainJob's field `initializer`: its dataset and its model, with references to Secrets.

    Raises:
        UsageError: the runtime has no initializer for one of them.
    """
    for what in spec.initializer:
        if not runtime.initializes(what):
            raise UsageError(
                f"runtime {name_of(runtime.document)} has no {what}-initializer, so the {what} of `initializer` "
                "would not be fetched; nothing was submitted",
                hint=f"use a runtime with a {what}-initializer, or fetch the {what} in the training function",
            )
    return {
        what: {**given, "secretRef": {"name": f"{spec.name}-{what}"}} if what in spec.initializer_secrets else given
        for what, given in spec.initializer.items()
    }


def _initializer_secret(spec: ClusterSpec, what: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{spec.name}-{what}", "labels": {JOB_LABEL: spec.name}},
        "type": SECRET_TYPE,
        "immutable": True,
        "stringData": dict(spec.initializer_secrets[what]),
    }


def _program(spec: ClusterSpec) -> list[str]:
    script, *arguments = spec.program
    if spec.is_module:
        return ["-m", script, *arguments]
    return [f"{SHIPPED_TO}/{script}" if script in spec.files else script, *arguments]


def _environment(spec: ClusterSpec, grace_s: int, secret_keys: tuple[str, ...] | None) -> list[Object]:
    of_job = spec.settings.of_job()
    if of_job.from_scratch or of_job.resume != "auto":
        of_job = replace(of_job, first_start=secrets.token_hex(8))
    settings, defaults = of_job.to_environment(), RunSettings().to_environment()
    chosen = {
        name: text for name, text in settings.items() if text and (text != defaults[name] or name in spec.given)
    }
    chosen["SAFEPOINT_GRACE"] = str(grace_s)
    chosen["SAFEPOINT_MAX_RESTARTS"] = str(spec.max_restarts)
    location = parse_location(spec.settings.output_dir) if spec.settings.output_dir is not None else None
    if location is not None and location.claim is not None:
        chosen[CLAIMS] = f"{location.claim}={CHECKPOINTS}"
    elif location is not None and not location.is_folder:
        chosen.setdefault("SAFEPOINT_LOCAL_DIR", f"{CHECKPOINTS}/{location.path or 'run'}")
        if spec.staging_bytes is not None:  # a pod cannot read the size limits of its volumes
            chosen[STORAGE_LIMIT] = f"{CHECKPOINTS}={spec.staging_bytes}"
    if spec.ranks_from is not None and spec.ranks_per_node is None:  # numProcPerNode takes only a number
        chosen["SAFEPOINT_NPROC_PER_NODE"] = spec.ranks_from
    if spec.code is not None:
        chosen["SAFEPOINT_CODE"] = f"{SHIPPED_TO}/{_CODE}"
    if spec.packages:
        indexes = [
            ["--index-url", "--extra-index-url"][min(n, 1)] + f"={url}" for n, url in enumerate(spec.package_indexes)
        ]
        chosen["SAFEPOINT_PACKAGES"] = json.dumps([*indexes, *spec.packages])
    entries: list[Object] = [{"name": name, "value": text} for name, text in {**chosen, **spec.env}.items()]
    return entries + _keys(spec, secret_keys)


def _keys(spec: ClusterSpec, secret_keys: tuple[str, ...] | None) -> list[Object]:
    """The variables with the keys of the connection. They refer to the Secret, so the TrainJob contains no key."""
    if spec.connection is None:
        return []
    names = (*KEY_VARIABLES, *REGION_VARIABLES) if secret_keys is None else secret_keys

    def entry(name: str) -> Object:
        reference: Object = {"name": spec.connection, "key": name}
        if secret_keys is None:
            reference["optional"] = True
        return {"name": name, "valueFrom": {"secretKeyRef": reference}}

    return [entry(name) for name in names if name not in spec.env]


def _volumes(
    spec: ClusterSpec, runtime: Runtime, config_map: str, secret_mounts: Sequence[SecretMount]
) -> tuple[list[Object], list[Object]]:
    volumes: list[Object] = [{"name": _SHIPPED, "configMap": {"name": config_map}}]
    mounts: list[Object] = [{"name": _SHIPPED, "mountPath": SHIPPED_TO, "readOnly": True}]
    mounted = runtime.mounted(spec.patches)  # Kubernetes refuses pods with two mounts at one path

    def add(name: str, path: str, source: Mapping[str, Any]) -> None:
        if path not in mounted:
            volumes.append({"name": name, **source})
            mounts.append({"name": name, "mountPath": path})

    output = spec.settings.output_dir
    location = parse_location(output) if output is not None else None
    if location is not None and location.claim is not None:
        add(_STORAGE, CHECKPOINTS, {"persistentVolumeClaim": {"claimName": location.claim}})
    elif location is not None and not location.is_folder:
        add(_STORAGE, CHECKPOINTS, {"emptyDir": _limited(spec.staging_bytes)})
    add("safepoint-tmp", "/tmp", {"emptyDir": {}})  # the root file system of the container may be read-only
    shared_memory.check_is_free(spec.shared_memory_bytes, mounted, name_of(runtime.document))
    add("safepoint-shm", shared_memory.PATH, {"emptyDir": {"medium": "Memory", **_limited(spec.shared_memory_bytes)}})
    volumes += (one.volume for one in secret_mounts)
    mounts += (one.mount for one in secret_mounts)
    given = {at(volume, "name") for pod in runtime.pods_of(spec.patches) for volume in items(pod, "volumes")}
    taken = sorted(volume["name"] for volume in volumes if volume["name"] in given)
    if taken:
        raise UsageError(
            f"a patch has a volume named {', '.join(taken)}, a name that Safepoint uses for a volume of its own; "
            "nothing was submitted",
            hint="give the volume of the patch another name",
        )
    return volumes, mounts


def _limited(size_bytes: int | None) -> Object:
    return {} if size_bytes is None else {"sizeLimit": str(size_bytes)}


def _tracking(spec: ClusterSpec) -> dict[str, str]:
    """The annotations that make OpenShift AI's controller read the progress; empty if the job has no metrics port."""
    port = spec.settings.metrics_port
    if not port:
        return {}
    return {
        f"{TRACKING}/progression-tracking": "true",
        f"{TRACKING}/metrics-port": str(port),
        f"{TRACKING}/metrics-poll-interval": str(_POLL_S),
    }
