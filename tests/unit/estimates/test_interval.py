"""The best interval between checkpoints, against other formulas and a simulation."""

import dataclasses
import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from safepoint.estimates.interval import (
    SHORTEST_STEP_S,
    Interruptions,
    SaveTimes,
    best_interval_s,
    blocking_optimum_s,
    daly_s,
    productive_share,
    young_s,
)

HOUR_S = 3600.0
seconds = st.floats(0.001, 1e4)
shares = st.floats(0, 1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[float, SaveTimes, Interruptions]:
    stall_s = draw(st.floats(0.001, 600))
    times = SaveTimes(
        stall_s=stall_s,
        durable_s=stall_s + draw(st.floats(0, 600)),
        copied_s=stall_s + draw(st.floats(0, 5)),
        restart_s=draw(st.floats(0, 600)),
        snapshot_every_s=draw(st.none() | st.floats(1, 600)),
        snapshot_stall_s=draw(st.floats(0, 1)),
    )
    announced = draw(shares)
    interruptions = Interruptions(
        between_s=draw(st.floats(100, 1e7)), announced=announced, ranks_only=draw(st.floats(0, 1 - announced))
    )
    return draw(st.floats(1, 1e5)), times, interruptions


@pytest.mark.parametrize("stall_s", [1e-6, 0.01, 1.0, 60.0, 600.0])
def test_the_exact_optimum_is_near_daly_and_young(stall_s: float) -> None:
    """Daly's series is its expansion: the cheaper a save, the closer they are."""
    best_s = blocking_optimum_s(stall_s, 4 * HOUR_S)
    assert best_s == pytest.approx(daly_s(stall_s, 4 * HOUR_S), rel=2e-3 * stall_s / 600 + 1e-7)
    assert best_s == pytest.approx(young_s(stall_s, 4 * HOUR_S), rel=0.2)
    assert 1 - best_s / (4 * HOUR_S) == pytest.approx(math.exp(-(best_s + stall_s) / (4 * HOUR_S)), rel=1e-12)


def test_the_two_searches_agree() -> None:
    """With hardly any announced interruption, the search over all terms finds what the closed form finds."""
    times = SaveTimes(stall_s=5, durable_s=20, restart_s=60)
    nearly = best_interval_s(times, Interruptions(between_s=HOUR_S, announced=1e-12))
    assert nearly == pytest.approx(blocking_optimum_s(5, HOUR_S), rel=1e-3)


def test_a_save_that_is_durable_late_moves_the_share_and_not_the_optimum() -> None:
    interruptions = Interruptions(between_s=HOUR_S)
    early, late = SaveTimes(stall_s=5), SaveTimes(stall_s=5, durable_s=65)
    best_s = best_interval_s(early, interruptions)
    assert best_interval_s(late, interruptions) == best_s
    shares = [productive_share(best_s, times, interruptions) for times in (early, late)]
    assert shares[1] / shares[0] == pytest.approx(math.exp(-60 / HOUR_S))


def test_saves_are_not_more_frequent_than_the_disk() -> None:
    assert best_interval_s(SaveTimes(stall_s=0.01, durable_s=100.01), Interruptions(between_s=HOUR_S)) == 100.0


@pytest.mark.parametrize("between_s", [1.0, HOUR_S, 3e9])
@pytest.mark.parametrize("announced", [0.0, 0.5])
def test_saves_without_a_stall_are_best_after_each_step(between_s: float, announced: float) -> None:
    interruptions = Interruptions(between_s=between_s, announced=announced)
    assert 0 < best_interval_s(SaveTimes(stall_s=0), interruptions) <= SHORTEST_STEP_S
    assert best_interval_s(SaveTimes(stall_s=1e-6), Interruptions(between_s=HOUR_S)) > SHORTEST_STEP_S


def test_with_announcements_only_no_periodic_save_pays() -> None:
    times = SaveTimes(stall_s=1, announced_restart_s=30)
    assert best_interval_s(times, Interruptions(between_s=HOUR_S, announced=1)) == math.inf
    share = productive_share(math.inf, times, Interruptions(between_s=HOUR_S, announced=1))
    assert share == pytest.approx(math.exp(-30 / HOUR_S))


def _simulated(interval_s: float, times: SaveTimes, interruptions: Interruptions, seed: int) -> float:
    """The share, by brute force: every save is an event of its own."""
    generator = random.Random(seed)
    kept_s = took_s = 0.0
    restart_s = 0.0
    for _ in range(60_000):
        left_s = generator.expovariate(1 / interruptions.between_s)
        kind = generator.random()
        took_s += left_s
        ran_s = left_s - restart_s
        kinds = (interruptions.announced, interruptions.announced + interruptions.ranks_only)
        now = 0 if kind < kinds[0] else 1 if kind < kinds[1] else 2
        if ran_s > 0:
            cycle_s = interval_s + times.stall_s
            if now == 0:
                kept_s += ran_s // cycle_s * interval_s + min(ran_s % cycle_s, interval_s)
            else:
                late_s = times.copied_lag_s if now == 1 else times.durable_lag_s
                kept_s += max(0.0, ran_s - late_s) // cycle_s * interval_s
        own = (times.announced_restart_s, times.ranks_restart_s, None)[now]
        restart_s = times.restart_s if own is None else own
    return kept_s / took_s


@pytest.mark.parametrize(
    ("announced", "ranks_only", "interval_s"),
    [(0, 0, 300), (0.5, 0.2, 300), (0.2, 0.7, 900), (0, 1, 60), (0.9, 0, 20)],
)
def test_the_share_is_that_of_a_simulation(announced: float, ranks_only: float, interval_s: float) -> None:
    times = SaveTimes(stall_s=4, durable_s=40, copied_s=6, restart_s=120, announced_restart_s=60, ranks_restart_s=20)
    interruptions = Interruptions(between_s=1200, announced=announced, ranks_only=ranks_only)
    expected = productive_share(interval_s, times, interruptions)
    assert _simulated(interval_s, times, interruptions, seed=7) == pytest.approx(expected, rel=0.01)


@given(cases(), st.floats(0.2, 5))
def test_the_optimum_is_a_maximum_of_the_share(case: tuple[float, SaveTimes, Interruptions], factor: float) -> None:
    _, times, interruptions = case
    best_s = best_interval_s(times, interruptions)
    other_s = (best_s if best_s < math.inf else 600.0) * factor
    assume(other_s >= times.durable_lag_s)
    best = productive_share(best_s, times, interruptions)
    assert productive_share(other_s, times, interruptions) <= best * (1 + 1e-6)


@given(cases(), st.floats(1, 10))
def test_more_interruptions_never_raise_the_share(
    case: tuple[float, SaveTimes, Interruptions], factor: float
) -> None:
    """If a restart takes at least as long as the stall of a save. Otherwise an interruption may cost less than the
    next periodic save, which it postpones: the interval begins again."""
    interval_s, times, interruptions = case
    times = dataclasses.replace(times, restart_s=times.stall_s + times.restart_s)
    more = dataclasses.replace(interruptions, between_s=interruptions.between_s / factor)
    assert productive_share(interval_s, times, more) <= productive_share(interval_s, times, interruptions) + 1e-9


@given(cases(), st.floats(0, 1000))
def test_longer_restarts_and_stalls_and_later_saves_never_raise_the_share(
    case: tuple[float, SaveTimes, Interruptions], more_s: float
) -> None:
    interval_s, times, interruptions = case
    share = productive_share(interval_s, times, interruptions)
    assert 0 <= share <= 1
    durable_s = times.durable_s or 0.0
    for worse in (
        dataclasses.replace(times, restart_s=times.restart_s + more_s),
        dataclasses.replace(times, durable_s=durable_s + more_s),
        dataclasses.replace(
            times,
            stall_s=times.stall_s + more_s,
            durable_s=durable_s + more_s,
            copied_s=(times.copied_s or 0.0) + more_s,
        ),
    ):
        assert productive_share(interval_s, worse, interruptions) <= share + 1e-12


@given(cases())
def test_what_is_kept_more_often_never_lowers_the_share(case: tuple[float, SaveTimes, Interruptions]) -> None:
    """An announced interruption keeps at least what one of the ranks keeps, if the saves take no longer."""
    interval_s, times, interruptions = case
    times = dataclasses.replace(times, snapshot_every_s=None)
    both = min(1.0, interruptions.announced + interruptions.ranks_only)
    moved = dataclasses.replace(interruptions, announced=both, ranks_only=0.0)
    assert productive_share(interval_s, times, moved) >= productive_share(interval_s, times, interruptions) - 1e-12


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_values_out_of_range_are_refused(value: float) -> None:
    for field in dataclasses.fields(SaveTimes):
        with pytest.raises(ValueError, match=field.name):
            SaveTimes(**{"stall_s": 1.0, field.name: value})
    with pytest.raises(ValueError, match="between_s"):
        Interruptions(between_s=value)
    for name in ("announced", "ranks_only"):
        with pytest.raises(ValueError, match=name):
            Interruptions(between_s=1, **{name: value})
    with pytest.raises(ValueError, match="add up"):
        Interruptions(between_s=1, announced=0.6, ranks_only=0.6)
    with pytest.raises(ValueError, match="durable_s"):
        SaveTimes(stall_s=2, durable_s=1)
    with pytest.raises(ValueError, match="snapshot_every_s"):
        SaveTimes(stall_s=2, snapshot_every_s=0)
    with pytest.raises(ValueError, match="interval_s"):
        productive_share(-abs(value), SaveTimes(stall_s=1), Interruptions(between_s=1))
