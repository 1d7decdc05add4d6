"""The output of a job's pods."""

import contextlib
from collections.abc import Iterator, Sequence

from safepoint.errors import SafepointError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import Object, at, name_of, texts
from safepoint.jobs.cluster.state import container_status, node_of
from safepoint.jobs.model.job_place import LogLine

_LOOK_S = 1.0


def read_pods(api: ClusterApi, pods: Sequence[Object], *, follow: bool) -> Iterator[LogLine]:
    """The output of the pods, one pod after the other; with `follow`, only that of the first pod, as it grows."""
    for pod in pods[:1] if follow else pods:
        if not _has_started(api, pod, follow=follow):
            continue
        container = str(at(container_status(pod), "name") or "node")
        if at(container_status(pod), "restartCount"):
            with contextlib.suppress(SafepointError):  # the output before the restart may be deleted
                for line in api.log(name_of(pod), container, previous=True):
                    yield LogLine(source=f"node {node_of(pod)}", text=line)
        for line in api.log(name_of(pod), container, follow=follow):
            yield LogLine(source=f"node {node_of(pod)}", text=line)


def _has_started(api: ClusterApi, pod: Object, *, follow: bool) -> bool:
    """Whether the pod's container has started. With `follow`, wait until it has, or until the pod is deleted."""
    while True:
        state = texts(container_status(pod), "state")
        if "running" in state or "terminated" in state or at(container_status(pod), "restartCount"):
            return True
        found = api.find("pods", name_of(pod)) if follow else None
        if found is None:
            return False
        pod = found
        clock.sleep(_LOOK_S)
