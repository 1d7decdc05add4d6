"""Derives the state of a job on a cluster from all its objects. This module sends no requests.

No single condition shows the state. After a resume, Trainer does not change the condition `Suspended`. In a queue,
either Kueue or a person may have suspended the job.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from safepoint.foundation import clock
from safepoint.jobs.cluster.objects import Object, at, condition, items, name_of, number, texts
from safepoint.jobs.cluster.planned_sizes import planned_in
from safepoint.jobs.cluster.pods.delays import delay_of, waits_for, why_no_pods
from safepoint.jobs.cluster.pods.devices import devices_of
from safepoint.jobs.cluster.pods.pod_fields import (
    container_state,
    exit_code_of,
    first_cause,
    how_ended,
    is_leaving,
    is_training_pod,
    num_restarts,
    other_grace,
    runs_or_is_done,
    saved_step,
    training_pods,
    variable_of,
    why_leaving,
)
from safepoint.jobs.cluster.pods.pod_summary import PodSummary, summary_of
from safepoint.jobs.cluster.records.pod_image import IMAGE, PodImage, read_image
from safepoint.jobs.cluster.records.posted_progress import number_in, progress_of
from safepoint.jobs.cluster.records.receipts import RECEIPT, read_receipt
from safepoint.jobs.cluster.records.storage_record import named_output
from safepoint.jobs.cluster.records.submitted_record import settings_from
from safepoint.jobs.cluster.spec import DOMAIN, RECORD, own_runtime_name, read_record, removal_note
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
"""The annotations of a TrainJob that replaced another TrainJob: when the job's first TrainJob was created, the
attempts before this TrainJob, and the step of the newest checkpoint. Other TrainJobs can have `SAFE_STEP`, too: if
the pods cannot post their progress, a command that has seen the pods end writes this annotation; see
`safe_points`."""
UID_LABEL = "kueue.x-k8s.io/job-uid"
"""The label of a Workload, with the uid of its TrainJob. Workloads that the TrainJob does not own are ignored."""
_QUEUE, _PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
_NEVER = {"Misconfigured", "ExceedsMaxQuota", "NoMatchingFlavor", "Inadmissible"}
_MOST_MESSAGE = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All objects of a job, as they were at one moment.

    Args:
        trainjob: the TrainJob.
        pods: the pods of the JobSet.
        workload: Kueue's Workload, or None.
        events: the events that explain why the job waits, oldest first. They are about these objects, the JobSet and
            its Jobs.
        target_nodes: the number of nodes of the TrainJob that is about to replace this TrainJob; None if there is no
            such TrainJob.
        saved_step: the step that a pod saved before the pod was deleted, as a watch has seen it; None if no watch has
            seen such a save.
    """

    trainjob: Object
    pods: Sequence[Object] = ()
    workload: Object | None = None
    events: Sequence[Object] = ()
    target_nodes: int | None = None
    saved_step: int | None = None


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
        ranks_per_node: ranks in each pod; None when the runtime or the program decides.
        queue: Kueue's LocalQueue, or None.
        output: the output location, or None.
        progress: the progress that its pods have posted to the cluster, or None.
        safe_step: the step of the newest checkpoint; None if it is not known.
        attempt: the number of its newest attempt; 0 if it is not known.
        exit_code: the first code other than 0 among its pods; 0 if all pods ended with 0; otherwise None.
        is_ours: whether Safepoint submitted it.
        uid: the uid of the TrainJob.
        runtime: the name of its runtime, as it was passed to `submit`.
        pods: the pods that train, in the order of their indexes.
        grace_s: seconds between SIGTERM and SIGKILL.
        attempts: the attempts before this TrainJob, and the attempt of this TrainJob if it runs, is about to run, or
            has run. The starts of one TrainJob count as one attempt.
        was_saved: whether all pods saved when this command suspended the job; None if this is unknown.
        receipt: what its suspension has saved; None if the job is not suspended, or has no receipt.
        image: the newest process image that a command has requested since the job was last resumed; None if there is
            none.
        planned: what was computed about its model when the job was submitted, as sentences; see `planned_sizes`.
        runtime_of_pods: the name of the runtime that its pods are made from. This is `runtime`, or a copy of that
            runtime with the grace period of the job.
        warning: what is wrong with the job although it may run; may be empty.
        priority_class: Kueue's WorkloadPriorityClass, or None.
        changed: when the job was preempted or has ended (RFC 3339 UTC); None in other states.
        gpu_per_node: GPUs of each pod; None if this is not known.
        cpu_per_node: processor cores of each pod, rounded up; None if this is not known.
        options: the options of the run, as variables; empty for a job that Safepoint did not submit.
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
    image: PodImage | None = None
    planned: tuple[str, ...] = ()
    runtime_of_pods: str = ""
    warning: str = ""
    priority_class: str | None = None
    changed: str | None = None
    gpu_per_node: int | None = None
    cpu_per_node: int | None = None
    options: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def created_at(self) -> datetime:
        """When the job was created."""
        return clock.parse_date(self.created)

    @property
    def where(self) -> str:
        """The cluster and the namespace of the job."""
        return f"{self.place}, namespace {self.namespace}"

    @property
    def can_resume(self) -> bool:
        """Whether `resume` can continue the job. True only for a suspended job. A failed job must be submitted
        again."""
        return self.state is JobState.SUSPENDED

    @property
    def can_scale(self) -> bool:
        """Whether `scale` can change the number of nodes: if Safepoint submitted the job, and it has not ended."""
        return self.is_ours and not self.state.is_over

    @property
    def settings(self) -> RunSettings:
        """The options of the run, as they were submitted, and its grace period.

        If the options are not known, or not valid, the defaults are used.
        """
        return replace(settings_from(self.options) or RunSettings(), grace_s=self.grace_s)

    @property
    def particulars(self) -> dict[str, Any]:
        """The fields that only a job on a cluster has, as JSON values."""
        own = ("place", "namespace", "queue", "priority_class", "is_ours", "grace_s")
        own += ("gpu_per_node", "cpu_per_node", "changed")
        receipt = None if self.receipt is None else self.receipt.to_document()
        return {
            **{name: getattr(self, name) for name in own},
            "receipt": receipt,
            "image": None if self.image is None else self.image.path,
            "process_image": None if self.image is None else self.image.facts(self.safe_step),
            "planned": [*self.planned],
            "warning": self.warning,
        }


