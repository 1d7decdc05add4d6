"""What interruptions cost: the example of an article, a month under each policy, and the history of a job."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.estimates.interval import Interruptions
from safepoint.planning.costs import (
    WEEK_S,
    Happened,
    JobHistory,
    Situation,
    example_of_article,
    losses,
    read_history,
    unsaved_share,
)
from safepoint.planning.failures import Cause

HOUR_S = 3600.0
ARTICLE = Situation(
    price_per_hour=55,
    interruptions=Interruptions(between_s=WEEK_S / 4, announced=1),
    job_s=72 * HOUR_S,
    interval_s=HOUR_S,
    notice_save_s=600,
)


@pytest.mark.parametrize(
    ("what", "stated", "decimals"),
    [
        ("72 hours of training", 3960, 0),
        ("3 hours lost", 165, 0),
        ("3 hours lost, 4 times in a week", 660, 0),
        ("58 minutes lost", 53, 0),
        ("58 minutes lost, 4 times in a week", 213, 0),
        ("10 minutes of a grace period", 9, 0),
        ("10 minutes, 4 times in a week", 37, 0),
        ("saved in a week", 176, 0),
        ("saved in a year", 9100, -2),
        ("10 minutes of an idle cluster", 9, 0),
        ("10 saves of 10 minutes in 72 hours", 92, 0),
    ],
)
def test_the_article_s_example_figure_by_figure(what: str, stated: float, decimals: int) -> None:
    """Every figure that it states is the computed one, rounded; the year is "about", and rounded down."""
    (figure,) = [one for one in example_of_article() if one.what == what]
    assert figure.stated == stated
    if decimals:
        assert math.floor(figure.computed / 100) * 100 == stated
    else:
        assert round(figure.computed) == stated
    assert bool(figure.difference) == (figure.stated != pytest.approx(figure.computed))


def test_a_month_of_the_article_s_job() -> None:
    """The same inputs by the exact formulas: the article loses 58 of 60 minutes; on average it is a half."""
    by_policy = {loss.policy: loss for loss in losses(ARTICLE)}
    weeks = 365.25 / 12 / 7
    periodic = by_policy["periodic"]
    assert periodic.money / weeks == pytest.approx(4 * 0.5 * 55, rel=0.02)
    assert periodic.money / weeks < 213 / 1.9
    jit = by_policy["periodic and JIT"]
    # 4 times 10 minutes are 36.67 $. A week of wall time has a little less than 4 interruptions of running time.
    assert jit.money / weeks == pytest.approx(36.67, rel=0.01)
    assert [loss.policy for loss in sorted(by_policy.values(), key=lambda loss: -loss.money)][:2] == [
        "no checkpoints",
        "periodic",
    ]


def test_no_policy_saves_more_often_than_its_saves_are_durable() -> None:
    """A save waits for the one before it, also if the interval is given."""
    slow = dataclasses.replace(ARTICLE, stall_s=60, durable_s=5 * HOUR_S)
    for announced in (0.0, 0.5, 1.0):
        interruptions = dataclasses.replace(ARTICLE.interruptions, announced=announced)
        found = losses(dataclasses.replace(slow, interruptions=interruptions))
        intervals_s = {loss.policy: loss.interval_s for loss in found}
        assert intervals_s["snapshots and JIT"] == 5 * HOUR_S - 60
        assert intervals_s["periodic"] == HOUR_S
        same = losses(dataclasses.replace(slow, interruptions=interruptions, interval_s=5 * HOUR_S - 60))
        assert found[-1] == same[-1]


def test_a_job_without_checkpoints() -> None:
    """Rare interruptions lose half of the job each; frequent ones let it never end."""
    rare = dataclasses.replace(ARTICLE, interruptions=Interruptions(between_s=1e9))
    assert 1 - unsaved_share(rare) == pytest.approx(rare.job_s / 2 / 1e9, rel=0.01)
    slow = dataclasses.replace(ARTICLE, restart_s=ARTICLE.interruptions.between_s)
    assert unsaved_share(slow) == pytest.approx(unsaved_share(ARTICLE) / math.e), "e^(R/M) tries until a restart ends"
    never = dataclasses.replace(ARTICLE, interruptions=Interruptions(between_s=100))
    assert unsaved_share(never) == 0


@given(st.floats(1e3, 1e7), st.floats(0, 1), st.floats(0, 1), st.floats(0, 600), st.floats(1.0, 5))
def test_more_interruptions_and_longer_restarts_never_cost_less(
    between_s: float, announced: float, ranks_only: float, restart_s: float, factor: float
) -> None:
    situation = Situation(
        price_per_hour=55,
        interruptions=Interruptions(
            between_s=between_s, announced=announced, ranks_only=ranks_only * (1 - announced)
        ),
        job_s=72 * HOUR_S,
        restart_s=restart_s,
        blocking_s=60,
        notice_save_s=30,
        stall_s=0.01,
        durable_s=60,
        copied_s=1,
    )
    more = dataclasses.replace(
        situation, interruptions=dataclasses.replace(situation.interruptions, between_s=between_s / factor)
    )
    slower = dataclasses.replace(situation, restart_s=restart_s * factor)
    for before, after, slow in zip(losses(situation), losses(more), losses(slower), strict=True):
        assert after.money >= before.money * (1 - 1e-9) - 1e-6
        assert slow.money >= before.money * (1 - 1e-9) - 1e-6
        assert before.hours == pytest.approx(before.money / 55)


def happened(*events: tuple[float, str, dict[str, object]]) -> list[Happened]:
    return [Happened(time_s=time_s, name=name, **fields) for time_s, name, fields in events]  # pyright: ignore


def test_the_history_of_a_job() -> None:
    """A kill of a rank, a stop that was saved, and the loss of everything; as the events of a real run are."""
    history = read_history(
        happened(
            (0, "started", {}),
            (10, "attempt_started", {}),
            (30, "snapshot_taken", {"step": 20}),
            (31, "saved", {"step": 20}),
            (40, "snapshot_taken", {"step": 30}),
            (43, "failed", {}),
            (43, "restarted", {}),
            (44, "saved", {"step": 30}),
            (54, "resumed_from_memory", {"step": 30}),
            (55, "attempt_started", {}),
            (95, "signal_received", {}),
            (96, "snapshot_taken", {"step": 71}),
            (97, "saved", {"step": 71}),
            (98, "interrupted", {"step": 71, "saved": True}),
            (100, "started", {}),
            (110, "resumed", {"step": 71}),
            (111, "attempt_started", {}),
            (130, "snapshot_taken", {"step": 90}),
            (132, "saved", {"step": 90}),
            (151, "snapshot_taken", {"step": 110}),
            (160, "started", {}),
            (170, "resumed", {"step": 90}),
            (172, "attempt_started", {}),
            (200, "finished", {}),
        )
    )
    kinds = [(past.cause, past.trained_s, past.lost_s, past.down_s, past.waiting_s) for past in history.interruptions]
    assert kinds == [
        (Cause.RANKS, 33, 3, 12, 0),
        (Cause.PREEMPTION, 43, 0, 11, 2),
        (Cause.MACHINE, 40, 21, 21, 0),
    ]
    assert history.trained_s == 33 + 43 + 40 + 28
    assert (history.lost_s, history.down_s) == (24, 44)
    assert history.lost_without_saves_s() == 116
    assert history.lost_with_interval_s(20) == 13 + 3 + 0
    with pytest.raises(ValueError, match="interval_s"):
        history.lost_with_interval_s(0)


def test_a_start_from_step_0_loses_all() -> None:
    history = read_history(
        happened((5, "attempt_started", {}), (50, "failed", {}), (60, "attempt_started", {}), (61, "finished", {}))
    )
    assert [past.lost_s for past in history.interruptions] == [45]


def test_a_history_of_nothing() -> None:
    assert read_history([]) == JobHistory(trained_s=0.0, interruptions=())


names = st.sampled_from(
    ["started", "attempt_started", "resumed", "saved", "snapshot_taken", "failed", "interrupted", "finished", "other"]
)


@given(st.lists(st.builds(Happened, time_s=st.floats(0, 1e9), name=names, step=st.none() | st.integers(0, 9))))
def test_any_events_give_times_that_are_possible(events: list[Happened]) -> None:
    history = read_history(events)
    assert history.trained_s >= 0
    for past in history.interruptions:
        assert 0 <= past.lost_s <= past.trained_s
        assert min(past.down_s, past.waiting_s) >= 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_values_out_of_range_are_refused(value: float) -> None:
    for name in ("price_per_hour", "restart_s", "job_s", "interval_s", "durable_s"):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(ARTICLE, **{name: value})
