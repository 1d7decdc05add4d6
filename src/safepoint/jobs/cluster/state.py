"""Derives the state of a job on a cluster from all its objects. This module sends no requests.

No single condition shows the state. After a resume, Trainer does not change the condition `Suspended`. In a queue,
either Kueue or a person may have suspended the job.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from safepoint.foundation import clock
from safepoint.jobs.cluster.objects import Object, at, condition, items, name_of, number, texts
from safepoint.jobs.cluster.planned_sizes import planned_in
from safepoint.jobs.cluster.records.posted_progress import number_in, progress_of
from safepoint.jobs.cluster.records.receipts import RECEIPT, read_receipt
from safepoint.jobs.cluster.records.storage_record import named_output
from safepoint.jobs.cluster.spec import DOMAIN, RECORD, read_record, removal_note
from safepoint.jobs.model.receipts import Receipt
from safepoint.jobs.model.records import AttemptRecord, command_line
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import Progress
from safepoint.settings.run_settings import RunSettings

SUSPENDED_BY = f"{DOMAIN}/suspended-by"
"""The annotation with the name of the user who suspended the job."""
NODES = f"{DOMAIN}/nodes"
"""The annotation with the number of nodes that a suspended job gets when it is resumed."""
CREATED, HISTORY, SAFE_STEP = f"{DOMAIN}/created", f"{DOMAIN}/history", f"{DOMAIN}/safe-step"
"""The annotations of a TrainJob that replaced another one: when the job's first TrainJob was created, the attempts
before this TrainJob, and the step of the newest checkpoint."""
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
"""The label of a job's pods, with the name of the job. Pods that only have the label are ignored, see `own_pods`."""
UID_LABEL = "kueue.x-k8s.io/job-uid"
"""The label of a Workload, with the uid of its TrainJob. Workloads that the TrainJob does not own are ignored."""
_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
_PART_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
_QUEUE = "kueue.x-k8s.io/queue-name"
_NODE = "node"
_STUCK = {
    "ErrImagePull": "its image cannot be pulled",
    "ImagePullBackOff": "its image cannot be pulled",
    "ErrImageNeverPull": "its image is not on the node",
    "InvalidImageName": "the name of its image is invalid",
    "CreateContainerConfigError": "its container cannot be created",
    "CreateContainerError": "its container cannot be created",
    "RunContainerError": "its container cannot be started",
}
_NEVER = {"Misconfigured", "ExceedsMaxQuota", "NoMatchingFlavor", "Inadmissible"}
_MOST_MESSAGE = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All objects of a job, as they were at one moment.

    Args:
        trainjob: the TrainJob.
        pods: the pods of the JobSet.
        workload: Kueue's Workload, or None.
        events: warnings about the TrainJob and the JobSet, oldest first.
        target_nodes: if a new TrainJob is about to replace this one, its number of nodes; otherwise None.
    """

    trainjob: Object
    pods: Sequence[Object] = ()
    workload: Object | None = None
    events: Sequence[Object] = ()
    target_nodes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSummary:
    """One pod of a job.

    Args:
        name: its name.
        node: the pod's index in the job (torchrun's node rank).
        phase: its phase in Kubernetes: Pending, Running, Succeeded, Failed or Unknown.
    """

    name: str
    node: int
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """One job on a cluster, as commands show it.

    Args:
        name: the name of the TrainJob.
        place: the name of the cluster in messages.
        namespace: the namespace of the job.
        state: its state.
        message: why it is in this state; may be empty.
        created: when the job was created (RFC 3339 UTC).
        command: its program, as a command line; empty for a job that Safepoint did not submit.
        num_nodes: the number of pods.
        ranks_per_node: ranks in each pod; None when the runtime decides.
        queue: Kueue's LocalQueue, or None.
        output: the output location, or None.
        progress: the progress that its pods have posted to the cluster, or None.
        safe_step: the step of the newest checkpoint; None if it is not known.
        attempt: the number of its newest attempt; 0 if it is not known.
        exit_code: the first code other than 0 among its pods; 0 if all pods ended with 0; otherwise None.
        is_ours: whether Safepoint submitted it.
        uid: the uid of the TrainJob.
        runtime: the name of its runtime.
        pods: the pods that train, in the order of their indexes.
        grace_s: seconds between SIGTERM and SIGKILL.
        attempts: the attempts before this TrainJob. If the job has pods, or will soon have pods, also the current
            attempt.
        was_saved: whether all pods saved when this command suspended the job; None if this is unknown.
        receipt: what its suspension has saved; None while the job is not suspended, or without a receipt.
        planned: what the plan of its model said when it was submitted, and what was done about it.
    """

    name: str
    place: str
    namespace: str
    state: JobState
    message: str
    created: str
    command: str
    num_nodes: int
    ranks_per_node: int | None
    queue: str | None
    output: str | None
    progress: Progress | None
    safe_step: int | None
    attempt: int
    exit_code: int | None
    is_ours: bool
    uid: str
    runtime: str
    pods: tuple[PodSummary, ...]
    grace_s: float
    attempts: tuple[AttemptRecord, ...]
    was_saved: bool | None = None
    receipt: Receipt | None = None
    planned: tuple[str, ...] = ()

    @property
    def created_at(self) -> datetime:
        """When the job was created."""
        return datetime.fromisoformat(self.created)

    @property
    def where(self) -> str:
        """The cluster and the namespace of the job."""
        return f"{self.place}, namespace {self.namespace}"

    @property
    def can_resume(self) -> bool:
        """Whether `resume` can continue the job: only a suspended job. A failed job must be submitted again."""
        return self.state is JobState.SUSPENDED

    @property
    def settings(self) -> RunSettings:
        """The options of the run. Only `grace_s` has the value of the job; the other options have their defaults."""
        return RunSettings(grace_s=self.grace_s)

    @property
    def particulars(self) -> dict[str, Any]:
        """The fields that only a job on a cluster has, as JSON values."""
        own = ("place", "namespace", "queue", "is_ours", "grace_s")
        receipt = None if self.receipt is None else self.receipt.to_document()
        return {**{name: getattr(self, name) for name in own}, "receipt": receipt, "planned": [*self.planned]}


def describe(seen: Observed, *, place: str) -> ClusterJob:
    """The job that these objects describe, with its state. `place` is the name of the cluster in messages."""
    job = seen.trainjob
    record = read_record(texts(job, "metadata", "annotations").get(RECORD))
    state, message = _state_of(seen)
    program: list[str] = list(map(str, items(record, "program")))
    trainer = at(job, "spec", "trainer")
    notes = texts(job, "metadata", "annotations")
    progress = progress_of(job, state)
    early_end = "" if progress is None else progress.early_end
    begun = _time(at(job, "metadata", "creationTimestamp")) or "1970-01-01T00:00:00Z"
    num_nodes = _whole(notes.get(NODES)) or number(trainer, "numNodes") or max(1, len(_training(seen.pods)))
    receipt = read_receipt(notes.get(RECEIPT)) if state is JobState.SUSPENDED else None
    safe_step = None if progress is None else progress.safe_step
    if receipt is not None:
        safe_step = max(receipt.step, safe_step or 0)
    attempts = attempts_before(job)
    attempt = progress.attempt if progress is not None else attempts[-1].number if attempts else 0
    if state.holds_slots:
        attempts += (AttemptRecord(number=max(1, attempt), num_nodes=num_nodes, started=begun),)
    return ClusterJob(
        name=name_of(job),
        place=place,
        namespace=str(at(job, "metadata", "namespace") or ""),
        state=state,
        message=(removal_note(job) or message or early_end)[:_MOST_MESSAGE],
        created=_time(notes.get(CREATED, "")) or begun,
        command=command_line(program, is_module=bool(record.get("is_module"))) if program else "",
        num_nodes=num_nodes,
        ranks_per_node=at(trainer, "numProcPerNode"),
        queue=texts(job, "metadata", "labels").get(_QUEUE),
        output=named_output(job),
        progress=progress,
        safe_step=_whole(notes.get(SAFE_STEP)) if safe_step is None else safe_step,
        attempt=attempt,
        exit_code=_exit_code(seen.pods),
        is_ours=bool(record),
        uid=str(at(job, "metadata", "uid") or ""),
        runtime=str(at(job, "spec", "runtimeRef", "name") or ""),
        pods=tuple(
            PodSummary(name=name_of(pod), node=node_of(pod), phase=str(at(pod, "status", "phase") or "Unknown"))
            for pod in _training(seen.pods)
        ),
        grace_s=number_in(_variable(trainer, "SAFEPOINT_GRACE")) or RunSettings().grace_s,
        attempts=attempts,
        receipt=receipt,
        planned=planned_in(record),
    )


def attempts_before(job: Object) -> tuple[AttemptRecord, ...]:
    """The attempts before this TrainJob, oldest first; empty if there are none, or if the annotation is not valid."""
    try:
        found = json.loads(texts(job, "metadata", "annotations").get(HISTORY, "[]"))
        return tuple(_attempt(**attempt) for attempt in found)
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError, KeyError):
        return ()


def _attempt(*, num_nodes: int, started: str, ended: str, outcome: str, **other: Any) -> AttemptRecord:
    if _time(started) is None or _time(ended) is None:
        raise ValueError("the attempt has no time")
    counts = {"number": int(other["number"]), "num_nodes": int(num_nodes)}
    return AttemptRecord(started=started, ended=ended, outcome=str(outcome), **counts)


def _time(text: Any) -> str | None:
    """`text` if it is a valid time; otherwise None."""
    with contextlib.suppress(ValueError, TypeError):
        clock.parse_utc(text)
        return text
    return None


def _variable(trainer: Any, name: str) -> str:
    return next((str(at(entry, "value")) for entry in items(trainer, "env") if at(entry, "name") == name), "")


def _state_of(seen: Observed) -> tuple[JobState, str]:
    job = seen.trainjob
    if at(job, "metadata", "deletionTimestamp") or seen.target_nodes is not None:
        return _ending(seen)
    if condition(job, "Complete"):
        return JobState.COMPLETE, ""
    failed = condition(job, "Failed")
    if failed:
        return JobState.FAILED, _first_cause(seen.pods) or str(at(failed, "message") or "")
    pods = [pod for pod in _training(seen.pods) if at(pod, "status", "phase") in {"Pending", "Running", "Unknown"}]
    if at(job, "spec", "suspend"):
        return _stopped(seen, has_pods=bool(pods))
    if seen.workload is not None and not condition(seen.workload, "Admitted"):
        return _stopped(seen, has_pods=bool(pods))  # Kueue has not admitted the job yet, or takes the quota back
    return _started(seen, pods)


def _ending(seen: Observed) -> tuple[JobState, str]:
    """The state, and a message, of a job that is being deleted, or whose TrainJob is being replaced by a new one."""
    if seen.target_nodes is None:
        return JobState.DELETING, ""
    return JobState.RESTARTING, f"its number of nodes changes to {seen.target_nodes}"


def _stopped(seen: Observed, *, has_pods: bool) -> tuple[JobState, str]:
    """The state, and a message, of a job that may not run, because a person or a queue has stopped it."""
    job, workload = seen.trainjob, seen.workload
    by = texts(job, "metadata", "annotations").get(SUSPENDED_BY, "")
    queue = texts(job, "metadata", "labels").get(_QUEUE)
    is_new_in_queue = workload is None and queue is not None and not by
    if is_new_in_queue:
        return JobState.QUEUED, f"waits for queue {queue}"
    if workload is None or at(workload, "spec", "active") is False:
        return (JobState.SUSPENDING if has_pods else JobState.SUSPENDED), f"requested by {by}" if by else ""
    evicted = condition(workload, "Evicted")
    if has_pods:
        return JobState.SUSPENDING, str(at(evicted, "message") or "its queue takes the quota back")
    waits = _condition_of_any_status(workload, "QuotaReserved")
    reason, message = str(at(waits, "reason") or ""), str(at(waits, "message") or "")
    if reason in _NEVER and not message.startswith("The workload has just been"):
        return JobState.INADMISSIBLE, message
    if evicted and at(evicted, "reason") == "Preempted":
        return JobState.PREEMPTED, str(at(evicted, "message") or "")
    return JobState.QUEUED, message


def _started(seen: Observed, pods: Sequence[Object]) -> tuple[JobState, str]:
    """The state, and a message, of a job that may run."""
    has_run = _has_run(seen)
    waiting = JobState.RESUMING if has_run else JobState.STARTING
    if not pods:
        trouble = _trouble_before_pods(seen)
        return (JobState.INADMISSIBLE, trouble) if trouble else _before_training(seen, waiting)
    not_running = [pod for pod in pods if not _runs_or_is_done(pod)]
    if not not_running and not any(map(_is_leaving, pods)):
        trains = _trains(seen, pods)
        return (JobState.RUNNING, "") if trains else (waiting, "the program has started, and does not train yet")
    return _not_all_running(pods, not_running, waiting)


def _before_training(seen: Observed, waiting: JobState) -> tuple[JobState, str]:
    """The state, and a message, of a job without pods that train: it may wait for its dataset or its model."""
    found = [pod for pod in seen.pods if not is_training_pod(pod) and at(pod, "status", "phase") != "Succeeded"]
    if not found:
        return waiting, "its pods are being created"
    why = _unschedulable(found[0]) or _stuck(found[0]) or f"waits for pod {name_of(found[0])}"
    return (JobState.INADMISSIBLE if _is_stuck_for_good(found[0]) else waiting), why


def _not_all_running(
    pods: Sequence[Object], not_running: Sequence[Object], waiting: JobState
) -> tuple[JobState, str]:
    """The state, and a message, of a job with pods of which at least one does not run, or is being deleted."""
    leaving = next(filter(_is_leaving, pods), None)
    if leaving is not None:
        return JobState.RESTARTING, _why_leaving(leaving)
    for pod in pods:
        why = _unschedulable(pod) or _stuck(pod)
        if why:
            return (JobState.INADMISSIBLE if _is_stuck_for_good(pod) else waiting), why
    restarted = next(filter(_restarts, not_running), None)
    if restarted is not None:
        return JobState.RESTARTING, f"pod {name_of(restarted)}: {_ended(restarted)}"
    return waiting, f"waits for pod {name_of(not_running[0])}"


def _runs_or_is_done(pod: Object) -> bool:
    state = _container_state(pod)
    return "running" in state or at(state, "terminated", "exitCode") == 0


def _is_leaving(pod: Object) -> bool:
    return at(pod, "metadata", "deletionTimestamp") is not None


def _training(pods: Sequence[Object]) -> list[Object]:
    """The pods that train, in the order of their indexes."""
    return sorted(filter(is_training_pod, pods), key=node_of)


def is_training_pod(pod: Object) -> bool:
    """Whether a pod of a job trains; the other pods of a job are those of initializers."""
    return texts(pod, "metadata", "labels").get(_PART_LABEL, _NODE) == _NODE


def node_of(pod: Object) -> int:
    """The pod's index in the job (torchrun's node rank)."""
    number = texts(pod, "metadata", "labels").get(_INDEX_LABEL, "0")
    return int(number) if number.isdecimal() else 0


def own_pods(name: str, pods: Iterable[Object]) -> list[Object]:
    """Those of `pods` whose names show that they belong to the job `name`.

    All of `pods` have the label of this job. But everyone who may change the metadata of pods can add this label to
    any pod. No one can change the name of a pod. JobSet and the job controller derive this name from that of the job:
    `NAME-node-0-INDEX-abcde`.
    """
    return [pod for pod in pods if _is_own(name, pod)]


def _is_own(name: str, pod: Object) -> bool:
    labels = texts(pod, "metadata", "labels")
    part = re.escape(labels.get(_PART_LABEL, _NODE))
    # The job controller writes the index into the name of each pod of an indexed job. The names of initializers' pods
    # may have no index. Before Kubernetes 1.28, pods have no label with the index.
    index = f"-{node_of(pod)}" if _INDEX_LABEL in labels else "(-[0-9]+)?"
    pattern = rf"{re.escape(name)}-{part}-[0-9]+{index}-[a-z0-9]{{5}}"
    return re.fullmatch(pattern, name_of(pod)) is not None


def container_status(pod: Object) -> Any:
    """The status of the pod's container that trains; None before the container exists."""
    found = items(pod, "status", "containerStatuses")
    return next((status for status in found if at(status, "name") == _NODE), found[0] if found else None)


