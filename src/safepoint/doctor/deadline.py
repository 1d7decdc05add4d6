"""Whether a save fits into the grace period, by earlier saves or by the size of a checkpoint."""

import json
import math
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.doctor.finding import Finding, Status
from safepoint.foundation.units import format_bytes, format_duration

_TAIL_BYTES = 256 << 10
_NUM_SAVES = 5
_FIXED_S = 1.0
"""The time of a save without its bytes: the vote, and the end of the processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The records of a run in its output folder; None for a missing value.

    Args:
        state_bytes: the size of the newest checkpoint.
        save_s: the longest of the last saves.
        step_s: how long a step took in the last attempt, saves and evaluations included.
    """

    state_bytes: int | None = None
    save_s: float | None = None
    step_s: float | None = None


def look_at_history(folder: Path) -> History:
    """Read the records of a folder; without any, all values are None."""
    output = OutputFolder(folder)
    try:
        manifests = output.manifests()
    except OSError:
        manifests = []
    size_bytes = sum(entry.size_bytes for entry in manifests[0][1].files) if manifests else None
    events = _events(output.events)
    durations = [event.get("duration_s") for event in events if event.get("event") == "saved"][-_NUM_SAVES:]
    known = [float(duration) for duration in durations if isinstance(duration, int | float)]
    return History(
        state_bytes=size_bytes,
        save_s=max(known) if known else None,
        step_s=_step_s(events, _record(output.progress)),
    )


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).splitlines()
    except OSError:
        return []
    return [record for line in lines if (record := _parsed(line))]


def _record(path: Path) -> dict[str, Any]:
    try:
        return _parsed(path.read_bytes())
    except OSError:
        return {}


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        record: Any = json.loads(data)
    except ValueError:
        return {}
    return cast("dict[str, Any]", record) if isinstance(record, dict) else {}


def _step_s(events: list[dict[str, Any]], progress: dict[str, Any]) -> float | None:
    """From two records of the last attempt that have a step."""
    points: list[tuple[float, int]] = []
    for record in [*events, progress]:
        if record.get("event") == "attempt_started":
            points = []
        try:
            if record is progress or record.get("event") == "saved":
                points.append((datetime.fromisoformat(record["time"]).timestamp(), int(record["step"])))
        except (KeyError, TypeError, ValueError):
            continue
    if len(points) < 2:
        return None
    (begun_s, first), (ended_s, last) = points[0], points[-1]
    return (ended_s - begun_s) / (last - first) if last > first and ended_s > begun_s else None


def judge_grace(history: History, *, grace_s: float, margin_s: float, bytes_per_s: float | None) -> Finding | None:
    """Whether a save fits; None when its duration is unknown.

    Args:
        history: of the output folder.
        grace_s: the grace period.
        margin_s: how long before its end the processes must have exited.
        bytes_per_s: the speed of the output folder's disk.
    """
    if history.save_s is not None:
        save_s, how = history.save_s, f"the last saves took up to {format_duration(history.save_s)}"
    elif history.state_bytes is not None and bytes_per_s:
        save_s = _FIXED_S + history.state_bytes / bytes_per_s
        how = f"a save of {format_bytes(history.state_bytes)} takes about {format_duration(save_s)} on this disk"
    else:
        return None
    left_s = grace_s - margin_s
    check, why = "grace period", "what is not saved before it ends is lost; a resume starts from the last checkpoint"
    found = f"{format_duration(grace_s)}, of which {format_duration(left_s)} can be used; {how}"
    if history.step_s is not None:
        found += f", a step about {format_duration(history.step_s)}"
    if save_s > left_s:
        needed_s = save_s + margin_s + (history.step_s or 0)
        return Finding(
            check=check,
            status=Status.FAILURE,
            found=found,
            why=why,
            fix=f"let the platform grant {math.ceil(needed_s)} s or more and set --grace to it, or write to a "
            "faster disk",
        )
    if history.step_s is not None and save_s + history.step_s > left_s:
        return Finding(
            check=check,
            status=Status.WARNING,
            found=found,
            why="the step that runs when the signal arrives may end too late to be saved",
            fix="use --snapshot-steps 1: every step is kept in memory, and the newest one is saved in time",
        )
    return Finding(check=check, status=Status.OK, found=found, why=why)