def describe(seen: Observed, *, place: str) -> ClusterJob:
    """The job that these objects describe, with its state. `place` is the name of the cluster in messages."""
    job = seen.trainjob
    record = read_record(texts(job, "metadata", "annotations").get(RECORD))
    state, message = state_of(seen)
    program: list[str] = list(map(str, items(record, "program")))
    trainer = at(job, "spec", "trainer")
    notes = texts(job, "metadata", "annotations")
    progress = progress_of(job, state)
    early_end = "" if progress is None else progress.early_end
    begun = _time(at(job, "metadata", "creationTimestamp")) or "1970-01-01T00:00:00Z"
    num_nodes = _whole(notes.get(NODES)) or number(trainer, "numNodes") or max(1, len(training_pods(seen.pods)))
    receipt = read_receipt(notes.get(RECEIPT)) if state is JobState.SUSPENDED else None
    known = (
        None if progress is None else progress.safe_step,
        None if receipt is None else receipt.step,
        seen.saved_step,
        saved_step(seen.pods),
    )
    safe_step = max((step for step in known if step is not None), default=None)
    grace_s = number_in(_variable(trainer, "SAFEPOINT_GRACE")) or RunSettings().grace_s
    exit_code = exit_code_of(seen.pods)
    attempts = attempts_before(job)
    attempt = progress.attempt if progress is not None else attempts[-1].number if attempts else 0
    changed = _changed(seen, state)
    current = AttemptRecord(number=max(1, attempt), num_nodes=num_nodes, started=_admitted_at(seen) or begun)
    if state.holds_slots:
        attempts += (current,)
    elif state.is_over or not training_pods(seen.pods):
        attempts += _ended(replace(current, exit_code=exit_code), job, state, message, progress)
    gpus, cpus = devices_of(trainer, seen.pods)
    return ClusterJob(
        name=name_of(job),
        place=place,
        namespace=str(at(job, "metadata", "namespace") or ""),
        state=state,
        message=(removal_note(job) or message or early_end)[:_MOST_MESSAGE],
        created=_time(notes.get(CREATED, "")) or begun,
        command=command_line(program, is_module=bool(record.get("is_module"))) if program else "",
        num_nodes=num_nodes,
        ranks_per_node=number(trainer, "numProcPerNode") or None,
        queue=texts(job, "metadata", "labels").get(_QUEUE),
        output=named_output(job),
        progress=progress,
        safe_step=_whole(notes.get(SAFE_STEP)) if safe_step is None else safe_step,
        attempt=attempt,
        exit_code=exit_code,
        is_ours=bool(record),
        uid=str(at(job, "metadata", "uid") or ""),
        runtime=_runtime_of(job, record),
        runtime_of_pods=str(at(job, "spec", "runtimeRef", "name") or ""),
        pods=tuple(map(summary_of, training_pods(seen.pods))),
        grace_s=grace_s,
        attempts=attempts,
        receipt=receipt,
        image=read_image(notes.get(IMAGE)),
        planned=planned_in(record),
        warning=other_grace(seen.pods, grace_s) if record else "",
        priority_class=texts(job, "metadata", "labels").get(_PRIORITY),
        changed=changed,
        gpu_per_node=gpus,
        cpu_per_node=cpus,
        options={str(name): str(text) for name, text in texts(record, "settings").items()},
    )


