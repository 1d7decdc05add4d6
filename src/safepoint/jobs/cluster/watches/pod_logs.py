"""The output of a job's pods."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from safepoint.errors import NotFoundError, SafepointError, TransientError, UsageError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import Object, at, name_of, number, texts, uid_of
from safepoint.jobs.cluster.pods.pod_fields import container_state, container_status, node_of
from safepoint.jobs.cluster.watches.log_streams import LogStreams, Pauses, Start, StreamEnd, start_of
from safepoint.jobs.model.job_place import LogLine
from safepoint.jobs.model.states import JobState

_log = logging.getLogger("safepoint")
_LOOK_S, _LOOK_AT_LEAST_S = 1.0, 10.0
_WARN_AFTER_S, _GIVE_UP_S = 30.0, 180.0
_USUAL_LINE_BYTES = 128
_MOST_NODES = 50
"""The maximum number of nodes that are followed at the same time."""


Look = Callable[[], tuple[JobState, list[Object]]]
"""Returns the state of a job, and its pods in the order of their nodes."""


def read_pods(api: ClusterApi, look: Look, *, last_bytes: int | None = None) -> Iterator[LogLine]:
    """The output of a job's pods so far, pod after pod.

    Args:
        api: the API of the cluster, in the namespace of the job.
        look: returns the state and the pods of the job.
        last_bytes: for each start of a container, read only about this number of bytes from the end; None for all.

    Raises:
        NotFoundError: there is no such job, or it has no pod.
    """
    state, pods = look()
    if not pods:
        raise _no_pods(state)
    tail = None if last_bytes is None else max(1, last_bytes // _USUAL_LINE_BYTES)
    for pod in pods:
        if _has_started(pod):
            yield from _previous(api, pod, tail)
            yield from _lines(api, pod, tail=tail)


def follow_pods(api: ClusterApi, look: Look) -> Iterator[LogLine]:
    """The output of a job's pods as it grows, until the job has stopped. Only the first 50 nodes are followed.

    If there is no pod yet, the iterator waits for the first pod. After an interruption, it waits for the next pods.
    If a stream ends or fails while its container runs, a new stream is opened for the rest, until the job has
    stopped.

    Raises:
        NotFoundError: there is no such job, or it has stopped and has no pod.
        AccessDeniedError: you may not read the logs of pods.
        TransientError: the API server was out of reach for three minutes.
    """
    follower = _Follower(api, look)
    try:
        yield from follower.lines()
    finally:
        follower.close()


class _Follower:
    def __init__(self, api: ClusterApi, look: Look) -> None:
        self._look = look
        self._streams, self._pauses = LogStreams(api), Pauses(_LOOK_S)
        self._begun: set[Start] = set()
        self._read: set[Start] = set()
        self._reported: set[str] = set()
        """What was reported once: starts of containers, and conditions of the job."""
        self._pods: list[Object] = []
        self._state = JobState.CREATED
        self._answered_s = self._active_s = clock.monotonic_s()

    def close(self) -> None:
        self._streams.close()

    def lines(self) -> Iterator[LogLine]:
        while self._has_looked():
            waiting = self._waiting()
            if not self._state.is_active and not waiting and self._has_ended():
                if not self._begun:
                    raise _no_pods(self._state)
                return
            for pod, start in waiting:
                runs = start == start_of(pod) and "running" in container_state(pod)
                is_due = self._pauses.has_passed(start) or not (runs or self._pauses.failing_s(start))
                if start not in self._streams.open and is_due:
                    self._begun.add(start)
                    self._streams.begin(pod, start)
            yield from self._until_next_look()

    def _has_ended(self) -> bool:
        """Whether no stream is open any more, or the job was last active more than 10 s ago. The stream of a pod on a
        lost node does not end by itself, so the command does not wait for its end."""
        return not self._streams.open or clock.monotonic_s() - self._active_s > _LOOK_AT_LEAST_S

    def _has_looked(self) -> bool:
        """Look at the job; returns whether it still exists."""
        try:
            self._state, pods = self._look()
        except NotFoundError:  # the job was deleted meanwhile
            if self._begun:
                return False
            raise
        except TransientError as error:
            if clock.monotonic_s() - self._answered_s > _GIVE_UP_S:
                raise
            self._report("cluster", "the cluster does not answer; it is asked again for three minutes: %s", error)
            return True
        self._reported.discard("cluster")
        self._answered_s = clock.monotonic_s()
        self._active_s = self._answered_s if self._state.is_active else self._active_s
        self._pods = self._limited(pods)
        return True

    def _report(self, what: str, message: str, *values: object) -> None:
        if what not in self._reported:
            self._reported.add(what)
            _log.warning(message, *values)

    def _limited(self, pods: Sequence[Object]) -> list[Object]:
        nodes = sorted({node_of(pod) for pod in pods})[:_MOST_NODES]
        found = [pod for pod in pods if node_of(pod) in nodes]
        if len(found) < len(pods):
            text = "only the output of the first %d nodes is shown"
            self._report("nodes", text, _MOST_NODES)
        return found

    def _waiting(self) -> list[tuple[Object, Start]]:
        """For each pod whose output was not read to its end: the start of its container that is read next."""
        found: list[tuple[Object, Start]] = []
        for pod in filter(_has_started, self._pods):
            newest = start_of(pod)
            before = Start(newest.pod, newest.restarts - 1)  # the cluster has no earlier output of this pod
            starts = [start for start in (before, newest) if start.restarts >= 0 and start not in self._read]
            if starts:
                found.append((pod, starts[0]))
        return found

    def _until_next_look(self) -> Iterator[LogLine]:
        """Yield lines until the job has to be read again, because a stream has ended or because time has passed."""
        until_s = clock.monotonic_s() + (_LOOK_AT_LEAST_S if self._streams.open else _LOOK_S)
        while (left_s := until_s - clock.monotonic_s()) > 0:
            found = self._streams.next(left_s)
            if isinstance(found, LogLine):
                yield found
            elif found is not None:
                self._note_end(found)
                if found.error is None:
                    return
                until_s = min(until_s, clock.monotonic_s() + _LOOK_S)

    def _note_end(self, ended: StreamEnd) -> None:
        self._pauses.note(ended)
        error = ended.error
        if error is None:
            if ended.is_complete:
                self._read.add(ended.start)
            return
        if not isinstance(error, NotFoundError | UsageError | TransientError):
            raise error
        # The cluster may not keep the output of an earlier start. A pod that is gone, or whose container has never
        # started, will write nothing.
        is_old = any(start_of(pod).pod == ended.start.pod and start_of(pod) != ended.start for pod in self._pods)
        if is_old or not (self._state.is_active or isinstance(error, TransientError)):
            self._read.add(ended.start)
            return
        failing_s = self._pauses.failing_s(ended.start)
        if not self._state.is_active and failing_s > _WARN_AFTER_S:
            raise error
        if failing_s > _WARN_AFTER_S:
            pod = next((name_of(one) for one in self._pods if uid_of(one) == ended.start.pod), None)
            text = "the output of %s could not be read for %.0f s; Safepoint tries until the job stops: %s"
            of = "a pod that is gone" if pod is None else f"pod {pod}"
            self._report(str(ended.start), text, of, failing_s, error)


def _no_pods(state: JobState) -> NotFoundError:
    return NotFoundError(f"the job is {state} and has no pods now; the output of earlier pods was deleted with them")


def _has_started(pod: Object) -> bool:
    status = container_status(pod)
    return bool({"running", "terminated"} & texts(status, "state").keys() or at(status, "restartCount"))


def _previous(api: ClusterApi, pod: Object, tail: int | None) -> Iterator[LogLine]:
    """The output of the container before its last restart, if the cluster still has it."""
    if number(container_status(pod), "restartCount"):
        with contextlib.suppress(SafepointError):
            yield from _lines(api, pod, previous=True, tail=tail)


def _lines(api: ClusterApi, pod: Object, *, previous: bool = False, tail: int | None) -> Iterator[LogLine]:
    container = str(at(container_status(pod), "name") or "node")
    for line in api.log(name_of(pod), container, previous=previous, tail=tail):
        yield LogLine(source=f"node {node_of(pod)}", text=line)
