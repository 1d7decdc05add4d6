"""Further details of one job: the last lines of a failed job, the position of a waiting job in its queue.

Only `status`, and the page of a job in the dashboard, show them, because each detail needs requests of its own. If a
request fails, or is not allowed, the detail is missing.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from safepoint.errors import SafepointError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import Object, at, items, name_of, owners_of
from safepoint.jobs.cluster.pods.pod_fields import NODE, container_status, first_failed, training_pods
from safepoint.jobs.cluster.records.logged_progress import progress_in
from safepoint.jobs.cluster.state import ClusterJob
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import Progress

_MOST_LINES, _MOST_LETTERS = 10, 400
_MOST_PROGRESS_LINES = 200
_VISIBILITY = "/apis/visibility.kueue.x-k8s.io"
_WAITING = {JobState.QUEUED, JobState.PREEMPTED, JobState.INADMISSIBLE}


def details_of(api: ClusterApi, job: ClusterJob, pods_of: Callable[[str], Sequence[Object]]) -> dict[str, Any]:
    """The details of a job.

    Args:
        api: the API of the cluster, in the namespace of the job.
        job: the job.
        pods_of: returns the pods of a job, by its name.

    Returns:
        `last_lines`: the last lines of the pod that failed first, at most ten; empty unless the job has failed.
        `queue_place`: the position of the job in its LocalQueue, from 1; None if the job does not wait, or if the
        position is unknown.
    """
    lines: list[str] = []
    place: int | None = None
    with contextlib.suppress(SafepointError):
        if job.state is JobState.FAILED:
            lines = _last_lines(api, pods_of(job.name))
        elif job.state in _WAITING and job.queue is not None:
            place = _place_in_queue(api, job.queue, job.uid)
    return {"last_lines": lines, "queue_place": place}


def progress_in_log(api: ClusterApi, job: ClusterJob) -> Progress | None:
    """The progress that the output of a job's first pod states. None if there is no pod, if its output states no
    progress, or if the output cannot be read."""
    if not job.pods:
        return None
    with contextlib.suppress(SafepointError):
        return progress_in(api.log(job.pods[0].name, NODE, tail=_MOST_PROGRESS_LINES, since=""))
    return None


def _last_lines(api: ClusterApi, pods: Sequence[Object]) -> list[str]:
    pod = first_failed(pods) or next(iter(training_pods(pods)), None)
    if pod is None:
        return []
    container = str(at(container_status(pod), "name") or "node")
    found = list(api.log(name_of(pod), container, tail=_MOST_LINES))
    # A progress bar overwrites its line with carriage returns. A terminal would show only the last text.
    return [line.rstrip("\r").rpartition("\r")[2][:_MOST_LETTERS] for line in found[-_MOST_LINES:]]


def _place_in_queue(api: ClusterApi, queue: str, uid: str) -> int | None:
    """The position in the queue, from Kueue's visibility server. Not every cluster has this server."""
    api.check_name(queue)
    version = at(api.read_once(_VISIBILITY), "preferredVersion", "version")
    if not isinstance(version, str):
        return None
    api.check_name(version)  # it comes from a server, and must not lead to another path
    path = f"{_VISIBILITY}/{version}/namespaces/{api.namespace}/localqueues/{queue}/pendingworkloads"
    listed = items(api.read_once(path), "items")
    place = next((at(item, "positionInLocalQueue") for item in listed if uid in owners_of(item)), None)
    return place + 1 if isinstance(place, int) else None
