"""Checks whether a job makes progress after its processes were restored from an image.

Restored processes may be alive but wait for ever, or use a processor in a loop without end. So only the job's own
reports of progress count: of a step, an evaluation or another start of its ranks. That a save becomes durable does
not count, because the keeper completes a save without the ranks. The time limit follows from the pace of the job
before the freeze.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from safepoint.foundation import clock, processes
from safepoint.foundation.units import format_duration
from safepoint.progress.record import Progress, State, read_progress

_LEAST_S = 60.0
_NUM_STEPS = 10
_NUM_PAUSES = 10
_LEAST_PAUSES_S = 3600.0
"""The pauses of an attempt say little about its evaluations if most of them were saves, which are short."""
_BUSY = 0.1
"""A job that evaluates or saves reports no step. It is stuck if it uses less than this share of a processor."""
_REPORTED = ("state", "step", "epoch", "loss", "train_metrics", "eval_metrics", "attempt", "restart", "message")
"""The fields of the progress that only the ranks and their launcher change."""


def limit_after(progress: Progress | None) -> float | None:
    """How long a job may take until its first report of progress, in seconds; None if its pace is not known.

    Args:
        progress: its last report before the freeze; None if there is no report.
    """
    if progress is None or progress.step_s is None:
        return None
    return max(_LEAST_S, _NUM_STEPS * (progress.step_s + progress.pause_s))


def longest_pause_after(progress: Progress | None) -> float | None:
    """How long an evaluation or a save may take that was frozen, even if it uses a processor, in seconds.

    This is ten times as long as the evaluations and saves of the attempt have taken together, and at least an hour.
    None if there was none, and for the first evaluation.
    """
    if progress is None or not progress.pause_s:
        return None
    if progress.state is State.EVALUATING and not progress.eval_metrics:
        return None
    num_steps = max(1, progress.step - (progress.resumed_step or 0))
    return max(_LEAST_PAUSES_S, _NUM_PAUSES * progress.pause_s * num_steps)


class ThawWatch:
    """Watches one job, from now on.

    Args:
        path: the file with the job's progress.
        own_processes: returns the processes of the job.
        is_late: whether the job was frozen because a step did not end in time. This step may then use up the limit,
            too, so a job that uses the processor does not count as stuck.
    """

    def __init__(self, path: Path, own_processes: Callable[[], Iterable[int]], *, is_late: bool = False) -> None:
        self._path, self._own_processes = path, own_processes
        self._before = read_progress(path)
        self._is_training = not is_late and (self._before is None or self._before.state is State.TRAINING)
        self.limit_s = limit_after(self._before)
        self._longest_s = None if is_late else longest_pause_after(self._before)
        self._since_s = clock.monotonic_s()
        self._has_progressed = False
        self._begin()

    def _begin(self) -> None:
        self._begun_s = clock.monotonic_s()
        self._used_s = _processor_time_of(self._own_processes())

    def is_stuck(self) -> bool:
        """Whether the job has made no progress within its limit. False if its pace is not known."""
        passed_s = clock.monotonic_s() - self._begun_s
        if self._has_progressed or self.limit_s is None or passed_s < self.limit_s:
            return False
        self._has_progressed = _reported(read_progress(self._path)) != _reported(self._before)
        if self._has_progressed:
            return False
        if self._is_training or (
            self._longest_s is not None and clock.monotonic_s() - self._since_s >= max(self.limit_s, self._longest_s)
        ):
            return True
        if _processor_time_of(self._own_processes()) - self._used_s < _BUSY * passed_s:
            return True
        self._begin()
        return False

    @property
    def cause(self) -> str:
        """What the job did, as a clause that can follow its name."""
        passed = format_duration(max(self.limit_s or 0.0, clock.monotonic_s() - self._since_s))
        return f"made no progress within {passed} after it was restored from an image, and was ended"


def _reported(progress: Progress | None) -> list[object]:
    return [] if progress is None else [getattr(progress, name) for name in _REPORTED]


def _processor_time_of(pids: Iterable[int]) -> float:
    """The processor time of processes, in seconds."""
    ticks = 0
    for pid in pids:
        ticks += sum(map(int, processes.stat_fields(Path(f"/proc/{pid}"))[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")
