"""The best interval between checkpoints, and the cost of any interval. Pure arithmetic.

A training saves after each `interval` seconds of work. A save stalls the training for `stall` seconds (δ), and
is durable `durable` seconds (D) after it has begun. Interruptions come at random with the mean time `between` (M), at
the rate λ = 1/M, also during a restart. There are three kinds of them:

| kind | what is kept |
|---|---|
| announced | all work: the ranks save when they receive SIGTERM |
| ends only ranks | the work up to the newest snapshot in memory, which another process, the keeper, still has |
| ends the machine | the work up to the newest durable checkpoint |

Let T = interval + δ. After each start, the training works until the next interruption. On average, this much of
the work since the start is kept:

    announced             (1 - e^(-λ·interval)) / (λ·(1 - e^(-λT)))
    ends only ranks       interval · e^(-λ·(C - δ)) / (e^(λT) - 1)
    ends the machine      interval · e^(-λ·(D - δ)) / (e^(λT) - 1)

C is the time from the beginning of a save until its copy in memory is complete. The second and third formulas are
geometric series: interval · P(no interruption before save n can be used), summed over all saves n. A save can be used
when its copy in memory is complete (second formula), or when it is durable (third formula). The first formula is the
integral of P(no interruption yet) over the time in which the training works. A restart of R seconds may be
interrupted, too, and then begins again. So the time from one completed restart to the next is e^(λR) / λ seconds on
average. The productive share of the time is the expected work divided by this time. It is called ETTR, the effective
training time ratio.

If all interruptions end the machine, and D = δ, this is the exact expression of J. T. Daly, A higher order estimate
of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22 (2006), equation 20. The
model assumes that the state with which a start begins is durable, and that a save is durable before the next save
begins.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

_MOST_EXPONENT = 700.0
"""The largest exponent: `exp` of a larger number is not a float."""
_GRID = 240
SHORTEST_STEP_S = 1e-3
"""No training step takes less time. If the best interval is at most this long, a save after each step is best."""
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """How often a training is interrupted, and how.

    Args:
        between_s: mean seconds between two interruptions of any kind, while the training runs or restarts.
        announced: the share of interruptions, from 0 to 1, that are announced early enough for a save.
        ranks_only: the share of interruptions that end processes, but do not clear the memory of the machine.

    Raises:
        ValueError: a value is out of range.
    """

    between_s: float
    announced: float = 0.0
    ranks_only: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.between_s) and self.between_s > 0):
            raise ValueError(f"between_s is {self.between_s!r}, and must be a finite number above 0")
        for name in ("announced", "ranks_only"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value!r}, and must be a share from 0 to 1")
        if self.announced + self.ranks_only > 1 + 1e-9:
            raise ValueError(
                f"announced ({self.announced!r}) and ranks_only ({self.ranks_only!r}) are shares of the same "
                "interruptions, and add up to more than 1: reduce one of them"
            )

    @property
    def of_machine(self) -> float:
        """The share of interruptions that also clear the memory of the machine."""
        return max(0.0, 1 - self.announced - self.ranks_only)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTimes:
    """The costs of a save and of a restart, in seconds.

    Args:
        stall_s: how long a save delays the training.
        durable_s: the time from the beginning of a save until it is durable, at least `stall_s`; None for `stall_s`.
        copied_s: the time from the beginning of a save until its snapshot in memory is complete, at least
            `stall_s`; None for `stall_s`.
        restart_s: the time from an interruption until the training works again.
        announced_restart_s: the same time for an announced interruption, including its save; None for `restart_s`.
        ranks_restart_s: the same time for an interruption that ends only ranks; None for `restart_s`.
        snapshot_every_s: seconds of work between snapshots in memory that do not become checkpoints. If None, only
            saves take snapshots.
        snapshot_stall_s: how long such a snapshot delays the training.

    Raises:
        ValueError: a value is out of range.
    """

    stall_s: float
    durable_s: float | None = None
    copied_s: float | None = None
    restart_s: float = 0.0
    announced_restart_s: float | None = None
    ranks_restart_s: float | None = None
    snapshot_every_s: float | None = None
    snapshot_stall_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value!r}, and must be a finite number, not below 0")
        for name in ("durable_s", "copied_s"):
            value = getattr(self, name)
            if value is not None and value < self.stall_s:
                raise ValueError(
                    f"{name} is {value!r}, and stall_s is {self.stall_s!r}: {name} must not be less than stall_s. "
                    "Both times begin with the save, and training waits at most until the save is done"
                )
        if self.snapshot_every_s == 0:
            raise ValueError("snapshot_every_s is 0: give the seconds between two snapshots, or None")

    @property
    def durable_lag_s(self) -> float:
        """The seconds from the end of a stall until the save is durable."""
        return 0.0 if self.durable_s is None else self.durable_s - self.stall_s

    @property
    def copied_lag_s(self) -> float:
        """The seconds from the end of a stall until the snapshot in memory is complete."""
        return 0.0 if self.copied_s is None else self.copied_s - self.stall_s


def young_s(stall_s: float, between_s: float) -> float:
    """√(2δM): J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974)."""
    return math.sqrt(2 * stall_s * between_s)


def daly_s(stall_s: float, between_s: float) -> float:
    """√(2δM)·(1 + ⅓·√(δ/2M) + ⅑·(δ/2M)) - δ if δ < 2M, M if δ ≥ 2M: Daly (2006), equation 37."""
    if stall_s >= 2 * between_s:
        return between_s
    ratio = stall_s / (2 * between_s)
    return young_s(stall_s, between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def blocking_optimum_s(stall_s: float, between_s: float) -> float:
    """The exact best interval if no interruption is announced: the root of 1 - τ/M = e^(-(τ + δ)/M).

    At the root, the derivative of τ / (e^((τ + δ)/M) - 1) is 0. Restarts, and the time until a save is durable,
    multiply the expected work by factors without τ, so they do not move this optimum. The root is found with Newton's
    method, which begins at Young's value. The method converges, because the function is convex. In practice, four
    steps are exact to the precision of a float.
    """
    if stall_s <= 0:
        return 0.0
    delay = stall_s / between_s
    share = min(math.sqrt(2 * delay), 1.0)
    for _ in range(40):
        ended = -math.expm1(-share - delay)  # `expm1`, because for cheap saves 1 - e^x would lose all its digits
        step = (share - ended) / ended
        share -= step
        if abs(step) <= 1e-14 * share:
            break
    return share * between_s


def productive_share(interval_s: float, times: SaveTimes, interruptions: Interruptions) -> float:
    """The expected share of the time in which the training does work that is not lost: the ETTR, from 0 to 1.

    Args:
        interval_s: seconds of work between two saves; `math.inf` if only announced interruptions cause saves.
        times: the costs of a save and of a restart.
        interruptions: how often the training is interrupted.

    Raises:
        ValueError: `interval_s` is not above 0.

    The formula is in the docstring of this module. If `snapshot_every_s` (s) is set, work continues at the rate
    s / (s + stall of a snapshot). In this case, an interruption that ends only ranks keeps the work up to the newest
    of these snapshots.
    """
    if not interval_s > 0:
        raise ValueError(f"interval_s is {interval_s!r}, and must be above 0")
    between_s = interruptions.between_s
    every_s = times.snapshot_every_s
    pace = 1.0 if every_s is None else every_s / (every_s + times.snapshot_stall_s)
    work, cycle = interval_s / pace / between_s, (interval_s / pace + times.stall_s) / between_s
    # The following values are expected seconds of kept work, at full pace, divided by `between_s`.
    if cycle < _MOST_EXPONENT:
        kept_by_saves = work / math.expm1(cycle) if cycle else 1.0
        kept_if_announced = -math.expm1(-work) / -math.expm1(-cycle) if cycle else 1.0
    else:
        kept_by_saves, kept_if_announced = 0.0, 1.0
    of_machine = kept_by_saves * math.exp(-times.durable_lag_s / between_s)
    of_ranks = kept_by_saves * math.exp(-times.copied_lag_s / between_s)
    if every_s is not None:
        apart = (every_s + times.snapshot_stall_s) / between_s
        kept = apart / math.expm1(apart) if 0 < apart < _MOST_EXPONENT else 0.0
        saves = work / cycle if 0 < cycle < math.inf else 1.0
        of_ranks = max(of_ranks, kept * saves * math.exp(-times.copied_lag_s / between_s))
    work_kept = (
        interruptions.announced * kept_if_announced
        + interruptions.ranks_only * of_ranks
        + interruptions.of_machine * of_machine
    )
    return pace * work_kept * _restarted(times, interruptions)


def _restarted(times: SaveTimes, interruptions: Interruptions) -> float:
    """The probability that a restart is not interrupted; each kind of interruption has a restart of its own."""

    def share(restart_s: float | None) -> float:
        return math.exp(-(times.restart_s if restart_s is None else restart_s) / interruptions.between_s)

    return (
        interruptions.announced * share(times.announced_restart_s)
        + interruptions.ranks_only * share(times.ranks_restart_s)
        + interruptions.of_machine * share(None)
    )


def best_interval_s(times: SaveTimes, interruptions: Interruptions) -> float:
    """The interval with the largest `productive_share`, in seconds of work.

    Returns:
        `math.inf` if periodic saves do not pay, because all interruptions are announced or saves cost too much. The
        result is never less than the time that a save needs to become durable after its stall, because saves are
        written one after another. Apart from that, it is at most `SHORTEST_STEP_S` if a save after each step is
        best, because saves cost nothing or too little to matter.
    """
    least_s = max(times.durable_lag_s, min(SHORTEST_STEP_S, 1e-9 * interruptions.between_s))
    if interruptions.announced == 0 and times.snapshot_every_s is None:
        return max(least_s, blocking_optimum_s(times.stall_s, interruptions.between_s))
    if interruptions.announced == 1:
        return math.inf
    if times.stall_s == 0:
        return least_s  # saves cost nothing, so the values in a search would differ only by rounding errors
    most_s = max(_MOST_EXPONENT * interruptions.between_s, 2 * least_s)
    low, high = math.log(least_s), math.log(most_s)
    steps = [low + (high - low) * number / _GRID for number in range(_GRID + 1)]

    def value(logarithm: float) -> float:
        return productive_share(math.exp(logarithm), times, interruptions)

    # For finite intervals, the share has at most one maximum, and may be flat elsewhere. So a grid finds the
    # region of the maximum, and a golden-section search finds the maximum in this region. The last lines compare this
    # maximum with the share of a training without periodic saves.
    top = max(range(_GRID + 1), key=lambda number: value(steps[number]))
    best = _golden_section(value, steps[max(0, top - 1)], steps[min(_GRID, top + 1)])
    never = productive_share(math.inf, times, interruptions)
    return math.inf if never >= value(best) else math.exp(best)


def _golden_section(value: Callable[[float], float], low: float, high: float) -> float:
    inner, outer = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_inner, at_outer = value(inner), value(outer)
    while high - low > 1e-9:
        if at_inner >= at_outer:
            high, outer, at_outer = outer, inner, at_inner
            inner = high - _GOLDEN * (high - low)
            at_inner = value(inner)
        else:
            low, inner, at_inner = inner, outer, at_outer
            outer = low + _GOLDEN * (high - low)
            at_outer = value(outer)
    return min(((low + high) / 2, low, high), key=lambda point: -value(point))
