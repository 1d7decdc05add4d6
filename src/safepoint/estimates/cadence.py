"""Decides at which steps a snapshot is taken in memory even if no checkpoint is saved.

Snapshots are taken at boundaries: a boundary is the point between two optimizer steps.
"""

import math

_SHARE = 0.01
"""The part of the time that snapshots may cost under `auto`."""


class Cadence:
    """Decides at which steps to take snapshots.

    All ranks pass the same durations, on which they have agreed, so all ranks get the same result.

    Args:
        setting: `--snapshot-steps`: a number of steps, or `auto`. If None, snapshots are taken only for saves.
    """

    def __init__(self, setting: str | None) -> None:
        self._setting = setting

    def is_due(self, *, step: int, last: int | None, cost_s: float | None, step_s: float) -> bool:
        """Whether to take a snapshot at this boundary.

        Args:
            step: optimizer steps done.
            last: the step of the newest snapshot; None if there is no snapshot yet.
            cost_s: seconds by which a snapshot delays the training; None if this is not known yet.
            step_s: seconds that a step takes; 0 if no step was measured.
        """
        if self._setting is None or step == last:
            return False
        if last is None:
            return True
        return step - last >= self.interval(cost_s=cost_s, step_s=step_s)

    def interval(self, *, cost_s: float | None, step_s: float) -> int:
        """Steps from one snapshot to the next.

        With `auto`, 1 while the cost of a snapshot or the duration of a step is not known.
        """
        if self._setting is not None and self._setting != "auto":
            return int(self._setting)
        if not cost_s or not step_s:
            return 1
        return max(1, math.ceil(cost_s / (_SHARE * step_s)))
