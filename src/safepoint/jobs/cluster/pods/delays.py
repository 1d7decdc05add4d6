"""Finds why a job has no pods, or why a pod does not run yet, and since when. This module sends no requests."""

from collections.abc import Iterable, Sequence

from safepoint.jobs.cluster.objects import Object, at, event_time, items, name_of
from safepoint.jobs.cluster.pods.pod_fields import container_state

_STUCK = {
    "ErrImagePull": "its image cannot be pulled",
    "ImagePullBackOff": "its image cannot be pulled",
    "ErrImageNeverPull": "its image is not on the node",
    "InvalidImageName": "the name of its image is invalid",
    "CreateContainerConfigError": "its container cannot be created",
    "CreateContainerError": "its container cannot be created",
    "RunContainerError": "its container cannot be started",
}
_STUCK_FOR_GOOD = {"InvalidImageName", "CreateContainerConfigError", "ErrImageNeverPull", "ImagePullBackOff"}
"""Reasons for which a pod probably cannot start until a person fixes its image or its configuration."""
_NO_PODS = {
    *("TrainJobResourcesCreationFailed", "TrainingRuntimeNotSupported"),
    *("JobCreationFailed", "HeadlessServiceCreationFailed", "PVCCreationFailed"),
    "FailedCreate",
}
"""Trainer, JobSet and the job controller warn with these reasons when they cannot create pods."""
_NO_VOLUME = {"FailedMount", "FailedAttachVolume", "FailedMapVolume"}
_SECONDS = len("2026-01-01T00:00:00")
_NO_SANDBOX = {"FailedCreatePodSandBox"}


def why_no_pods(events: Iterable[Object], pods: Iterable[Object]) -> str:
    """Why the missing pods of a job cannot be created; empty if there is no warning.

    Args:
        events: the events of the job's objects, oldest first.
        pods: the pods that the job has. A warning that is older than the newest pod no longer applies.
    """
    newest = max((str(at(pod, "metadata", "creationTimestamp") or "") for pod in pods), default="")
    found = [
        event
        for event in events
        if at(event, "reason") in _NO_PODS and event_time(event)[:_SECONDS] >= newest[:_SECONDS]
    ]
    return f"{at(found[-1], 'message') or at(found[-1], 'reason')}" if found else ""


def delay_of(pod: Object, events: Sequence[Object]) -> tuple[str, bool]:
    """Why a pod does not run yet (empty if the reason is unknown), and whether it cannot run until a person acts.

    Args:
        pod: a pod whose container does not run.
        events: the events of the job's objects, oldest first.
    """
    name = name_of(pod)
    own = [
        event
        for event in events
        if at(event, "involvedObject", "kind") == "Pod" and at(event, "involvedObject", "name") == name
    ]
    scheduling = next((one for one in items(pod, "status", "conditions") if at(one, "type") == "PodScheduled"), None)
    since = _since(at(scheduling, "lastTransitionTime") or at(pod, "metadata", "creationTimestamp"))
    if at(scheduling, "status") == "False" and at(scheduling, "reason") == "Unschedulable":
        message = str(at(scheduling, "message") or "")
        if "PersistentVolumeClaim" in message or "persistentvolumeclaim" in message:
            return f"pod {name} waits for a volume{since}: {message}", "not found" in message
        return f"no node has room for pod {name}{since}: {message}", False
    waiting = container_state(pod).get("waiting")
    reason = str(at(waiting, "reason") or "")
    if reason in _STUCK:
        why = f"pod {name}: {_STUCK[reason]}{since}: {at(waiting, 'message') or reason}"
        return why, reason in _STUCK_FOR_GOOD
    return _delay_in(own, name, since)


def _delay_in(own: Sequence[Object], name: str, since: str) -> tuple[str, bool]:
    """What the last event of a pod says about its delay."""
    if not own:
        return "", False
    last, reason = own[-1], at(own[-1], "reason")
    message = str(at(last, "message") or reason)
    if reason in _NO_VOLUME:
        # The kubelet tries again for ever. A Secret or config map that does not exist has to be created by a person.
        return f"pod {name} waits for a volume{since}: {message}", "not found" in message
    if reason in _NO_SANDBOX:
        return f"pod {name} waits for its network{since}: {message}", False
    if reason == "Pulling":
        return f"pod {name} pulls its image{_since(event_time(last))}: {message}", False
    return "", False


def waits_for(pod: Object) -> str:
    """A clause about a pod that does not run yet, for an unknown reason."""
    since = at(pod, "metadata", "creationTimestamp")
    return f"waits for pod {name_of(pod)}{_since(since)}"


def _since(time: object) -> str:
    return f" (since {time})" if time else ""
