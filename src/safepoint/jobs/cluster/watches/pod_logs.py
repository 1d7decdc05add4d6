"""The output of a job's pods."""

import contextlib
from collections.abc import Callable, Iterator

from safepoint.errors import NotFoundError, SafepointError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import Object, at, name_of, number, texts, uid_of
from safepoint.jobs.cluster.pods.pod_fields import container_status, node_of
from safepoint.jobs.model.job_place import LogLine
from safepoint.jobs.model.states import JobState

_LOOK_S = 1.0


Look = Callable[[], tuple[JobState, list[Object]]]
"""Returns the state of a job, and its pods in the order of their nodes."""


def read_pods(api: ClusterApi, look: Look) -> Iterator[LogLine]:
    """The output of a job's pods so far, pod after pod.

    Raises:
        NotFoundError: there is no such job, or it has no pod.
    """
    state, pods = look()
    if not pods:
        raise _no_pods(state)
    for pod in pods:
        if _has_started(pod):
            yield from _previous(api, pod)
            yield from _lines(api, pod, follow=False)


def follow_node(api: ClusterApi, look: Look) -> Iterator[LogLine]:
    """The output of a job's first node as it grows, until the job has stopped.

    If there is no pod yet, the iterator waits for the first pod. After an interruption, it waits for the next pod.

    Raises:
        NotFoundError: there is no such job, or it has stopped and has no pod.
    """
    read: set[tuple[str, int]] = set()
    while True:
        try:
            state, pods = look()
        except NotFoundError:  # the job was deleted meanwhile
            if read:
                return
            raise
        first = [pod for pod in pods if node_of(pod) == node_of(pods[0]) and _has_started(pod)]
        num_read = len(read)
        for pod in first:
            uid, restarts = _container(pod)
            if (uid, restarts) in read:
                continue
            if restarts and (uid, restarts - 1) not in read:
                yield from _previous(api, pod)
            try:
                yield from _lines(api, pod, follow=True)
            except NotFoundError:  # the pod is gone, or has written nothing yet
                if state.is_active:
                    continue
            read.add((uid, restarts))
        if len(read) > num_read:
            continue
        if not state.is_active:
            if not read:
                raise _no_pods(state)
            return
        clock.sleep(_LOOK_S)


def _no_pods(state: JobState) -> NotFoundError:
    return NotFoundError(f"the job is {state} and has no pods now; the output of earlier pods was deleted with them")


def _container(pod: Object) -> tuple[str, int]:
    """What identifies one start of a pod's container: the uid of the pod, and the number of restarts."""
    return uid_of(pod), number(container_status(pod), "restartCount")


def _has_started(pod: Object) -> bool:
    status = container_status(pod)
    return bool({"running", "terminated"} & texts(status, "state").keys() or at(status, "restartCount"))


def _previous(api: ClusterApi, pod: Object) -> Iterator[LogLine]:
    """The output of the container before its last restart, if the cluster still has it."""
    if number(container_status(pod), "restartCount"):
        with contextlib.suppress(SafepointError):
            yield from _lines(api, pod, follow=False, previous=True)


def _lines(api: ClusterApi, pod: Object, *, follow: bool, previous: bool = False) -> Iterator[LogLine]:
    container = str(at(container_status(pod), "name") or "node")
    for line in api.log(name_of(pod), container, follow=follow, previous=previous):
        yield LogLine(source=f"node {node_of(pod)}", text=line)
