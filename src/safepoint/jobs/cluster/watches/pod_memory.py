"""How much memory the pods of a job use now, from the metrics API of the cluster. Not every cluster has this API.

Promises: at most one request for a job is sent in 15 seconds, and fewer after a failure. If the API does not answer,
only the caller that has sent the request waits for it, for one second.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any

from safepoint.errors import AccessDeniedError, NotFoundError, SafepointError
from safepoint.foundation import clock
from safepoint.foundation.bounded import Work
from safepoint.foundation.quantities import parse_bytes
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import at, items, name_of
from safepoint.jobs.cluster.pods.pod_fields import JOBSET_LABEL, NODE
from safepoint.jobs.cluster.state import ClusterJob

_PATH = "/apis/metrics.k8s.io/v1beta1/namespaces/{}/pods"
_WAIT_S = 1.0
_AGAIN_S, _AFTER_FAILURE_S = 15.0, 120.0
_MOST_JOBS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """How much memory pods use.

    Args:
        pods: the name of each pod → the memory of its container that trains, in bytes. Pods without a figure are
            left out.
        missing: why there are no figures; empty if there are some.
    """

    pods: dict[str, int] = field(default_factory=dict[str, int])
    missing: str = ""

    def to_document(self) -> dict[str, Any]:
        """As JSON values."""
        return {"pods": dict(self.pods), "missing": self.missing}


class PodMemory:
    """The memory of the pods of one namespace.

    Args:
        api: the API of the cluster, in this namespace.
    """

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._found: dict[str, tuple[float | None, Work[MemoryUse]]] = {}
        """For each job: when to send the next request, and the last request. The time is None while the answer to the
        last request was not used."""

    def of(self, job: ClusterJob) -> MemoryUse:
        """The memory of a job's pods. Empty, without a reason, if the job has no pods that run."""
        names = {pod.name for pod in job.pods if pod.phase == "Running"}
        if not names or not job.state.holds_slots:
            return MemoryUse()
        again_s, work = self._found.pop(job.name, (None, None))
        is_new = work is None or (again_s is not None and clock.monotonic_s() >= again_s)
        if work is None or is_new:
            again_s, work = None, Work(lambda: self._read(job.name))
        found = work.result(_WAIT_S if is_new else 0.0)
        if found is None:
            found = MemoryUse(missing="the metrics API of the cluster has not answered yet")
        elif again_s is None:
            again_s = clock.monotonic_s() + (_AFTER_FAILURE_S if found.missing else _AGAIN_S)
        self._found[job.name] = (again_s, work)
        if len(self._found) > _MOST_JOBS:
            del self._found[next(iter(self._found))]
        own = {name: num_bytes for name, num_bytes in found.pods.items() if name in names}
        if own or found.missing:
            return MemoryUse(pods=own, missing=found.missing)
        return MemoryUse(missing="the metrics API of the cluster has no figures of these pods yet")

    def _read(self, name: str) -> MemoryUse:
        self._api.check_name(name)
        try:
            answer = self._api.read_once(
                _PATH.format(self._api.namespace), query={"labelSelector": f"{JOBSET_LABEL}={name}"}
            )
        except NotFoundError:
            return MemoryUse(missing="the cluster has no metrics API (metrics.k8s.io), which metrics-server provides")
        except AccessDeniedError:
            return MemoryUse(missing="you are not allowed to list the metrics of pods (pods.metrics.k8s.io)")
        except SafepointError as error:
            return MemoryUse(missing=f"the metrics API of the cluster cannot be read: {error.message}")
        found: dict[str, int] = {}
        for pod in items(answer, "items"):
            usage = [at(one, "usage", "memory") for one in items(pod, "containers") if at(one, "name") == NODE]
            with contextlib.suppress(ValueError):
                found |= {name_of(pod): parse_bytes(str(text)[:40]) for text in usage if text is not None}
        return MemoryUse(pods=found)
