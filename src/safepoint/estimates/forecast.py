"""Forecasts when a folder has no more free space for a save, and decides when to warn. Pure arithmetic.

The same arithmetic is used for bytes and for inodes. The needs of saves are known, so they are extrapolated without a
limit. The writes of other programs are only observed, so they are extrapolated to at most `_REACH` times the observed
time.
"""

import enum
import math
import statistics
from collections import deque
from dataclasses import dataclass

_MOST_SAMPLES = 48
"""The limit of samples that a trend keeps. For each new sample, the slopes of all pairs are computed: about a
thousand."""
_LEAST_SAMPLES = 4
_REACH = 30.0
_FEW_SAVES = 3
_SOON_S = 3600.0
_REPEAT_S = 1800.0
_CALM_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The needs of the coming saves, in bytes or in inodes.

    Args:
        needed: how much must be free when a save begins.
        kept: how much each save adds until retention has reached its limit.
        saves_until_limit: after how many more saves retention has reached its limit; None if all checkpoints stay.
        kept_later: how much each save adds on average after retention has reached its limit.
        interval_s: seconds from one save to the next; None if the time is not known, or if no save is due.
        next_s: seconds until the next save.
    """

    needed: int
    kept: int = 0
    saves_until_limit: int | None = None
    kept_later: float = 0.0
    interval_s: float | None = None
    next_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """How long the free space suffices.

    Args:
        saves_left: how many more saves fit; None if the number is unlimited or not known.
        remaining_s: seconds until the first save that does not fit. If the times of the saves are not known, seconds
            until the free space is used up. None if there is no such time, or if it cannot be forecast.
    """

    saves_left: int | None = None
    remaining_s: float | None = None


class Trend:
    """How fast other programs use up the free space.

    The rate is the median of the slopes between all pairs of samples (P. K. Sen, Estimates of the regression
    coefficient based on Kendall's tau, Journal of the American Statistical Association 63, 1968). A few samples that
    jump up and down do not change the median.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=_MOST_SAMPLES)

    def add(self, time_s: float, used: int) -> None:
        """Add a sample. Only the changes of `used` count, so the negative of the free space is a valid value, too."""
        if not self._samples or time_s > self._samples[-1][0]:
            self._samples.append((time_s, used))

    @property
    def per_s(self) -> float:
        """The growth in a second; 0 if the used space shrinks, or while there are too few samples."""
        if len(self._samples) < _LEAST_SAMPLES:
            return 0.0
        samples = list(self._samples)
        slopes = [
            (later[1] - earlier[1]) / (later[0] - earlier[0])
            for index, later in enumerate(samples)
            for earlier in samples[:index]
        ]
        return max(0.0, statistics.median(slopes))

    @property
    def span_s(self) -> float:
        """The time that the samples cover."""
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0


def forecast(free: int, demand: Demand, trend: Trend | None = None) -> Forecast:
    """How long the free space suffices.

    Args:
        free: the bytes or inodes that are free now.
        demand: the needs of the coming saves.
        trend: how fast other programs use up the free space; None if this is not known.
    """
    of_saves = _forecast(free, demand, 0.0)
    if trend is None or not trend.per_s:
        return of_saves
    of_all = _forecast(free, demand, trend.per_s)
    is_within_reach = of_all.remaining_s is not None and of_all.remaining_s <= _REACH * trend.span_s
    return of_all if is_within_reach else of_saves


def _forecast(free: int, demand: Demand, growth_per_s: float) -> Forecast:
    spare = free - demand.needed
    if spare < 0:
        return Forecast(saves_left=0, remaining_s=0.0)
    if demand.interval_s is None:
        remaining_s = spare / growth_per_s if growth_per_s else None
        return Forecast(saves_left=_saves_that_fit(spare, demand, 0.0), remaining_s=_finite(remaining_s))
    spare_at_next = spare - growth_per_s * demand.next_s
    if spare_at_next < 0:
        return Forecast(saves_left=0, remaining_s=_finite(demand.next_s))
    saves = _saves_that_fit(spare_at_next, demand, growth_per_s * demand.interval_s)
    # The first save is due after `next_s`, and each further save after another interval.
    remaining_s = None if saves is None else _finite(demand.next_s + saves * demand.interval_s)
    return Forecast(saves_left=saves, remaining_s=remaining_s)


def _saves_that_fit(spare: float, demand: Demand, growth: float) -> int | None:
    """How many saves fit, if `spare` is left beside the first save, and other programs add `growth` between two
    saves. None if the number is unlimited."""
    limit = demand.saves_until_limit
    further = _quotient(spare, demand.kept + growth)
    if limit is not None and (further is None or further >= limit):
        at_limit = spare - limit * (demand.kept + growth)
        later = _quotient(at_limit, demand.kept_later + growth)
        further = None if later is None else limit + later
    return None if further is None else 1 + further


def _quotient(amount: float, each: float) -> int | None:
    quotient = amount / each if each > 0 else math.inf
    return math.floor(quotient) if math.isfinite(quotient) else None


def _finite(seconds: float | None) -> float | None:
    return seconds if seconds is not None and math.isfinite(seconds) else None


class Change(enum.Enum):
    """The reports of an `Alarm`."""

    NONE = 0
    LOW = 1
    REGAINED = 2


class Alarm:
    """Decides when to warn that the free space is low: early, not at each change, and again after half an hour.

    The free space is low if at most three more saves fit, or if a save will not fit within the next hour.
    """

    def __init__(self) -> None:
        self._level = 0
        self._reported_s = -math.inf
        self._calm_since_s: float | None = None

    @property
    def is_low(self) -> bool:
        """Whether the last report was that the free space is low."""
        return self._level > 0

    def update(self, now_s: float, found: Forecast) -> Change:
        """Receive a new forecast, and return what to report.

        Args:
            now_s: the current time, by the monotonic clock.
            found: the forecast.
        """
        level = _level(found)
        if level == 0:
            return self._calm(now_s)
        self._calm_since_s = None
        if level <= self._level and now_s < self._reported_s + _REPEAT_S:
            return Change.NONE
        self._level, self._reported_s = max(level, self._level), now_s
        return Change.LOW

    def _calm(self, now_s: float) -> Change:
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        # The free space may jump up and down. So it counts as regained only after `_CALM_S` seconds.
        if self._level == 0 or now_s < self._calm_since_s + _CALM_S:
            return Change.NONE
        self._level, self._reported_s = 0, -math.inf
        return Change.REGAINED


def _level(found: Forecast) -> int:
    if found.saves_left == 0:
        return 2
    is_few = found.saves_left is not None and found.saves_left <= _FEW_SAVES
    is_soon = found.remaining_s is not None and found.remaining_s <= _SOON_S
    return 1 if is_few or is_soon else 0
