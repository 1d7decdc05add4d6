"""Checks whether a save fits in the grace period.

A save is expected to take as long as the longest of the last saves. If there are no earlier saves, its duration is
estimated from the size of a checkpoint and the speed of the disk.
"""

import contextlib
import math
import os
from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.doctor.finding import Finding, Status
from safepoint.foundation.bounded_json import parse_object
from safepoint.foundation.shared_folders.opening import open_regular
from safepoint.foundation.units import format_bytes, format_duration
from safepoint.progress.record import read_progress

_TAIL_BYTES = 256 << 10
_NUM_SAVES = 5
_MOST_S = 7 * 86_400.0
"""A longer duration is ignored as invalid."""
_MOST_BYTES = 1 << 60
"""A larger checkpoint is ignored as invalid."""
_FIXED_S = 1.0
"""The time that a save takes besides the write: for the vote, and for the processes to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Values from the records of a run in its output folder; None for a missing value.

    Args:
        state_bytes: the size of the newest checkpoint.
        save_s: the duration of the longest of the last saves.
        step_s: the duration of a step in the last attempt, with its share of saves and evaluations.
    """

    state_bytes: int | None = None
    save_s: float | None = None
    step_s: float | None = None


def look_at_history(folder: Path) -> History:
    """Read the records of a folder. If there are no records, all values are None."""
    output = OutputFolder(folder)
    try:
        newest = next((manifest for _, manifest in output.manifests()), None)
    except OSError:
        newest = None
    progress = read_progress(output.progress)
    step_s = None if progress is None or progress.step_s is None else progress.step_s + progress.pause_s
    return History(
        state_bytes=None if newest is None or newest.size_bytes > _MOST_BYTES else newest.size_bytes,
        save_s=max(_durations_of_saves(output.events)[-_NUM_SAVES:], default=None),
        step_s=step_s if step_s is not None and 0 <= step_s <= _MOST_S else None,
    )


def _durations_of_saves(events: Path) -> list[float]:
    """The durations of the saves in the last part of the file of events, oldest first. Invalid lines are ignored."""
    try:
        with open_regular(events) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).splitlines()
    except OSError:
        return []
    durations: list[float] = []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
            event = parse_object(line)
            if event.get("event") == "saved":
                duration_s = float(event["duration_s"])
                durations += [duration_s] if 0 <= duration_s <= _MOST_S else []
    return durations


def judge_grace(history: History, *, grace_s: float, margin_s: float, bytes_per_s: float | None) -> Finding | None:
    """Whether a save fits in the grace period; None if the duration of a save is unknown.

    Args:
        history: the records of the output folder.
        grace_s: the grace period.
        margin_s: how long before the end of the grace period all processes must have exited.
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
    check, why = (
        "grace period",
        "a save that takes longer is lost, and a resume repeats the steps since the last checkpoint",
    )
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
            fix=f"set the platform's grace period and --grace to at least {math.ceil(needed_s)} s, or use a "
            "faster disk",
        )
    if history.step_s is not None and save_s + history.step_s > left_s:
        return Finding(
            check=check,
            status=Status.WARNING,
            found=found,
            why="a step that runs when the signal arrives may end too late for a save",
            fix="use --snapshot-steps 1: the state is copied to memory after each step, and the newest copy can be "
            "saved in time",
        )
    return Finding(check=check, status=Status.OK, found=found, why=why)
