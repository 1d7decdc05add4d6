"""Shapes that templates draw as SVG: curves, and the timeline of a job. The shapes have positions and texts, but no
SVG."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from safepoint.foundation import clock
from safepoint.jobs.model.records import AttemptRecord, JobEvent
from safepoint.progress.metric_history import MetricPoint

_MOST_POINTS = 400
_SPARK_SIZE, _CURVE_SIZE = (96, 22), (600, 140)
"""Width and height, as in the attributes `viewBox` of `parts.html`."""
_MARKS: Mapping[str, str] = {
    "saved": "save",
    "snapshot_taken": "snapshot",
    "uploaded": "upload",
    "interrupted": "stop",
    "suspend_requested": "stop",
    "preempt_requested": "preemption",
    "preempted": "preemption",
    "failed": "failure",
    "save_failed": "failure",
    "upload_failed": "failure",
    "checkpoint_rejected": "failure",
    "restarted": "restart",
    "resumed": "resume",
    "resumed_from_memory": "resume",
}
LANES = ("snapshot", "save", "upload", "resume", "restart", "preemption", "stop", "failure")
"""The kinds of marks in a timeline, in the order of its legend."""
_MOST_MARKS = 600
_FIRST_METRICS = ("loss", "eval_loss", "learning_rate", "lr", "steps_per_s", "samples_per_s", "grad_norm")
MOST_CURVES = 24
"""The maximum number of metrics of a job that have curves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A curve in a box.

    Args:
        name: the name of the metric.
        points: `x,y x,y …`, as the attribute `points` of a polyline.
        breaks: the position of each interruption, as an x in `points`.
        lowest: the lowest value.
        highest: the highest value.
        last: the newest value.
        first_step: the step of the first point.
        last_step: the step of the last point.
    """

    name: str
    points: str
    breaks: tuple[float, ...] = ()
    lowest: float = 0.0
    highest: float = 0.0
    last: float = 0.0
    first_step: int = 0
    last_step: int = 0


def sparkline(values: Sequence[float]) -> str:
    """The points of a small curve; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    return _polyline(list(enumerate(values)), *_SPARK_SIZE)


def curve_of(name: str, points: Sequence[MetricPoint], *, most_points: int = _MOST_POINTS) -> Curve | None:
    """The curve of one metric over the steps; None for fewer than two values."""
    found = [(point.step, point.values[name]) for point in points if name in point.values]
    if len(found) < 2:
        return None
    shown = found[:: -(-len(found) // most_points)]
    if shown[-1] != found[-1]:
        shown.append(found[-1])
    values = [value for _, value in found]
    span = (found[-1][0] - found[0][0]) or 1
    breaks = [
        round((after.step - found[0][0]) / span * _CURVE_SIZE[0], 1)
        for before, after in itertools.pairwise(points)
        if before.attempt != after.attempt and found[0][0] <= after.step <= found[-1][0]
    ]
    return Curve(
        name=name,
        points=_polyline(shown, *_CURVE_SIZE),
        breaks=tuple(breaks),
        lowest=min(values),
        highest=max(values),
        last=values[-1],
        first_step=found[0][0],
        last_step=found[-1][0],
    )


def metric_names(points: Sequence[MetricPoint]) -> list[str]:
    """The names of the metrics that have curves, the most important ones first; at most `MOST_CURVES`."""
    names = dict.fromkeys(name for point in points for name in point.values)
    first = [name for name in _FIRST_METRICS if name in names]
    return [*first, *sorted(names.keys() - set(first))][:MOST_CURVES]


def num_metrics(points: Sequence[MetricPoint]) -> int:
    """How many metrics a job has, including metrics without a curve."""
    return len({name for point in points for name in point.values})


def heights(values: Sequence[float]) -> list[float]:
    """Where each value lies between the lowest value, 0.0, and the highest value, 1.0; all 0.0 if all are equal.

    The list is empty if a value is not finite.
    """
    if not values or not all(map(math.isfinite, values)):
        return []
    halves = [value / 2 for value in values]  # the difference of two large floats may be infinite
    low, high = min(halves), max(halves)
    span = (high - low) or 1.0
    return [(half - low) / span for half in halves]


def _polyline(points: Sequence[tuple[int, float]], width: int, height: int) -> str:
    found = heights([value for _, value in points])
    if not found:
        return ""
    begin, end, top = points[0][0], points[-1][0], max(found)
    across = (end - begin) or 1
    return " ".join(
        f"{(x - begin) / across * width:.1f},{1 + (top - share) * (height - 2):.1f}"
        for (x, _), share in zip(points, found, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event in a timeline.

    Args:
        x: its position, from 0 to 1000.
        kind: one of `LANES`.
        time: RFC 3339 UTC.
        step: its step; None if the event has no step.
    """

    x: float
    kind: str
    time: str
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """An attempt in a timeline.

    Args:
        x: the position of its beginning, from 0 to 1000.
        width: its width, in the same unit.
        attempt: the attempt.
    """

    x: float
    width: float
    attempt: AttemptRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The attempts of a job and what happened in them.

    Args:
        begins: its beginning, RFC 3339 UTC.
        ends: its end, RFC 3339 UTC.
        bars: the attempts.
        marks: the events, oldest first.
        kinds: the kinds of marks that occur, in the order of `LANES`.
    """

    begins: str
    ends: str
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    kinds: tuple[str, ...]


def timeline_of(
    attempts: Sequence[AttemptRecord], events: Sequence[JobEvent], *, until_s: float | None = None
) -> Timeline | None:
    """The timeline of a job; None before its first attempt.

    Args:
        attempts: the attempts of the job.
        events: the events of the job.
        until_s: when the bar of a running attempt ends, in seconds since 1970; None for now.
    """
    now_s = clock.wall_s() if until_s is None else until_s
    timed = [(seconds, event) for event in events if (seconds := _seconds(event.time)) is not None]
    starts = [(begin, attempt) for attempt in attempts if (begin := _seconds(attempt.started)) is not None]
    if not starts:
        return None
    ended = [min(_seconds(attempt.ended) or now_s, now_s) for _, attempt in starts]
    begin_s = min(begin for begin, _ in starts)
    end_s = max([*ended, *(seconds for seconds, _ in timed)])
    span_s = max(end_s - begin_s, 1e-3)

    def across(seconds: float) -> float:
        return round(min(998.0, max(0.0, (seconds - begin_s) / span_s * 1000)), 1)

    bars = [
        Bar(x=across(begin), width=max(1.0, across(end) - across(begin)), attempt=attempt)
        for (begin, attempt), end in zip(starts, ended, strict=True)
    ]
    marks = [
        Mark(x=across(seconds), kind=_MARKS[event.name], time=event.time, step=_step(event))
        for seconds, event in timed
        if event.name in _MARKS
    ]
    thinned = marks[:: max(1, -(-len(marks) // _MOST_MARKS))]
    found = {mark.kind for mark in thinned}
    return Timeline(
        begins=clock.as_utc(begin_s),
        ends=clock.as_utc(end_s),
        bars=tuple(bars),
        marks=tuple(thinned),
        kinds=tuple(kind for kind in LANES if kind in found),
    )


def _step(event: JobEvent) -> int | None:
    step = event.detail.get("step")
    return step if type(step) is int else None


def _seconds(time: str | None) -> float | None:
    try:
        return None if time is None else clock.parse_utc(time)
    except ValueError:
        return None