def _changed(seen: Observed, state: JobState) -> str | None:
    """When the job was preempted, or has ended, according to its conditions; None in other states."""
    if state is JobState.PREEMPTED:
        return _time(at(condition(seen.workload, "Evicted"), "lastTransitionTime"))
    return _time(at(condition(seen.trainjob, str(state)), "lastTransitionTime")) if state.is_over else None


def _admitted_at(seen: Observed) -> str | None:
    """When the job's queue admitted the job; None if it has no queue, or if the queue has taken the quota back since
    then."""
    if _condition_of_any_status(seen.workload or {}, "Evicted") is not None:
        return None
    return _time(at(condition(seen.workload, "Admitted"), "lastTransitionTime"))


def _ended(
    current: AttemptRecord, job: Object, state: JobState, message: str, progress: Progress | None
) -> tuple[AttemptRecord, ...]:
    """The attempt of a TrainJob that has ended or has no pods, with the end of the attempt; empty if the TrainJob has
    never trained, as far as is known."""
    end = condition(job, "Complete") or condition(job, "Failed")
    time = _time(at(end, "lastTransitionTime")) or (None if progress is None else _time(progress.time))
    if time is None:
        return ()
    if state.is_waiting and state is not JobState.PREEMPTED:  # the present wait is not how the attempt ended
        state, message = JobState.SUSPENDED, ""
    outcome = f"{state}: {message}" if message else str(state)
    return (replace(current, ended=time, outcome=outcome[:_MOST_MESSAGE]),)


def _runtime_of(job: Object, record: Object) -> str:
    """The runtime that was passed to `submit`. The TrainJob may refer to a copy of this runtime, see
    `own_runtime_name`."""
    found, given = str(at(job, "spec", "runtimeRef", "name") or ""), at(record, "runtime")
    is_copy = found == own_runtime_name(name_of(job), at(record, "grace_s"))
    return given if is_copy and isinstance(given, str) else found


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


def state_of(seen: Observed) -> tuple[JobState, str]:
    """The state of a job, and why it is in this state; the reason may be empty."""
    job = seen.trainjob
    if at(job, "metadata", "deletionTimestamp") or seen.target_nodes is not None:
        return _ending(seen)
    if condition(job, "Complete"):
        return JobState.COMPLETE, ""
    failed = condition(job, "Failed")
    if failed:
        return JobState.FAILED, first_cause(seen.pods) or str(at(failed, "message") or "")
    pods = [
        pod for pod in training_pods(seen.pods) if at(pod, "status", "phase") in {"Pending", "Running", "Unknown"}
    ]
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
    """The state, and a message, of a job that may run. `pods` are the pods that train and have not ended."""
    waiting = JobState.RESUMING if _has_run(seen) else JobState.STARTING
    done = [pod for pod in training_pods(seen.pods) if at(pod, "status", "phase") == "Succeeded"]
    num_missing = max(0, _num_pods(seen.trainjob, pods) - len(pods) - len(done))
    trouble = why_no_pods(seen.events, seen.pods) if num_missing else ""
    if not pods and not done:
        if trouble:
            return JobState.INADMISSIBLE, trouble
        failed = first_cause(seen.pods)
        return (JobState.RESTARTING, failed) if failed else _before_training(seen, waiting)
    not_running = [pod for pod in pods if not runs_or_is_done(pod)]
    if not_running or any(map(is_leaving, pods)):
        return _not_all_running(seen, pods, not_running, waiting)
    if num_missing:
        return _without_all_pods(seen, [*pods, *done], num_missing, waiting, trouble)
    if not pods:
        return JobState.RUNNING, "all pods have ended"
    return (
        (JobState.RUNNING, "")
        if _trains(seen, pods)
        else (waiting, "the program has started, and does not train yet")
    )


