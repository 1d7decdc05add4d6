"""Reads the output of each container in a thread. A new stream continues where the last stream of the container
ended.

The API server ends a stream without an error when its connection to the node breaks. So the end of a stream does not
mean that the container has ended.
"""

import math
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from safepoint.errors import SafepointError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import Object, at, name_of, number, uid_of
from safepoint.jobs.cluster.pods.pod_fields import container_state, container_status, node_of
from safepoint.jobs.model.job_place import LogLine

_SECONDS = len("2026-01-01T00:00:00")
_MOST_WAITING = 256
"""The maximum number of lines that wait for the reader. The limit is needed because a pod may print lines of 1 MiB
faster than they are shown."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a pod's container: the uid of the pod, and the number of restarts of the container before this
    start."""

    pod: str
    restarts: int


def start_of(pod: Object) -> Start:
    """The newest start of the pod's container."""
    return Start(uid_of(pod), number(container_status(pod), "restartCount"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """The end of a stream.

    Args:
        start: a start of the container. The stream delivered output of this start only.
        is_complete: whether the stream delivered all output of this start, so that no more output can follow.
        error: why the stream ended early; None if it ended without an error.
    """

    start: Start
    is_complete: bool
    error: SafepointError | None = None


class Position:
    """How far the output of a container was read: the time of the last line, the number of lines with this time, and
    the number of characters of the last line that were read."""

    def __init__(self) -> None:
        self.time = ""
        self._num_at_time = 0
        self._num_read = 0

    def new_lines(self, lines: Iterator[str]) -> Iterator[str]:
        """Yield the texts of the lines that were not read before. Each line begins with its time and a space.

        The API server accepts the start time of a stream only in whole seconds. So a new stream repeats all lines of
        the second in which the last line was written. A very long line arrives in several parts, and only the first
        part begins with a time. If the last stream ended within a line, only the rest of this line is new.
        """
        before, num_before, num_read = self.time, self._num_at_time, self._num_read
        num_old: float = 0  # the number of characters to skip in the rest of the current line: they were read before
        for line in lines:
            time, space, text = line.partition(" ")
            is_new = False
            if not space or not _is_time(time):
                text = line
            elif before and _in_order(time) <= _in_order(before) and (time != before or num_before > 0):
                num_before -= time == before
                num_old = num_read if time == before and num_before == 0 else math.inf
            else:
                self._num_at_time = self._num_at_time + 1 if time == self.time else 1
                self.time, self._num_read, num_old, is_new = time, 0, 0, True
            num_skipped = int(min(num_old, len(text)))
            num_old -= num_skipped
            self._num_read += len(text) - num_skipped
            if is_new or num_skipped < len(text):
                yield text[num_skipped:]


def _is_time(text: str) -> bool:
    return len(text) > _SECONDS and text[:4].isdecimal() and text[4] == "-" and "T" in text


def _in_order(time: str) -> tuple[str, str]:
    """A key that sorts times, which may have fractions of seconds of different lengths."""
    return time[:_SECONDS], time[_SECONDS:].lstrip(".").partition("Z")[0].partition("+")[0].ljust(9, "0")


class LogStreams:
    """The streams of the containers of a job. Each stream has a thread.

    Args:
        api: the API of the cluster, in the namespace of the job.
    """

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._arrived: queue.Queue[LogLine | StreamEnd] = queue.Queue(maxsize=_MOST_WAITING)
        self._positions: dict[Start, Position] = {}
        self._is_over = threading.Event()
        self.open: set[Start] = set()
        """The starts whose streams are open."""

    def begin(self, pod: Object, start: Start) -> None:
        """Open a stream of the output of a container. The stream begins where the last stream of this output
        ended."""
        self.open.add(start)
        threading.Thread(target=self._read, args=(pod, start), name="safepoint-logs", daemon=True).start()

    def next(self, timeout_s: float) -> LogLine | StreamEnd | None:
        """The next line or end; None if there is none within `timeout_s`."""
        try:
            found = self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(found, StreamEnd):
            self.open.discard(found.start)
        return found

    def close(self) -> None:
        """Tell the threads to end. A thread that is waiting for a line from the cluster ends when a new line arrives,
        or when the API is closed."""
        self._is_over.set()

    def _read(self, pod: Object, start: Start) -> None:
        position = self._positions.setdefault(start, Position())
        is_previous = start != start_of(pod)
        is_complete = is_previous or "terminated" in container_state(pod)
        error = None
        try:
            lines = self._api.log(
                name_of(pod),
                str(at(container_status(pod), "name") or "node"),
                follow=not is_previous,
                previous=is_previous,
                since=position.time,
            )
            for text in position.new_lines(lines):
                self._put(LogLine(source=f"node {node_of(pod)}", text=text))
                if self._is_over.is_set():
                    return
        except SafepointError as failure:
            error = failure
        self._put(StreamEnd(start=start, is_complete=is_complete and error is None, error=error))

    def _put(self, item: LogLine | StreamEnd) -> None:
        while not self._is_over.is_set():
            try:
                self._arrived.put(item, timeout=1.0)
            except queue.Full:
                continue
            return


class Pauses:
    """Records when a stream that has ended early may be opened again, and for how long the streams have failed.

    Args:
        pause_s: seconds between the end of a stream and the next stream of the same container.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._next_s: dict[Start, float] = {}
        self._failing_s: dict[Start, float] = {}

    def note(self, ended: StreamEnd) -> None:
        """Note the end of a stream."""
        now_s = clock.monotonic_s()
        self._next_s[ended.start] = now_s + self._pause_s
        if ended.error is None:
            self._failing_s.pop(ended.start, None)
        else:
            self._failing_s.setdefault(ended.start, now_s)

    def has_passed(self, start: Start) -> bool:
        """Whether the pause after the last stream has passed."""
        return clock.monotonic_s() >= self._next_s.get(start, 0.0)

    def failing_s(self, start: Start) -> float:
        """For how many seconds the streams have failed; 0 if the last stream did not fail."""
        return clock.monotonic_s() - self._failing_s[start] if start in self._failing_s else 0.0
