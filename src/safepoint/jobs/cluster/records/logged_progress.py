"""The progress of a job in the output of its first pod, for clusters to which pods cannot post their progress.

The progress is guessed from texts for people: the bar and the metrics that the Trainer of transformers prints, and
Safepoint's own lines. A script may switch these texts off, or print other texts. This module sends no requests.
"""

import ast
import re
from collections.abc import Iterable
from typing import Any, cast

from safepoint.jobs.cluster.records.posted_progress import number_in
from safepoint.progress.record import Progress, State

_BAR = re.compile(r" *\d+%\|[^|]*\| *(?P<step>\d{1,15})/(?P<total>\d{1,15}) \[", re.ASCII)
_SAVED = re.compile(r"safepoint: saved step (\d{1,15}) ", re.ASCII)
_ATTEMPT = re.compile(r"safepoint: training on .*, attempt (\d{1,9})", re.ASCII)
_FINISHED = re.compile(r"safepoint: training finished at step (\d{1,15})", re.ASCII)
_MOST_LETTERS = 4096


def progress_in(lines: Iterable[str]) -> Progress | None:
    """The progress that the last lines of a job's first pod state; None if they state no step.

    Args:
        lines: the lines, oldest first. Each begins with the time at which it was written (RFC 3339) and a space.
    """
    time, step, total, safe, attempt = "", None, 0, None, 0
    metrics: dict[str, float | None] = {}
    state = State.TRAINING
    for line in lines:
        written, _, text = line.partition(" ")
        for part in text[-_MOST_LETTERS:].split("\r"):  # a progress bar overwrites its own line
            if bar := _BAR.match(part):
                time, step, total = written, int(bar["step"]), int(bar["total"])
            elif saved := _SAVED.match(part):
                time, safe = written, int(saved[1])
                step = max(step or 0, safe)
            elif found := _ATTEMPT.match(part):
                time, attempt = written, int(found[1])
            elif ended := _FINISHED.match(part):
                time, step, state = written, int(ended[1]), State.FINISHED
            elif part.startswith("{'") and part.endswith("}"):
                time, metrics = written, _metrics(part) or metrics
    if step is None:
        return None
    return Progress(
        time=time,
        state=state,
        step=step,
        max_steps=max(total, step) if total or state is State.FINISHED else 0,
        epoch=metrics.pop("epoch", None) or 0.0,
        loss=metrics.pop("loss", None),
        train_metrics=metrics,
        attempt=attempt,
        safe_step=safe,
    )


def _metrics(text: str) -> dict[str, float | None]:
    """The metrics in a line that the Trainer prints; empty for another line."""
    try:
        found: Any = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    values = {str(name): number_in(value) for name, value in cast("dict[object, object]", found).items()}
    return values if {"loss", "eval_loss", "train_loss"} & values.keys() else {}
