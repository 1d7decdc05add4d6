"""Checks whether a job makes progress after its processes were restored from an image.

Restored processes may be alive but wait for ever. So only progress counts. The time limit follows from the pace of
the job before the freeze.
"""

import os
from pathlib import Path

from safepoint.foundation import clock, processes
from safepoint.foundation.units import format_duration
from safepoint.jobs.local.attempt import rank_reports
from safepoint.progress.record import Progress, State

_LEAST_S = 60.0
_NUM_STEPS = 10
_BUSY = 0.1
"""A job that evaluates or saves reports no step. It is stuck if it uses less than this share of a processor."""


def limit_after(progress: Progress | None) -> float | None:
    """How long a job may take until its first report of progress, in seconds; None if its pace is not known.

    Args:
        progress: its last report before the freeze; None if there is no report.
    """
    if progress is None or progress.step_s is None:
        return None
    return max(_LEAST_S, _NUM_STEPS * (progress.step_s + progress.pause_s))


class ThawWatch:
    """Watches one job, from now on.

    Args:
        folder: the folder of the job.
        is_late: whether the job was frozen because a step did not end in time. This step may then use up the limit,
            too, so a job that uses the processor does not count as stuck.
    """

    def __init__(self, folder: Path, *, is_late: bool = False) -> None:
        self._folder = folder
        progress = rank_reports.progress(folder)
        self._is_training = not is_late and (progress is None or progress.state is State.TRAINING)
        self._report = rank_reports.newest_report(folder)
        self.limit_s = limit_after(progress)
        self._begin()

    def _begin(self) -> None:
        self._begun_s = clock.monotonic_s()
        self._used_s = _processor_time_of(self._folder)

    def is_stuck(self) -> bool:
        """Whether the job has made no progress within its limit. False if its pace is not known."""
        passed_s = clock.monotonic_s() - self._begun_s
        if self.limit_s is None or passed_s < self.limit_s:
            return False
        if rank_reports.newest_report(self._folder) != self._report:
            return False
        if not self._is_training and _processor_time_of(self._folder) - self._used_s >= _BUSY * passed_s:
            self._begin()
            return False
        return True

    @property
    def cause(self) -> str:
        """What the job did, as a clause that can follow its name."""
        limit = format_duration(self.limit_s or 0.0)
        return f"made no progress within {limit} after it was restored from an image, and was ended"


def _processor_time_of(folder: Path) -> float:
    """The processor time of all processes of a job, in seconds."""
    ticks = 0
    for pid in processes.processes_of(folder):
        ticks += sum(map(int, processes.stat_fields(Path(f"/proc/{pid}"))[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")
