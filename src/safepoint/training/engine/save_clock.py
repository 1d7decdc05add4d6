"""Decides when a periodic checkpoint is due: at a fixed interval, or at the interval that wastes the least time.

Only the first rank's clock decides. The vote (the small all-reduce in each step) carries the decision to the other
ranks, so that all save the same step.

With `auto`, the interval is the exact optimum of `safepoint.estimates.interval`. A save stalls training for δ
seconds, and an interruption loses work about every M seconds. δ is measured. M is estimated from the run's own
history, to which one loss after four hours is added: M = (4 h + time trained) / (1 + losses). A stop with a
checkpoint of the last step loses nothing, and is not counted as a loss. M is at most 30 days. The times in the
history may be wrong, or another person may have written them. Without this limit, such times could make a run save
only once a week. After the stall, the files are written in the background. The time for this writing does not change
the optimum. It only limits how short the interval may be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safepoint.estimates.interval import blocking_optimum_s
from safepoint.foundation import clock
from safepoint.foundation.events.stream import read_events
from safepoint.foundation.quantities import parse_duration

AUTO = "auto"
_ASSUMED_BETWEEN_LOSSES_S = 4 * 3600.0
_ASSUMED_STALL_S = 1.0
"""The assumed stall of a save, in seconds, before the first save was measured."""
_LEAST_S = 1.0
_MOST_BETWEEN_LOSSES_S = 30 * 86_400.0
"""With a stall of one second, a run with this time between losses saves every 38 minutes."""
_LAST_BYTES = 16 << 20
"""How many bytes at the end of the event stream are read: about 60,000 events. More would delay the start."""
_MOST_SHARE_OF_WRITING = 0.5
"""The disk writes checkpoints for at most half of the time, so that other programs can use the disk too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """How long a run has trained, and how often it lost steps that no checkpoint contained.

    Args:
        trained_s: seconds of training in all attempts.
        count: attempts that ended without a checkpoint of their last step.
    """

    trained_s: float = 0.0
    count: int = 0

    @property
    def between_s(self) -> float:
        """Estimated seconds between two losses, at most 30 days."""
        return min((_ASSUMED_BETWEEN_LOSSES_S + self.trained_s) / (1 + self.count), _MOST_BETWEEN_LOSSES_S)


def best_interval_s(stall_s: float, between_s: float) -> float:
    """The interval between checkpoints, in seconds, that wastes the least time.

    Args:
        stall_s: seconds that a checkpoint stalls training.
        between_s: seconds between two losses of work.
    """
    if stall_s >= 2 * between_s:
        return between_s  # no interval helps; by Daly's convention, save once between two losses
    return blocking_optimum_s(stall_s, between_s)


class SaveClock:
    """Decides when a checkpoint is due.

    Args:
        setting: a time as `parse_duration` reads it, `auto`, or None for never.
        look_back: returns the losses of earlier attempts; called once, at the first `is_due`, and only for `auto`.
    """

    def __init__(self, setting: str | None, look_back: Callable[[], Losses] = Losses) -> None:
        self._is_auto = setting == AUTO
        self._fixed_s = None if setting is None or self._is_auto else parse_duration(setting)
        self._look_back = look_back
        self._losses = Losses()
        self._stall_s: float | None = None
        self._writing_s = 0.0
        self._began_s: float | None = None
        self._last_s = 0.0

    def is_due(self) -> bool:
        """Whether to save now; called at every step. The result is True once for each checkpoint that is due."""
        if self._fixed_s is None and not self._is_auto:
            return False
        now_s = clock.monotonic_s()
        if self._began_s is None:
            self._began_s = self._last_s = now_s
            self._losses = self._look_back() if self._is_auto else Losses()
        if now_s - self._last_s < self.interval_s:
            return False
        self._last_s = now_s
        return True

    def saved(self, *, stall_s: float | None, writing_s: float | None) -> None:
        """Record that a save was started or postponed, for any reason. The next interval begins now.

        Args:
            stall_s: seconds that the save has stalled training so far; None if the save was postponed.
            writing_s: seconds from the start of the last completed save until the save was durable; None before the
                first such save.
        """
        self._last_s = clock.monotonic_s()
        if stall_s is not None:
            self._stall_s = stall_s if self._stall_s is None else 0.5 * (self._stall_s + stall_s)
        self._writing_s = writing_s or self._writing_s

    @property
    def interval_s(self) -> float:
        """Seconds from one checkpoint to the next."""
        if self._fixed_s is not None:
            return self._fixed_s
        trained_s = 0.0 if self._began_s is None else clock.monotonic_s() - self._began_s
        losses = Losses(trained_s=self._losses.trained_s + trained_s, count=self._losses.count)
        stall_s = _ASSUMED_STALL_S if self._stall_s is None else self._stall_s
        best_s = best_interval_s(stall_s, losses.between_s)
        return max(best_s, self._writing_s / _MOST_SHARE_OF_WRITING, _LEAST_S)


def read_losses(stream: Path) -> Losses:
    """The losses of a run's attempts before the current one, from the last events in its stream."""
    trained_s = attempt_s = 0.0
    count = 0
    last: float | None = None
    is_saved = True
    for record in read_events(stream, last_bytes=_LAST_BYTES):
        event = record["event"]
        try:
            time_s = clock.parse_utc(str(record.get("time")))
        except ValueError:
            continue
        if event == "attempt_started":
            trained_s += attempt_s
            count += not is_saved
            attempt_s, last, is_saved = 0.0, time_s, False
        elif event == "finished" or (event == "interrupted" and record.get("saved") is True):
            is_saved = True
        if last is not None:
            attempt_s += max(0.0, time_s - last)  # the clock may have been set back
            last = time_s
    return Losses(trained_s=trained_s, count=count)