def _num_pods(job: Object, pods: Sequence[Object]) -> int:
    """How many pods the job has when it trains. If the TrainJob leaves this to its runtime, Trainer's variable in the
    pods has the number."""
    from_runtime = _whole(variable_of(pods[0], "PET_NNODES")) if pods else None
    return number(job, "spec", "trainer", "numNodes") or from_runtime or 1


def _without_all_pods(
    seen: Observed, pods: Sequence[Object], num_missing: int, waiting: JobState, trouble: str
) -> tuple[JobState, str]:
    """The state, and a message, of a job that lacks pods. Each of its pods runs, or has finished.

    Either the cluster has not created all pods yet, or it waits before it replaces a pod that has ended.
    """
    count = f"{len(pods)} of {len(pods) + num_missing} pods exist"
    if trouble:
        return JobState.INADMISSIBLE, f"{count}: {trouble}"
    failed = first_cause([pod for pod in seen.pods if at(pod, "status", "phase") == "Failed"])
    if failed:
        return JobState.RESTARTING, f"{count}: {failed}"
    has_trained = any(map(num_restarts, pods)) or _has_posted(seen, pods)
    return (JobState.RESTARTING if has_trained else waiting), count


def _before_training(seen: Observed, waiting: JobState) -> tuple[JobState, str]:
    """The state, and a message, of a job without pods that train: it may wait for its dataset or its model."""
    found = [pod for pod in seen.pods if not is_training_pod(pod) and at(pod, "status", "phase") != "Succeeded"]
    if not found:
        return waiting, "its pods are being created"
    why, is_for_good = delay_of(found[0], seen.events)
    return (JobState.INADMISSIBLE if is_for_good else waiting), why or waits_for(found[0])


def _not_all_running(
    seen: Observed, pods: Sequence[Object], not_running: Sequence[Object], waiting: JobState
) -> tuple[JobState, str]:
    """The state, and a message, of a job with at least one pod that does not run, or that is being deleted."""
    leaving = next(filter(is_leaving, pods), None)
    if leaving is not None:
        return JobState.RESTARTING, why_leaving(leaving)
    delays = [delay for pod in not_running if (delay := delay_of(pod, seen.events))[0]]
    if delays:
        why, is_for_good = next((delay for delay in delays if delay[1]), delays[0])
        return (JobState.INADMISSIBLE if is_for_good else waiting), why
    restarted = next(filter(num_restarts, not_running), None)
    if restarted is not None:
        return JobState.RESTARTING, f"pod {name_of(restarted)}: {how_ended(restarted)}"
    return waiting, waits_for(not_running[0])


def _has_run(seen: Observed) -> bool:
    """Whether an earlier start of the job has trained."""
    return (
        bool(attempts_before(seen.trainjob))
        or at(seen.trainjob, "status", "trainerStatus") is not None
        or any(num_restarts(pod) for pod in seen.pods)
    )


def _trains(seen: Observed, pods: Sequence[Object]) -> bool:
    """Whether progress was posted since the first pod started; always True if Trainer's status server is off."""
    return not _posts(pods) or _has_posted(seen, pods)


def _has_posted(seen: Observed, pods: Sequence[Object]) -> bool:
    """Whether progress was posted since the first of these pods started."""
    updated = at(seen.trainjob, "status", "trainerStatus", "lastUpdatedTime")
    started = at(container_state(pods[0]), "running", "startedAt")
    return updated is not None and started is not None and str(updated) >= str(started)


def _posts(pods: Sequence[Object]) -> bool:
    """Whether Trainer's status server is on. If so, Trainer sets a variable with the server's address in the pods."""
    return variable_of(pods[0], "KUBEFLOW_TRAINER_SERVER_URL") is not None


def _condition_of_any_status(value: Object, kind: str) -> Any:
    return next((item for item in items(value, "status", "conditions") if at(item, "type") == kind), None)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) < 20 else None
