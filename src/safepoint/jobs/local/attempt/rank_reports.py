"""Reads the reports of a job's ranks in the job's folder: the stream of events and the progress file.

See docs/progress.md. An incomplete last line is ignored.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safepoint.foundation.events.stream import newest_events, read_events
from safepoint.jobs.model.records import JobEvent
from safepoint.progress.record import PROGRESS_NAME, Progress, read_progress

EVENTS = "events.jsonl"
MOST_BYTES = 64 << 20
"""How much of a stream of events is read: about 400,000 events."""


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """The events of all attempts, oldest first."""
    return read_events(folder / EVENTS)


def job_events(folder: Path, *, last_bytes: int = MOST_BYTES) -> list[JobEvent]:
    """The events of all attempts, oldest first, as events of the job.

    Args:
        folder: the folder of the job.
        last_bytes: read only this number of bytes at the end of the stream. A job that saves every minute writes a
            hundred thousand events in a month.
    """
    return [_as_job_event(event) for event in newest_events(folder / EVENTS, last_bytes=last_bytes)]


def progress(folder: Path) -> Progress | None:
    """The progress of the training; None before the first report."""
    return read_progress(folder / PROGRESS_NAME)


def has_begun(folder: Path) -> bool:
    """Whether an attempt has started training. Until then, `--resume` and `--from-scratch` apply."""
    return any(event["event"] == "attempt_started" for event in events(folder))


def newest_step(folder: Path) -> tuple[int | None, bool]:
    """The newest committed step that the ranks have reported, or None; and whether its upload is missing."""
    newest: int | None = None
    saved = stored = -1
    for event in events(folder):
        name, step = event["event"], event.get("step")
        if name == "set_aside":
            newest, saved, stored = None, -1, -1
        elif not isinstance(step, int):
            continue
        elif name == "resumed":
            newest = step
        elif name == "saved" or (name == "interrupted" and event.get("saved")):
            newest = saved = step
        elif name == "uploaded" and not str(event.get("location")).endswith("/final"):
            stored = max(stored, step)
    return newest, saved > stored


def newest_report(folder: Path) -> tuple[int, int] | None:
    """A value that identifies the newest report of progress; None if there is no report.

    When the ranks write a new report, the value changes.
    """
    return mark_of(str(folder / PROGRESS_NAME))


def mark_of(path: str) -> tuple[int, int] | None:
    """A value that changes when the file at `path` changes; None if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _as_job_event(record: dict[str, Any]) -> JobEvent:
    known = {"time", "event", "actor", "cause", "trigger"}
    return JobEvent(
        time=str(record.get("time", "")),
        name=str(record["event"]),
        actor=str(record.get("actor", "rank 0")),
        cause=str(record.get("cause") or record.get("trigger") or record.get("reason") or ""),
        detail={key: value for key, value in record.items() if key not in known},
    )
