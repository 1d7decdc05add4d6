"""The metrics of a run over its steps: a file of JSON lines beside the progress (docs/progress.md).

The first rank appends a point whenever it writes its progress and has reached another step, at most twice a second.
Promises: the file holds at most `MOST_POINTS` points. When it is full, every second point is deleted, and new points
have twice the distance, so that the points stay evenly spaced over the steps. A failed write loses points, and the
training continues. Reading executes no code. This module does not import torch.
"""

import contextlib
import json
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from safepoint.errors import without_credentials
from safepoint.foundation.bounded_json import parse_object
from safepoint.foundation.events.stream import append_lines
from safepoint.foundation.files import write_atomic
from safepoint.foundation.shared_folders.opening import open_regular
from safepoint.progress.record import Progress

METRICS_NAME = "metrics.jsonl"
MOST_POINTS = 4096
_MAX_LINE_BYTES = 1 << 16
_MAX_BYTES = 64 << 20
_MOST_READ = 2 * MOST_POINTS
"""The limit of lines that are parsed, counted from the end of the file: another program may have written more points
than a run writes."""
_MOST_VALUES = 4096
"""The limit of JSON values in a line. A line with more is left out."""
_MOST_VALUES_READ = 1 << 20
"""The limit of the metrics of all points together, counted from the end of the file. A hostile file would otherwise
take many times its size in memory."""
_PACE = ("steps_per_s", "samples_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """What was measured at one step.

    Args:
        time: when the point was written, RFC 3339 UTC.
        attempt: which start of the run, from 1.
        step: optimizer steps done.
        values: by name: `loss`, `steps_per_s`, `samples_per_s`, and the metrics of the training and of evaluations.
            A value that is not finite is left out.
    """

    time: str
    attempt: int
    step: int
    values: Mapping[str, float] = field(default_factory=dict[str, float])

    def to_line(self) -> bytes:
        """The point as a line of JSON."""
        record = {"time": self.time, "attempt": self.attempt, "step": self.step, "values": dict(self.values)}
        return (without_credentials(json.dumps(record, allow_nan=False)) + "\n").encode()


def point_of(progress: Progress) -> MetricPoint:
    """The point of a progress report."""
    found = {"loss": progress.loss, **{name: getattr(progress, name) for name in _PACE}}
    found |= {**progress.train_metrics, **progress.eval_metrics}
    values = {name: value for name, value in found.items() if value is not None and math.isfinite(value)}
    return MetricPoint(time=progress.time, attempt=progress.attempt, step=progress.step, values=values)


def with_report(seen: Sequence[MetricPoint], progress: Progress) -> list[MetricPoint]:
    """`seen`, and the point of a report if the point has values and its step is new; at most `MOST_POINTS` points."""
    point = point_of(progress)
    is_new = not seen or (point.attempt, point.step) != (seen[-1].attempt, seen[-1].step)
    return [*seen, *([point] if point.values and is_new else [])][-MOST_POINTS:]


class MetricHistory:
    """Appends points to the files of one run; only the thread that writes the progress uses it.

    Args:
        paths: the files; their points of earlier attempts stay.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._last: tuple[int, int] = (0, -1)
        self._gap = 1
        self._num_points: int | None = None

    def add(self, progress: Progress) -> None:
        """Append the point of this report, if it has values and its step is far enough from the last point."""
        point = point_of(progress)
        attempt, step = self._last
        is_near = point.attempt == attempt and point.step < step + self._gap
        if not self._paths or point.step <= 0 or not point.values or is_near:
            return
        if self._num_points is None:
            self._continue(read_points(self._paths[0]), point.step)
        for path in self._paths:
            append_lines(path, point.to_line())
        self._last = point.attempt, point.step
        self._num_points = (self._num_points or 0) + 1
        if self._num_points > MOST_POINTS:
            self._thin()

    def _continue(self, before: Sequence[MetricPoint], step: int) -> None:
        """Take over the points of earlier attempts, and their distance if they were thinned.

        Args:
            before: the points in the file. Another program may have written the file, so a step above `step` counts
                as `step`.
            step: the step of the next point.
        """
        self._num_points = len(before)
        if len(before) >= MOST_POINTS // 2:
            first, last = (min(max(0, point.step), step) for point in (before[0], before[-1]))
            self._gap = max(1, (last - first) // len(before))

    def _thin(self) -> None:
        for path in self._paths:
            kept = read_points(path)[::2]
            with contextlib.suppress(OSError):
                write_atomic(path, b"".join(point.to_line() for point in kept), durable=False)
            self._num_points = len(kept)
        self._gap *= 2


class MetricReader:
    """Reads a file again and again. Lines that were read before are not parsed again.

    Args:
        path: the file. If it does not exist, there are no points.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] = (0, 0)
        self._offset = 0
        self._points: list[MetricPoint] = []

    def read(self) -> list[MetricPoint]:
        """All points, in the order in which they were written; lines that are not points are left out."""
        with contextlib.suppress(OSError), open_regular(self._path) as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self._file or status.st_size < self._offset:  # the file was thinned or replaced
                self._file, self._offset, self._points = identity, 0, []
            self._offset = max(self._offset, status.st_size - _MAX_BYTES)
            file.seek(self._offset)
            added, self._offset = _lines(file, status.st_size)
            self._points = _newest([*self._points, *added][-_MOST_READ:])
            return self._points
        return []


def read_points(path: Path, *, last_bytes: int | None = None) -> list[MetricPoint]:
    """The points in the file, in the order in which they were written; lines that are not points are left out.

    Args:
        path: the file. If it does not exist, there are no points.
        last_bytes: read only this many bytes at the end of the file; None for 64 MiB. More than 64 MiB are never
            read, because a file in an output folder may be of any size.
    """
    with contextlib.suppress(OSError), open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        file.seek(max(0, size_bytes - min(_MAX_BYTES, size_bytes if last_bytes is None else last_bytes)))
        return _lines(file, size_bytes)[0]
    return []


def _lines(file: BinaryIO, end: int) -> tuple[list[MetricPoint], int]:
    """The points after the file's position, and the offset after them. An incomplete last line is not read."""
    newest = deque[bytes](maxlen=_MOST_READ)
    offset = file.tell()
    while offset < end and (line := file.readline(_MAX_LINE_BYTES)):
        if len(line) < _MAX_LINE_BYTES and not line.endswith(b"\n"):
            break
        offset += len(line)
        newest.append(line)
    found: list[MetricPoint] = []
    names: dict[str, str] = {}
    num_values = 0
    while newest and num_values <= _MOST_VALUES_READ:
        with contextlib.suppress(ValueError):
            found.append(_parse(newest.pop(), names))
            num_values += len(found[-1].values)
    return _newest(found[::-1]), offset


def _newest(points: list[MetricPoint]) -> list[MetricPoint]:
    """The last of the points, which together have at most `_MOST_VALUES_READ` metrics."""
    num_values = 0
    for index in range(len(points) - 1, -1, -1):
        num_values += len(points[index].values)
        if num_values > _MOST_VALUES_READ:
            return points[index + 1 :]
    return points


def current_points(points: Sequence[MetricPoint]) -> list[MetricPoint]:
    """The points of the training as it is now, by step.

    An attempt that resumes from an older step repeats steps. The points that earlier attempts wrote at or after its
    first step are left out.
    """
    kept: list[MetricPoint] = []
    attempt = None
    for point in points:
        # If the attempt is the same, the ranks were restarted, and repeat steps.
        if kept and (point.attempt != attempt or point.step <= kept[-1].step):
            while kept and kept[-1].step >= point.step:
                kept.pop()
        kept.append(point)
        attempt = point.attempt
    return kept


def _parse(line: bytes, names: dict[str, str]) -> MetricPoint:
    """The point in a line.

    Args:
        line: a line of the file.
        names: the names of metrics so far, so that each name takes memory once.
    """
    record = parse_object(line, max_bytes=_MAX_LINE_BYTES, max_values=_MOST_VALUES)
    time, attempt, step, values = (record.get(key) for key in ("time", "attempt", "step", "values"))
    if not isinstance(time, str) or type(attempt) is not int or type(step) is not int or not isinstance(values, dict):
        raise ValueError("it is not a point")
    numbers = {
        names.setdefault(name, name): float(value)
        for name, value in cast("dict[str, Any]", values).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    return MetricPoint(time=time, attempt=attempt, step=step, values=numbers)
