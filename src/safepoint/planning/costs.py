"""Hours and money that interruptions cost: under different policies, and in the history of a job.

The policies are: no checkpoints, periodic checkpoints, saves on SIGTERM, and snapshots in memory.

An hour is an hour of the whole cluster. If 8 GPUs together cost 55 $ an hour, an hour lost on all of them counts as
one hour, and as 55 $.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from safepoint.estimates.interval import Interruptions, SaveTimes, best_interval_s, productive_share
from safepoint.planning.failures import Cause

HOUR_S = 3600.0
WEEK_S = 7 * 86_400.0
MONTH_S = 365.25 / 12 * 86_400.0
WEEKS_OF_YEAR = 52


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A job whose losses are compared.

    Args:
        price_per_hour: the price of all its machines together.
        interruptions: how often it is interrupted, and the shares of their kinds.
        job_s: how long it trains without any interruption. The loss of a start from step 0 depends on this time.
        restart_s: the time from an interruption until it trains again.
        interval_s: seconds between periodic saves; None for the best interval of each policy. If a save is not
            durable after this time, the next save waits until the save is durable.
        blocking_s: how long a periodic save stalls training if training waits for it.
        notice_save_s: the time from SIGTERM until a save is durable.
        stall_s: how long a save of Safepoint stalls training.
        durable_s: the time from the beginning of a save of Safepoint until it is durable.
        copied_s: the time from the beginning of a save of Safepoint until its snapshot in memory is complete.
    """

    price_per_hour: float
    interruptions: Interruptions
    job_s: float
    restart_s: float = 0.0
    interval_s: float | None = None
    blocking_s: float = 0.0
    notice_save_s: float = 0.0
    stall_s: float = 0.0
    durable_s: float = 0.0
    copied_s: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "price_per_hour",
            "restart_s",
            "blocking_s",
            "notice_save_s",
            "stall_s",
            "durable_s",
            "copied_s",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value!r}, and must be a finite number, not below 0")
        for name in ("job_s", "interval_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value!r}, and must be a finite number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What one policy loses in a month of 30.4 days.

    Args:
        policy: its name.
        interval_s: seconds of work between its saves; `math.inf` if it has no periodic saves.
        productive: the share of the time that is productive, from 0 to 1.
        hours: hours lost in a month.
        money: the price of these hours.
    """

    policy: str
    interval_s: float
    productive: float
    hours: float
    money: float


def losses(situation: Situation) -> list[Loss]:
    """The losses of a month under each policy, by the formulas of `safepoint.estimates.interval`."""
    given = situation.interruptions
    nothing = replace(given, announced=0.0, ranks_only=0.0)
    announced = replace(given, ranks_only=0.0)
    blocking = SaveTimes(
        stall_s=situation.blocking_s,
        restart_s=situation.restart_s,
        announced_restart_s=situation.restart_s + situation.notice_save_s,
    )
    snapshots = SaveTimes(
        stall_s=situation.stall_s,
        durable_s=max(situation.durable_s, situation.stall_s),
        copied_s=max(situation.copied_s, situation.stall_s),
        restart_s=situation.restart_s,
        announced_restart_s=situation.restart_s + situation.notice_save_s,
    )
    found = [_loss(situation, "no checkpoints", math.inf, unsaved_share(situation))]
    for policy, times, interruptions in (
        ("periodic", blocking, nothing),
        ("periodic and JIT", blocking, announced),
        ("snapshots and JIT", snapshots, given),
    ):
        # A save waits until the previous save is durable, so an interval is at least as long as this wait.
        # `best_interval_s` includes this rule.
        given_s = situation.interval_s
        interval_s = (
            max(given_s, times.durable_lag_s) if given_s is not None else best_interval_s(times, interruptions)
        )
        found.append(_loss(situation, policy, interval_s, productive_share(interval_s, times, interruptions)))
    return found


def unsaved_share(situation: Situation) -> float:
    """The productive share of a job of L seconds without checkpoints: L / (M·e^(R/M)·(e^(L/M) - 1)).

    M is the mean time between two interruptions, and R is the time of a restart. The job is complete when it has
    trained for L seconds without an interruption. The denominator is the mean time until the job is complete (Daly
    2006, equation 13, with a single segment and no save at its end).
    """
    between_s = situation.interruptions.between_s
    length, restart = situation.job_s / between_s, situation.restart_s / between_s
    if length + restart > 700:
        return 0.0
    return length / (math.exp(restart) * math.expm1(length))


def _loss(situation: Situation, policy: str, interval_s: float, productive: float) -> Loss:
    hours = (1 - productive) * MONTH_S / HOUR_S
    return Loss(
        policy=policy,
        interval_s=interval_s,
        productive=productive,
        hours=hours,
        money=hours * situation.price_per_hour,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of a published text, and the figure that this module computes.

    Args:
        what: what the figure measures.
        stated: the figure in the text.
        computed: the computed figure, not rounded.
        difference: why the two figures differ; empty if they are equal.
    """

    what: str
    stated: float
    computed: float
    difference: str


def example_of_article() -> Sequence[Figure]:
    """The example of Red Hat's article on just-in-time checkpoints: 8 GPUs for 55 $ an hour, 4 interruptions in a
    week.

    Source: Red Hat Developer, "How to train LLMs efficiently with just-in-time checkpointing on OpenShift AI" (2025).
    The inputs of the article are a planned training of 72 hours, a failure that loses 3 hours, an epoch of an hour
    that is lost after 58 minutes, a grace period of 10 minutes, and 10 saves of 10 minutes each.
    """
    price, a_week = 55.0, 4
    epoch, grace = 58 / 60 * price, 10 / 60 * price
    saving = a_week * (epoch - grace)
    rounded = "rounded to a dollar"
    return (
        Figure(what="72 hours of training", stated=3960, computed=72 * price, difference=""),
        Figure(what="3 hours lost", stated=165, computed=3 * price, difference=""),
        Figure(what="3 hours lost, 4 times in a week", stated=660, computed=a_week * 3 * price, difference=""),
        Figure(what="58 minutes lost", stated=53, computed=epoch, difference=rounded),
        Figure(
            what="58 minutes lost, 4 times in a week",
            stated=213,
            computed=a_week * epoch,
            difference=f"{rounded}; the article computes with 0.97 hours, which gives $213.40",
        ),
        Figure(what="10 minutes of a grace period", stated=9, computed=grace, difference=rounded),
        Figure(what="10 minutes, 4 times in a week", stated=37, computed=a_week * grace, difference=rounded),
        Figure(what="saved in a week", stated=176, computed=saving, difference=""),
        Figure(
            what="saved in a year",
            stated=9100,
            computed=WEEKS_OF_YEAR * saving,
            difference='"about", rounded down to a hundred dollars',
        ),
        Figure(what="10 minutes of an idle cluster", stated=9, computed=10 / 60 * price, difference=rounded),
        Figure(
            what="10 saves of 10 minutes in 72 hours", stated=92, computed=10 * 10 / 60 * price, difference=rounded
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """One event of a run. docs/progress.md lists the events; the caller of this module reads them.

    Args:
        time_s: seconds since 1970.
        name: the name of the event.
        step: its step, if it has one.
        saved: its field `saved`, if it has one.
    """

    time_s: float
    name: str
    step: int | None = None
    saved: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PastInterruption:
    """One interruption of a job.

    Args:
        time_s: when the work ended, in seconds since 1970. If all processes were killed, this is the time of the last
            event before the kill. In this case the work ended a little later, and a little more work was lost.
        cause: the kind of the interruption: `preemption` if the run saved its last step, `ranks` if the run then
            resumed from memory, and `machine` in all other cases.
        trained_s: how long the ranks had trained since their start, in seconds.
        lost_s: the part of `trained_s` whose work was lost.
        down_s: the time until the ranks trained again, without `waiting_s`.
        waiting_s: after a stop with a save, the time until a launcher started. During this time, the job did not have
            its machines.
    """

    time_s: float
    cause: Cause
    trained_s: float
    lost_s: float
    down_s: float
    waiting_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHistory:
    """The interruptions of a job, and how long it has trained.

    Args:
        trained_s: seconds of training in all attempts, including lost work.
        interruptions: oldest first. An end without a later start is not an interruption.
    """

    trained_s: float
    interruptions: tuple[PastInterruption, ...]

    @property
    def lost_s(self) -> float:
        """Work that was done again."""
        return sum(past.lost_s for past in self.interruptions)

    @property
    def down_s(self) -> float:
        """The time from interruptions until the job trained again, while it had its machines."""
        return sum(past.down_s for past in self.interruptions)

    def lost_without_saves_s(self) -> float:
        """The work that these interruptions would have lost without checkpoints: all training before an interruption.

        The job would have started from step 0 each time. So it would never have trained further than in the longest
        time without an interruption.
        """
        return sum(past.trained_s for past in self.interruptions)

    def lost_with_interval_s(self, interval_s: float) -> float:
        """The work that would have been lost with a save every `interval_s` seconds, and without saves on SIGTERM.

        Raises:
            ValueError: `interval_s` is not above 0.
        """
        if not interval_s > 0:
            raise ValueError(f"interval_s is {interval_s!r}, and must be above 0")
        return sum(past.trained_s % interval_s for past in self.interruptions)


_ENDS = {"failed", "interrupted", "signal_received", "stop_requested"}
_STARTS = {"started", "restarted"}


def read_history(events: Iterable[Happened]) -> JobHistory:
    """The history of a job from its events, in any order. Events of unknown names only show that a process was
    alive."""
    interruptions: list[PastInterruption] = []
    trained_s = 0.0
    began_s: float | None = None
    stopped_s: float | None = None
    launched_s: float | None = None
    alive_s = 0.0
    is_saved = has_finished = is_starting = False
    resumed: tuple[int, bool] = (0, False)
    taken: dict[int, float] = {}
    """For each step, the time at which its state was captured."""
    for event in sorted(events, key=lambda happened: happened.time_s):
        if event.name == "attempt_started":
            if began_s is not None and not has_finished:
                ended_s = max(began_s, alive_s if stopped_s is None else stopped_s)
                step, is_of_memory = resumed
                held_s = ended_s if is_saved else min(ended_s, max(began_s, taken.get(step, began_s)))
                again_s = (
                    ended_s if launched_s is None or not is_saved else min(event.time_s, max(ended_s, launched_s))
                )
                # If the captured state is older than this start of the ranks, all work since the start is lost.
                interruptions.append(
                    PastInterruption(
                        time_s=ended_s,
                        cause=Cause.PREEMPTION if is_saved else Cause.RANKS if is_of_memory else Cause.MACHINE,
                        trained_s=ended_s - began_s,
                        lost_s=ended_s - held_s,
                        down_s=max(0.0, event.time_s - again_s),
                        waiting_s=again_s - ended_s,
                    )
                )
                trained_s += ended_s - began_s
            began_s = alive_s = event.time_s
            stopped_s, launched_s, is_saved, has_finished, is_starting = None, None, False, False, False
            resumed = (0, False)
        elif event.name in {"resumed", "resumed_from_memory"}:
            resumed, is_starting = (event.step or 0, event.name == "resumed_from_memory"), True
        elif event.name in {"snapshot_taken", "saved"} and event.step is not None:
            taken.setdefault(event.step, event.time_s)
        if event.name in _ENDS and stopped_s is None:
            stopped_s = event.time_s
        if event.name == "interrupted" and event.saved:
            is_saved = True
            stopped_s = event.time_s
        if event.name == "finished":
            has_finished = True
        if event.name == "started" and launched_s is None:
            launched_s = event.time_s
        is_starting |= event.name in _STARTS
        if not is_starting and stopped_s is None:
            alive_s = event.time_s
    if began_s is not None:
        trained_s += max(0.0, (alive_s if stopped_s is None else stopped_s) - began_s)
    return JobHistory(trained_s=trained_s, interruptions=tuple(interruptions))