def _container_state(pod: Object) -> dict[str, Any]:
    return at(container_status(pod), "state") or {}


def _restarts(pod: Object) -> int:
    return number(container_status(pod), "restartCount")


def _ended(pod: Object) -> str:
    """How the pod's container last ended."""
    status = container_status(pod)
    ended = at(status, "state", "terminated") or at(status, "lastState", "terminated")
    if ended is None:
        return "it has ended"
    reason = str(at(ended, "reason") or "")
    code = at(ended, "exitCode")
    return "out of memory (OOMKilled)" if reason == "OOMKilled" else f"exit code {code}"


def _exit_code(pods: Sequence[Object]) -> int | None:
    ended = [at(container_status(pod), "state", "terminated") for pod in _training(pods)]
    codes = [None if one is None else number(one, "exitCode") for one in ended]
    return next((code for code in codes if code), 0 if codes and None not in codes else None)


def _first_cause(pods: Sequence[Object]) -> str:
    """Which pod failed first, and how; empty if no pod failed."""
    failed: list[tuple[str, Object]] = []
    for pod in _training(pods):
        status = container_status(pod)
        ended = at(status, "state", "terminated") or at(status, "lastState", "terminated")
        if ended is not None and at(ended, "exitCode"):
            failed.append((str(at(ended, "finishedAt") or ""), pod))
    if not failed:
        return ""
    _, pod = min(failed, key=lambda pair: pair[0])
    return f"pod {name_of(pod)}: {_ended(pod)}"


