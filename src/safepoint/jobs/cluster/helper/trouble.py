"""Why the pod of a helper does not start, or has ended before its answer was complete. This module sends no requests.

A helper is a short-lived Kubernetes Job, whose pod runs one command of Safepoint. Its answer is what the command
prints and how the command ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from safepoint.errors import ConflictError, SafepointError, WaitTimeoutError
from safepoint.jobs.cluster.helper.helper_objects import CONTAINER
from safepoint.jobs.cluster.objects import Object, at, condition, event_time, items, name_of, number, texts
from safepoint.jobs.cluster.spec import QUEUE_LABEL
from safepoint.jobs.cluster.transport.admission import refused, rule_of

_PULL = {"ErrImagePull", "ImagePullBackOff"}
_NEVER = {
    "ErrImageNeverPull": "image {image} is not on the node",
    "InvalidImageName": "image {image} has an invalid name",
    "CreateContainerConfigError": "the container cannot be created",
    "CreateContainerError": "the container cannot be created",
    "RunContainerError": "the container cannot be started",
}
_VOLUMES = {"FailedMount", "FailedAttachVolume", "FailedBinding", "ProvisioningFailed"}
_NOTHING = "nothing was done"
_QUEUE_S = 600.0
"""How long a helper may wait in a queue."""
_OWN_IMAGE = "give --image IMAGE, an image with Python, PyTorch, xxhash and typer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why the pod does not run yet.

    Args:
        error: the exception to raise if the trouble does not end.
        patience_s: how long the trouble may last before the exception is raised. Some troubles end by themselves.
    """

    error: SafepointError
    patience_s: float


def trouble_of(job: Object, pod: Object | None, events: Sequence[Object], *, image: str) -> Trouble | None:
    """Why the pod does not run yet; None if nothing is known to be wrong.

    Args:
        job: the helper's Job.
        pod: the Job's pod; None if there is no pod yet.
        events: the events about the Job and the pod, as far as you may read them.
        image: the image of the pod.
    """
    if condition(job, "Failed") is not None and pod is None:
        return Trouble(error=_ended_early(job), patience_s=0)
    if pod is None:
        return _without_pod(job, events)
    waiting = at(_status(pod), "state", "waiting")
    reason, message = str(at(waiting, "reason") or ""), str(at(waiting, "message") or "")
    if reason in _PULL:
        error = ConflictError(f"image {image} cannot be pulled: {message or reason}; {_NOTHING}", hint=_OWN_IMAGE)
        return Trouble(error=error, patience_s=0 if reason == "ImagePullBackOff" else 20)
    if reason in _NEVER:
        what = _NEVER[reason].format(image=image)
        return Trouble(error=ConflictError(f"{what}: {message or reason}; {_NOTHING}", hint=_OWN_IMAGE), patience_s=5)
    for item in items(pod, "status", "conditions"):
        is_refused = at(item, "type") == "PodScheduled" and at(item, "status") == "False"
        if is_refused and at(item, "reason") == "Unschedulable":
            return Trouble(error=_unschedulable(str(at(item, "message") or "").rstrip(".")), patience_s=20)
    return _without_volume(pod, events)


def _without_volume(pod: Object, events: Sequence[Object]) -> Trouble | None:
    found = _last(events, _VOLUMES, name_of(pod))
    # The Job is created before its config maps, so the pod may wait for a config map at first.
    if found is None or "configmap" in str(at(found, "message")):
        return None
    error = ConflictError(f"a volume cannot be mounted: {at(found, 'message')}; {_NOTHING}")
    return Trouble(error=error, patience_s=60)


