"""Logs warnings about the pods that a command waits for. A pod on a node that is gone never ends by itself."""

import logging
from collections.abc import Iterable

from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import Object, at, name_of
from safepoint.jobs.cluster.pods.pod_fields import JOBSET_LABEL, own_pods

_log = logging.getLogger("safepoint")
_SAY_AFTER_S = 30.0
_OVERDUE_S = 30.0
"""The time that the kubelet may need after the grace period of a pod to report that the pod has ended."""


class RemainingPods:
    """Logs warnings about pods of a job that have not ended half a minute after a command began to wait for them.

    Args:
        api: the API of the cluster, in the namespace of the job.
        job: the name of the job.
    """

    def __init__(self, api: ClusterApi, job: str) -> None:
        self._api, self._job = api, job
        self._begun_s = clock.monotonic_s()
        self._named: set[tuple[str, bool]] = set()

    def look(self, pods: Iterable[Object] | None = None) -> None:
        """Log a warning for each pod that remains: once during its grace period, and once afterwards.

        Args:
            pods: the pods of the job. If None, this method reads them when it needs them.
        """
        if clock.monotonic_s() - self._begun_s < _SAY_AFTER_S:
            return
        if pods is None:
            pods = own_pods(self._job, self._api.objects("pods", labels=f"{JOBSET_LABEL}={self._job}"))
        for pod in pods:
            name, node = name_of(pod), str(at(pod, "spec", "nodeName") or "")
            is_overdue = _ends_at_s(pod) < self._api.now_s() - _OVERDUE_S
            if not node or at(pod, "status", "phase") in {"Succeeded", "Failed"} or (name, is_overdue) in self._named:
                continue
            self._named.add((name, is_overdue))
            if is_overdue:
                _log.warning(
                    "job %s still waits for pod %s on node %s to end, although the pod's grace period is over; if "
                    "this node is switched off or gone, `kubectl delete pod %s -n %s --force` removes the pod",
                    self._job,
                    name,
                    node,
                    name,
                    self._api.namespace,
                )
            else:
                _log.warning("job %s still waits for pod %s on node %s to end", self._job, name, node)


def _ends_at_s(pod: Object) -> float:
    """When the grace period of a pod ends; infinite if the pod is not being deleted."""
    try:  # Kubernetes writes the end of the grace period, not the time of the deletion
        return clock.parse_utc(str(at(pod, "metadata", "deletionTimestamp")))
    except ValueError:
        return float("inf")