def _why_leaving(pod: Object) -> str:
    cause = condition(pod, "DisruptionTarget")
    why = str(at(cause, "message") or at(cause, "reason") or "it is being deleted")
    return f"pod {name_of(pod)}: {why}"


def _unschedulable(pod: Object) -> str:
    for item in items(pod, "status", "conditions"):
        is_scheduling = at(item, "type") == "PodScheduled" and at(item, "status") == "False"
        if is_scheduling and at(item, "reason") == "Unschedulable":
            return f"no node has room for pod {name_of(pod)}: {at(item, 'message')}"
    return ""


def _stuck(pod: Object) -> str:
    waiting = _container_state(pod).get("waiting")
    reason = str(at(waiting, "reason") or "")
    if reason in _STUCK:
        return f"pod {name_of(pod)}: {_STUCK[reason]}: {at(waiting, 'message') or reason}"
    return ""


def _is_stuck_for_good(pod: Object) -> bool:
    """Whether the pod probably cannot start until a person fixes its image or its configuration."""
    reason = str(at(_container_state(pod), "waiting", "reason") or "")
    return reason in {"InvalidImageName", "CreateContainerConfigError", "ErrImageNeverPull", "ImagePullBackOff"}


def _trouble_before_pods(seen: Observed) -> str:
    """Why the job has no pods: the last warning of Trainer, JobSet or the job controller; empty without a warning."""
    reasons = {"TrainJobResourcesCreationFailed", "FailedCreate", "TrainingRuntimeNotSupported"}
    found = [event for event in seen.events if at(event, "reason") in reasons]
    return str(at(found[-1], "message") or "") if found else ""


def _has_run(seen: Observed) -> bool:
    """Whether an earlier start of the job has trained."""
    return (
        bool(attempts_before(seen.trainjob))
        or at(seen.trainjob, "status", "trainerStatus") is not None
        or any(_restarts(pod) for pod in seen.pods)
    )


def _trains(seen: Observed, pods: Sequence[Object]) -> bool:
    """Whether progress was posted since the first pod started; always True if Trainer's status server is off."""
    if at(seen.trainjob, "spec", "suspend") or not _posts(pods):
        return True
    updated = at(seen.trainjob, "status", "trainerStatus", "lastUpdatedTime")
    started = at(_container_state(pods[0]), "running", "startedAt")
    return updated is not None and str(updated) >= str(started)


def _posts(pods: Sequence[Object]) -> bool:
    """Whether Trainer's status server is on. If so, Trainer sets a variable with the server's address in the pods."""
    entries = [entry for container in items(pods[0], "spec", "containers") for entry in items(container, "env")]
    return any(at(entry, "name") == "KUBEFLOW_TRAINER_SERVER_URL" for entry in entries)


def _condition_of_any_status(value: Object, kind: str) -> Any:
    return next((item for item in items(value, "status", "conditions") if at(item, "type") == kind), None)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 20 else None