def _without_pod(job: Object, events: Sequence[Object]) -> Trouble | None:
    queue = texts(job, "metadata", "labels").get(QUEUE_LABEL)
    if at(job, "spec", "suspend") is True and queue is not None:
        error = ConflictError(
            f"Job {name_of(job)} waits in queue {queue}, into which Kueue puts Jobs that name no queue; {_NOTHING}",
            hint="try again when the queue has room, or read the claim from a pod of your own",
        )
        return Trouble(error=error, patience_s=_QUEUE_S)
    if at(job, "spec", "suspend") is True:
        error = ConflictError(
            f"Job {name_of(job)} was suspended before it started, probably by Kueue because it names no queue; "
            f"{_NOTHING}",
            hint="ask the cluster's administrator to exempt Jobs without a queue name from Kueue, or read the claim "
            "from a pod of your own",
        )
        return Trouble(error=error, patience_s=15)
    found = _last(events, {"FailedCreate"}, name_of(job))
    if found is None:
        return None
    message = str(at(found, "message") or "")
    rule = rule_of(message)
    if rule is None:
        error = ConflictError(f"the cluster refuses the pod: {message}; {_NOTHING}")
    else:
        error = refused(rule, message, end=_NOTHING)
    return Trouble(error=error, patience_s=2)


def _unschedulable(message: str) -> SafepointError:
    return ConflictError(
        f"no node has room for the pod: {message}; {_NOTHING}", hint="try again later, or give less --memory"
    )


def _ended_early(job: Object) -> SafepointError:
    reason = at(condition(job, "Failed"), "reason")
    if reason == "DeadlineExceeded":
        return WaitTimeoutError("the pod's deadline passed before it started; nothing was done", hint="try again")
    return ConflictError(f"the pod was ended before it started: {reason}; {_NOTHING}", hint="try again")


def ending_without_answer(
    job: Object | None, pod: Object | None, said: Sequence[str], *, memory: str
) -> SafepointError:
    """The error for a pod that is gone, or has ended before its answer was complete.

    Args:
        job: the helper's Job; None if it is gone.
        pod: the Job's pod; None if the pod is gone.
        said: the last lines of the pod's log that do not belong to an answer.
        memory: the limit of the pod's memory.
    """
    ended = at(_status(pod), "state", "terminated")
    reason = str(at(ended, "reason") or at(pod, "status", "reason") or at(condition(job, "Failed"), "reason") or "")
    rest = "the command was not completed"
    if reason == "OOMKilled":
        return ConflictError(f"the pod needed more memory than {memory}; {rest}", hint="give more with --memory")
    if reason == "DeadlineExceeded":
        return WaitTimeoutError(
            f"the pod's deadline passed; {rest}",
            hint="run the command again. Its pod ends when the command has not reached the cluster for two minutes",
        )
    if said:
        hint = _OWN_IMAGE if "No module named" in said[-1] or "not found" in said[-1] else None
        code = number(ended, "exitCode")
        return ConflictError(f"the pod ended with exit code {code}: {said[-1][:400]}; {rest}", hint=hint)
    message = str(at(ended, "message") or at(pod, "status", "message") or "")
    if pod is None:
        return ConflictError(f"the pod was deleted; {rest}", hint="try again")
    what = ": ".join(filter(None, (reason, message))) or "without a reason"
    return ConflictError(
        f"the pod ended without an answer ({what}); {rest}", hint=_OWN_IMAGE if message else "try again"
    )


def has_started(pod: Object) -> bool:
    """Whether the container of the helper's pod runs or has run."""
    state = at(_status(pod), "state")
    return at(state, "running") is not None or at(state, "terminated") is not None


def is_over(pod: Object) -> bool:
    """Whether the pod has ended."""
    return at(pod, "status", "phase") in {"Succeeded", "Failed"}


def _status(pod: Object | None) -> Object:
    found = [item for item in items(pod, "status", "containerStatuses") if at(item, "name") == CONTAINER]
    return found[0] if found else {}


def _last(events: Sequence[Object], reasons: set[str], name: str) -> Object | None:
    found = [item for item in events if at(item, "reason") in reasons and at(item, "involvedObject", "name") == name]
    return max(found, key=event_time, default=None)
