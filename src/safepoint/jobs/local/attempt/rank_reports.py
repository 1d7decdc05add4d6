"""What a job's ranks have told: the stream of events and the file of progress in the job's folder.

Both are written by the training (docs/progress.md). A line that is cut, as the last one may be, is left for later.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safepoint.progress.record import PROGRESS_NAME, Progress, read_progress

EVENTS = "events.jsonl"


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """The events of all attempts, oldest first."""
    with contextlib.suppress(FileNotFoundError), (folder / EVENTS).open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                with contextlib.suppress(ValueError, RecursionError):
                    event = json.loads(line)
                    if isinstance(event, dict) and "event" in event:
                        yield event


def progress(folder: Path) -> Progress | None:
    """Where the training is, or was when it ended; None before it has told."""
    return read_progress(folder / PROGRESS_NAME)


def has_begun(folder: Path) -> bool:
    """Whether ranks have ever agreed on where to begin; until then, what was asked for is still to be done."""
    return any(event["event"] == "attempt_started" for event in events(folder))


def safe_step(folder: Path) -> int | None:
    """The newest step that is committed, as far as the ranks have told."""
    step: int | None = None
    for event in events(folder):
        if event["event"] in {"saved", "resumed"} or (event["event"] == "interrupted" and event.get("saved")):
            told = event.get("step")
            step = told if isinstance(told, int) else step
        elif event["event"] == "set_aside":
            step = None
    return step


def step_not_stored(folder: Path) -> int | None:
    """The newest step that was saved, unless it has arrived in the object store; None when nothing was saved."""
    saved = stored = -1
    for event in events(folder):
        name, step = event["event"], event.get("step")
        if name == "set_aside":
            saved = stored = -1
        elif not isinstance(step, int):
            continue
        elif name == "saved" or (name == "interrupted" and event.get("saved")):
            saved = step
        elif name == "uploaded" and not str(event.get("location")).endswith("/final"):
            stored = max(stored, step)
    return saved if saved > stored else None


def was_told_since(folder: Path, wall_s: float) -> bool:
    """Whether the ranks have told their progress since a moment of the wall clock."""
    try:
        return (folder / PROGRESS_NAME).stat().st_mtime >= wall_s
    except OSError:
        return False
