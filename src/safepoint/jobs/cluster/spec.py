"""The specification of a job on a cluster, and the record of this specification in an annotation of the TrainJob."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

from safepoint.errors import UnsupportedError, UsageError
from safepoint.estimates.job_needs import JobNeeds
from safepoint.jobs.cluster.objects import Object, name_of, texts
from safepoint.jobs.model.identity import keys_among
from safepoint.jobs.model.spec import check_name, check_packages, check_variables, has_credentials
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.location import parse_location

DEFAULT_RUNTIME = "torch-distributed"
DOMAIN = "safepoint.dev"
RECORD = f"{DOMAIN}/job"
"""The annotation of a TrainJob with the job's specification as JSON, see `ClusterSpec.to_record`."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""The label with the name of Kueue's queue that a TrainJob waits in."""
JOB_LABEL = f"{DOMAIN}/job"
"""The label of a job's objects, with the name of the job."""
SECRET_TYPE = f"{DOMAIN}/job"
"""The type of the Secrets that Safepoint makes. Kubernetes refuses to change the type of a Secret."""
REMOVAL = f"{DOMAIN}/checkpoints-are-deleted"
"""The annotation of a job whose checkpoints are being deleted."""
PLAN_LABEL = f"{DOMAIN}/successor-of"
"""The label of a TrainJob that keeps a plan, with the name of the plan's job; see `changes.successor`."""
PLAN = f"{DOMAIN}/succession"
"""The annotation of a TrainJob that keeps a plan: the plan as JSON."""
_PLAN_LETTERS = 22
_PLAN_NAME = re.compile(rf"successor-[a-z2-7]{{{_PLAN_LETTERS}}}")
_SECRET_HINT = (
    "add the key {variable} with the whole address to a Secret of the namespace, and use --connection NAME or "
    "data_connection_name: the pods get each key of this Secret as a variable"
)
_GPU_NAMES = {"gpu": "nvidia.com/gpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """One job on a cluster.

    Args:
        name: the name of the TrainJob; it must be valid in Kubernetes.
        program: the script or module, and its arguments. The script is a key of `files`, a path in `code`, or a path
            in the image.
        is_module: run the program as `python -m` does.
        files: the files that the job's config map contains, by name: the script, unless the script is in `code` or in
            the image.
        code: a zip of a folder, or None. Each pod unpacks the zip, and runs the program in that folder.
        num_nodes: the number of pods.
        ranks_per_node: the number of ranks in each pod. If it is None, `ranks_from` decides; if both are None, the
            runtime decides.
        ranks_from: `cpu` or `gpu`: each pod starts one rank for each CPU core or GPU that it finds. May be None.
        resources: the resources of each pod, by the names that Kubernetes uses.
        settings: the options of the run. The pods receive the options that differ from the defaults.
        given: the variables of settings that a user has set. The pods receive them even if their values are the
            defaults, because the runtime or the image may set other values.
        env: variables for the program, without secrets.
        connection: the name of a Secret with the keys of the object store, or None.
        runtime: the name of the TrainingRuntime or ClusterTrainingRuntime.
        image: the container image of the pods; None for the image of the runtime.
        queue: Kueue's LocalQueue, or None.
        priority_class: Kueue's WorkloadPriorityClass, or None.
        grace_s: seconds between SIGTERM and SIGKILL; None for the grace period of the runtime.
        staging_bytes: with an object store, the size limit of the local folder for checkpoints; None for no limit.
        is_staging_given: whether a user has set `staging_bytes`, so that the plan does not replace it.
        shared_memory_bytes: the size limit of /dev/shm; None for no limit except the pod's memory.
        max_restarts: how often a launcher restarts the ranks after a failure.
        labels: additional labels of the TrainJob.
        annotations: additional annotations of the TrainJob.
        patches: further changes of the runtime, in the form of the TrainJob's `runtimePatches`.
        packages: requirements to install in each pod before the program runs.
        package_indexes: the package indexes to use; the first index replaces the default.
        deadline_s: seconds after which the cluster ends the job; None for no limit.
        initializer: the `dataset` and the `model` that the cluster fetches to the claim of the runtime before the
            pods train, in the form of the TrainJob's `initializer`, without secrets.
        initializer_secrets: the variables with secrets of `dataset` and `model`; they become Secrets of the job.
        needs: the sizes from the plan of the job's model; None if there is no plan. See `planned_sizes`.
    """

    name: str
    program: tuple[str, ...]
    is_module: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    code: bytes | None = field(default=None, repr=False)
    num_nodes: int = 1
    ranks_per_node: int | None = None
    ranks_from: str | None = None
    resources: Mapping[str, str] = field(default_factory=dict[str, str])
    settings: RunSettings = field(default_factory=RunSettings)
    given: frozenset[str] = frozenset()
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    connection: str | None = None
    runtime: str = DEFAULT_RUNTIME
    image: str | None = None
    queue: str | None = None
    priority_class: str | None = None
    grace_s: int | None = None
    staging_bytes: int | None = None
    is_staging_given: bool = False
    shared_memory_bytes: int | None = None
    max_restarts: int = 3
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    annotations: Mapping[str, str] = field(default_factory=dict[str, str])
    patches: Sequence[Any] = ()
    packages: tuple[str, ...] = ()
    package_indexes: tuple[str, ...] = ()
    deadline_s: int | None = None
    initializer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    initializer_secrets: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict[str, Mapping[str, str]], repr=False
    )
    needs: JobNeeds | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        if not self.program:
            raise UsageError("the job has no program", hint="give a script, a module or a function")
        if self.num_nodes < 1:
            raise UsageError(f"the number of nodes is {self.num_nodes}; it must be at least 1")
        if self.priority_class is not None and self.queue is None:
            raise UsageError(
                f"--priority-class {self.priority_class} has no effect without a queue", hint="give --queue too"
            )
        if self.settings.freeze_as_last_resort:
            check_freezable(self.settings.output_dir, self.num_nodes)
        check_variables(self.env)
        keys = keys_among(self.env)
        if keys:
            raise UsageError(
                f"env has {', '.join(keys)}, which all readers of the TrainJob could see; nothing was submitted",
                hint="put the keys into a Secret, and use --connection NAME or data_connection_name",
            )
        addresses = sorted(name for name, text in self.env.items() if has_credentials(text))
        if addresses:
            raise UsageError(
                f"env: the address in {', '.join(addresses)} has a user name or a password, which all readers of the "
                "TrainJob could see; nothing was submitted",
                hint=_SECRET_HINT.format(variable=addresses[0]),
            )
        hint = _SECRET_HINT.format(variable="PIP_INDEX_URL")
        check_packages(self.packages, self.package_indexes, secret_hint=hint)
        check_shared(self.settings.output_dir, self.num_nodes)

    def to_record(self, planned: Sequence[str] = ()) -> str:
        """This specification as JSON, without the fields in `_NOT_RECORDED`, such as `files` and `code`.

        The TrainJob keeps this JSON in the annotation `RECORD`. Commands that show the job, or change its number of
        nodes, read the JSON there.

        Args:
            planned: the sentences about the plan of the job; see `planned_sizes`.
        """
        record = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _NOT_RECORDED}
        record["settings"] = {key: text for key, text in self.settings.to_environment().items() if text}
        record["patches"] = list(self.patches)
        record["planned"] = list(planned)
        record |= {name: dict(record[name]) for name in ("resources", "env", "labels", "annotations", "initializer")}
        return json.dumps(record, sort_keys=True)


def check_freezable(output: str | None, num_nodes: int) -> None:
    """Check that process images of a job can be made and restored.

    Raises:
        UnsupportedError: the job has several pods, or its output location is not in a claim.
    """
    if num_nodes > 1:
        raise UnsupportedError(
            f"--freeze-as-last-resort is not possible with {num_nodes} pods: restored pods have new addresses, but "
            "the restored connections between them would use the old addresses; nothing was done",
            hint="use one pod, or leave --freeze-as-last-resort out: `suspend` can save a checkpoint of all pods",
        )
    if output is None or parse_location(output).claim is None:
        raise UnsupportedError(
            "--freeze-as-last-resort needs an output location in a claim: an image in a folder of the pod itself "
            "would be deleted with the pod; nothing was submitted",
            hint="use --output-dir pvc://CLAIM/PATH",
        )


def check_shared(output: str | None, num_nodes: int) -> None:
    """Raise UsageError if there are several pods and each would have a separate folder as its output location."""
    location = parse_location(output) if output is not None and num_nodes > 1 else None
    if location is not None and location.is_folder and location.claim is None:
        raise UsageError(
            f"output location {output} would be a separate folder in each of the {num_nodes} pods",
            hint="use pvc://CLAIM/PATH, or an object store",
        )


_NOT_RECORDED = {"files", "code", "given", "initializer_secrets", "is_staging_given", "needs"}


def plan_name(content: str) -> str:
    """The name of the TrainJob that keeps a plan, from the plan's text.

    A person who may change TrainJobs, but may not create them, can change every part except the name. (Trainer
    refuses to change `spec.trainer`, but the person could remove this field, and then add it with another value.) The
    name contains 110 bits of the digest. These are enough bits to make the name unique to the text, and few enough
    for the names that Kubernetes derives for pods.
    """
    digest = hashlib.sha256(content.encode(errors="replace")).digest()
    return f"successor-{base64.b32encode(digest).decode()[:_PLAN_LETTERS].lower()}"


def own_runtime_name(job: str, grace_s: int | None) -> str:
    """The name of a job's copy of its runtime, which has the grace period of the job (in seconds)."""
    return f"{job}-{grace_s}s"


def is_plan(trainjob: Object) -> bool:
    """Whether this TrainJob only keeps the plan for another TrainJob, and is not a job itself.

    The plan need not be valid: another person may have changed it.
    """
    notes = {**texts(trainjob, "metadata", "labels"), **texts(trainjob, "metadata", "annotations")}
    is_marked = PLAN_LABEL in notes or PLAN in notes
    return is_marked and _PLAN_NAME.fullmatch(name_of(trainjob)) is not None


def kubernetes_resources(requested: Mapping[str, Any] | None) -> dict[str, str]:
    """The resources of a pod, with Kubernetes' names: `{"gpu": 1}` → `{"nvidia.com/gpu": "1"}`."""
    return {_GPU_NAMES.get(name.lower(), name): str(value) for name, value in (requested or {}).items()}


def read_record(text: str | None) -> dict[str, Any]:
    """The record in the text of an annotation; empty if there is no annotation, or if its text is no JSON object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def removal_note(trainjob: Object) -> str:
    """A sentence about a job whose checkpoints are being deleted; empty for any other job."""
    if REMOVAL not in texts(trainjob, "metadata", "annotations"):
        return ""
    return f"its checkpoints are being deleted; `safepoint delete {name_of(trainjob)} --checkpoints` finishes this"
