"""A discrete-event simulation of a training that is interrupted and resumed, over days or years.

The events are interruptions and the ends of restarts. Between two events, saves have equal distances. So the number
of saves, and the number of durable saves, are computed without further events. The simulation of a year takes no
longer for a job that saves every second than for a job that never saves.

For each interruption, the surviving state is exact: the newest durable save, the newest complete snapshot, or all
work. A snapshot from which ranks resume is durable only after the keeper has written it. If the machine is lost
before that, the snapshot is lost, too. An interruption during a restart begins another restart. While a job waits in
a queue, nothing fails.

The simulation is deterministic: trial n of a seed draws the same interruptions for every policy.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from safepoint.planning.failures import Cause, Hazard, between_s
from safepoint.planning.policies import Kept, Plan

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 0.975 quantiles of Student's t distribution with 1 to 10 degrees of freedom."""
_Z = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How one simulated job has used its time, in seconds.

    Args:
        productive_s: work that was not lost, in seconds at the full pace.
        repeated_s: work that was lost, and has to be done again.
        stalled_s: the time in which training waited for saves, snapshots and votes.
        down_s: the time of restarts, and of saves on an announcement.
        waiting_s: the time in a queue. This time is not a part of the ETTR.
        num_interruptions: how often the job was interrupted.
        num_events: the number of interruptions, ends of restarts and saves.
    """

    productive_s: float
    repeated_s: float
    stalled_s: float
    down_s: float
    waiting_s: float
    num_interruptions: int
    num_events: int

    @property
    def ettr(self) -> float:
        """The effective training time ratio: the share of productive work in the time with machines."""
        total_s = self.productive_s + self.repeated_s + self.stalled_s + self.down_s
        return self.productive_s / total_s if total_s else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over trials, with the half width of its 95 % confidence interval."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """The mean of independent trials, with its interval by Student's t distribution (infinite for one trial)."""
        mean = math.fsum(values) / len(values)
        if len(values) == 1:
            return cls(mean=mean, half_width=math.inf)
        variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
        return cls(mean=mean, half_width=t_975(len(values) - 1) * math.sqrt(variance / len(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The trials of one policy on one number of ranks."""

    trials: tuple[Trial, ...]

    @property
    def ettr(self) -> Estimate:
        """The effective training time ratio."""
        return Estimate.of([trial.ettr for trial in self.trials])

    def hours(self, *names: str) -> Estimate:
        """The sum of these fields of a trial, in hours."""
        return Estimate.of([sum(getattr(trial, name) for name in names) / 3600 for trial in self.trials])

    @property
    def lost_hours(self) -> Estimate:
        """Everything but productive time and waiting."""
        return self.hours("repeated_s", "stalled_s", "down_s")

    @property
    def num_interruptions(self) -> int:
        """The number of interruptions in all trials."""
        return sum(trial.num_interruptions for trial in self.trials)

    @property
    def num_events(self) -> int:
        """The number of interruptions, ends of restarts and saves in all trials."""
        return sum(trial.num_events for trial in self.trials)


def t_975(degrees: int) -> float:
    """The 0.975 quantile of Student's t distribution, within 0.1 %.

    From 11 degrees of freedom on, it is computed by the Cornish-Fisher expansion (Abramowitz and Stegun, 26.7.5).
    """
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    first = (_Z**3 + _Z) / 4
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    return _Z + first / degrees + second / degrees**2


def simulate(plan: Plan, hazards: tuple[Hazard, ...], *, duration_s: float, num_trials: int, seed: int) -> Simulated:
    """Simulate a job of this duration `num_trials` times.

    Raises:
        ValueError: a number is out of range.
    """
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise ValueError(f"duration_s is {duration_s!r}, and must be a finite number above 0")
    if num_trials < 1:
        raise ValueError(f"num_trials is {num_trials!r}, and must be at least 1")
    trials = (
        _run(plan, hazards, duration_s, _random_interruptions(hazards, random.Random(f"{seed}/{number}")))
        for number in range(num_trials)
    )
    return Simulated(trials=tuple(trials))


def replay(
    plan: Plan, hazards: tuple[Hazard, ...], interruptions: Iterable[tuple[float, int]], *, duration_s: float
) -> Trial:
    """Simulate a job with given interruptions.

    Args:
        plan: what the job does.
        hazards: the kinds of interruptions.
        interruptions: for each interruption, the seconds since the interruption before it, and the index of its
            hazard.
        duration_s: how long the job runs.
    """
    given = iter(interruptions)
    return _run(plan, hazards, duration_s, lambda: next(given, (math.inf, 0)))


def _random_interruptions(hazards: tuple[Hazard, ...], generator: random.Random) -> Callable[[], tuple[float, int]]:
    mean_s = between_s(hazards)
    if math.isinf(mean_s):
        return lambda: (math.inf, 0)
    limits: list[float] = []
    for hazard in hazards:
        limits.append((limits[-1] if limits else 0.0) + hazard.per_s * mean_s)
    limits[-1] = 2.0
    log, draw = math.log, generator.random
    if len(hazards) == 1:
        return lambda: (-mean_s * log(1.0 - draw()), 0)

    def following() -> tuple[float, int]:
        gap_s, at, number = -mean_s * log(1.0 - draw()), draw(), 0
        while at >= limits[number]:
            number += 1
        return gap_s, number

    return following


def _run(  # noqa: PLR0912, PLR0915  one loop over local variables: a call for each event would double its time
    plan: Plan, hazards: tuple[Hazard, ...], duration_s: float, following: Callable[[], tuple[float, int]]
) -> Trial:
    """One job from its first step to the end of `duration_s`. Times are on the wall clock; work is at full pace."""
    every_s, pace = plan.snapshot_every_s, plan.pace
    if every_s is not None:
        pace *= every_s / (every_s + plan.snapshot_stall_s)
    interval_s, stall_s = plan.interval_s, plan.stall_s
    busy_s = interval_s / pace
    cycle_s = busy_s + stall_s
    late_s, copied_s = plan.durable_s - stall_s, plan.copied_s - stall_s
    apart_s = None if every_s is None else (every_s + plan.snapshot_stall_s) / plan.pace
    kinds = [
        (plan.keeps(hazard), plan.restart_s(hazard), hazard.waiting_s, hazard.cause is Cause.RANKS)
        for hazard in hazards
    ]
    now_s = down_s = waiting_s = repeated_s = ran_s = restart_s = 0.0
    # The work when the ranks last started, the durable part of it, and the time when all of it will be durable.
    start_s = durable_s = commit_s = 0.0
    num_interruptions = num_saves = 0
    is_endless = math.isinf(cycle_s)

    while True:
        gap_s, number = following()
        if now_s + min(gap_s, restart_s) >= duration_s:
            down_s += duration_s - now_s
            break
        if gap_s < restart_s:
            # The restart was interrupted, and another restart begins. If only memory holds the state from which the
            # ranks were resuming, an interruption that loses the memory also loses this state.
            num_interruptions += 1
            now_s += gap_s
            down_s += gap_s
            kept, restart_s, wait_s, is_of_ranks = kinds[number]
            if now_s >= commit_s:
                durable_s = start_s
            elif kept is Kept.DURABLE and not is_of_ranks:
                repeated_s += start_s - durable_s
                start_s = durable_s
            if wait_s:
                waiting_s += wait_s
                commit_s -= wait_s
            continue
        now_s += restart_s
        down_s += restart_s
        run_s = gap_s - restart_s
        is_last = now_s + run_s >= duration_s
        if is_last:
            run_s = duration_s - now_s
        now_s += run_s
        ran_s += run_s
        if is_endless:
            work_s = run_s * pace
        else:
            cycles = run_s // cycle_s
            rest_s = run_s - cycles * cycle_s
            num_saves += int(cycles)
            work_s = cycles * interval_s + (rest_s if rest_s < busy_s else busy_s) * pace
        if is_last:
            start_s += work_s
            break
        num_interruptions += 1
        kept, restart_s, wait_s, _ = kinds[number]
        done_s = start_s + work_s
        # The newest durable state is the newest durable save since the start of the ranks. If there is no such save,
        # it is the state from which the ranks resumed, if this state is durable by now.
        if now_s >= commit_s:
            durable_s = start_s
        if not is_endless and run_s > late_s:
            saved = (run_s - late_s) // cycle_s
            if saved:
                durable_s = start_s + saved * interval_s
        if kept is Kept.ALL:
            start_s = durable_s = done_s
            commit_s = now_s
        elif kept is Kept.SNAPSHOT:
            held_s = 0.0
            if run_s > copied_s:
                seen_s = run_s - copied_s
                if not is_endless:
                    held_s = seen_s // cycle_s * interval_s
                if apart_s is not None:
                    # The work at the newest snapshot between saves, which may be newer than the newest save.
                    at_s = seen_s // apart_s * apart_s
                    cycles = 0.0 if is_endless else at_s // cycle_s
                    rest_s = at_s - cycles * cycle_s if cycles else at_s
                    before_s = cycles * interval_s if cycles else 0.0
                    held_s = max(held_s, before_s + (rest_s if rest_s < busy_s else busy_s) * pace)
            start_s += held_s
            commit_s = now_s + plan.durable_s if start_s > durable_s else now_s
        else:
            start_s = durable_s
            commit_s = now_s
        repeated_s += done_s - start_s
        if wait_s:
            waiting_s += wait_s
            commit_s -= wait_s
    productive_s = start_s
    return Trial(
        productive_s=productive_s,
        repeated_s=repeated_s,
        stalled_s=max(0.0, ran_s - productive_s - repeated_s),
        down_s=down_s,
        waiting_s=waiting_s,
        num_interruptions=num_interruptions,
        num_events=2 * num_interruptions + num_saves,
    )
