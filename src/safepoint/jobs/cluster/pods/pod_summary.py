"""What pages show of one pod. This module sends no requests."""

from dataclasses import dataclass

from safepoint.jobs.cluster.objects import Object, at, name_of
from safepoint.jobs.cluster.pods.pod_fields import (
    container_state,
    how_ended,
    is_leaving,
    node_container,
    node_of,
    num_restarts,
)

_MOST_REASON = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSummary:
    """One pod of a job.

    Args:
        name: its name.
        node: the pod's index in the job (torchrun's node rank).
        phase: its phase in Kubernetes: Pending, Running, Succeeded, Failed or Unknown.
        machine: the name of the cluster's node on which it runs; empty before the cluster has chosen one.
        restarts: how often its container has restarted.
        reason: why it does not run; empty if it runs.
        memory: the limit of its memory, as Kubernetes writes it; empty if it has none.
    """

    name: str
    node: int
    phase: str
    machine: str = ""
    restarts: int = 0
    reason: str = ""
    memory: str = ""


def summary_of(pod: Object) -> PodSummary:
    """What pages show of a pod."""
    return PodSummary(
        name=name_of(pod),
        node=node_of(pod),
        phase=str(at(pod, "status", "phase") or "Unknown"),
        machine=str(at(pod, "spec", "nodeName") or ""),
        restarts=num_restarts(pod),
        reason=_reason(pod)[:_MOST_REASON],
        memory=str(at(node_container(pod), "resources", "limits", "memory") or ""),
    )


def _reason(pod: Object) -> str:
    """Why the pod does not run; empty if it runs."""
    if is_leaving(pod):
        return "is being deleted"
    state = container_state(pod)
    if "terminated" in state:
        return how_ended(pod)
    return str(at(state, "waiting", "reason") or "")
