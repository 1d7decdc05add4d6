"""How many saves fit, and for how long; and when that is reported."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.estimates.forecast import Alarm, Change, Demand, Forecast, Trend, forecast

GB = 10**9


def trend(per_s: float, *, span_s: float = 600, count: int = 20) -> Trend:
    found = Trend()
    for index in range(count):
        time_s = span_s * index / (count - 1)
        found.add(time_s, round(per_s * time_s))
    return found


def test_full_in_three_saves() -> None:
    """Without retention each save adds a checkpoint."""
    demand = Demand(needed=10 * GB, kept=10 * GB, interval_s=800, next_s=800)
    assert forecast(35 * GB, demand) == Forecast(saves_left=3, remaining_s=3200)
    assert forecast(9 * GB, demand) == Forecast(saves_left=0, remaining_s=0)


def test_retention_ends_the_growth() -> None:
    """Two more saves add a checkpoint, later ones replace one."""
    demand = Demand(needed=10, kept=10, saves_until_limit=2, interval_s=60)
    assert forecast(30, demand) == Forecast()
    assert forecast(29, demand).saves_left == 2
    assert (
        forecast(30 + 4, Demand(needed=10, kept=10, saves_until_limit=2, kept_later=1, interval_s=60)).saves_left == 7
    )


def test_other_programs_fill_the_disk() -> None:
    """Retention is at its limit, and only the others use up room."""
    demand = Demand(needed=10 * GB, kept=10 * GB, saves_until_limit=0, interval_s=600, next_s=300)
    found = forecast(16 * GB, demand, trend(2e6))
    assert found.saves_left == 5
    assert found.remaining_s == 300 + 5 * 600
    assert forecast(16 * GB, demand, Trend()) == Forecast()


def test_without_saves_the_time_is_known() -> None:
    """In the temporary folder nothing stays: only the others count."""
    found = forecast(100 * GB, Demand(needed=40 * GB), trend(1e8))
    assert (found.saves_left, found.remaining_s) == (None, pytest.approx(600))


def test_a_short_observation_is_not_extrapolated_far() -> None:
    """What was seen for a second says nothing about the next hour."""
    demand = Demand(needed=10 * GB)
    assert forecast(100 * GB, demand, trend(30e6, span_s=1)) == Forecast()
    assert forecast(100 * GB, demand, trend(30e6)).remaining_s == pytest.approx(3000)


def test_a_trend_ignores_jumps() -> None:
    """A large file that is written and deleted again and again does not look like growth."""
    found = Trend()
    for index in range(40):
        found.add(10.0 * index, GB * (index % 2) + index)
    assert found.per_s < 2 * GB / 400
    assert Trend().per_s == 0
    assert trend(-5).per_s == 0


def test_a_clock_that_stands_still_adds_no_sample() -> None:
    found = Trend()
    for _ in range(10):
        found.add(5.0, 100)
    assert (found.per_s, found.span_s) == (0, 0)


amounts = st.integers(0, 10**15)
rates = st.floats(0, 1e12)
demands = st.builds(
    Demand,
    needed=amounts,
    kept=amounts,
    saves_until_limit=st.none() | st.integers(0, 1000),
    kept_later=st.floats(0, 1e15),
    interval_s=st.none() | st.floats(1e-3, 1e6),
    next_s=st.floats(0, 1e6),
)


def saves(found: Forecast) -> float:
    return math.inf if found.saves_left is None else found.saves_left


def time_s(found: Forecast) -> float:
    return math.inf if found.remaining_s is None else found.remaining_s


@given(free=amounts, more=amounts, demand=demands, per_s=rates)
def test_more_room_lasts_longer(free: int, more: int, demand: Demand, per_s: float) -> None:
    """Never fewer saves, and never less time."""
    for others in (None, trend(per_s)):
        small, large = forecast(free, demand, others), forecast(free + more, demand, others)
        assert saves(small) <= saves(large)
        assert time_s(small) <= time_s(large) * (1 + 1e-9)


@given(free=amounts, demand=demands, per_s=rates, more_per_s=rates)
def test_more_growth_never_helps(free: int, demand: Demand, per_s: float, more_per_s: float) -> None:
    """With a long observation."""
    slow = forecast(free, demand, trend(per_s, span_s=1e6))
    fast = forecast(free, demand, trend(per_s + more_per_s, span_s=1e6))
    if slow.remaining_s is not None and fast.remaining_s is not None:
        assert saves(fast) <= saves(slow)


@given(free=amounts, demand=demands)
def test_as_many_saves_fit_as_are_forecast(free: int, demand: Demand) -> None:
    """The sum of all saves one by one, without rounding, agrees with the formula, which rounds."""
    found = forecast(free, demand)
    left, count, limit = Fraction(free), 0, demand.saves_until_limit
    while left >= demand.needed and count < 50:
        left -= Fraction(demand.kept if limit is None or count < limit else demand.kept_later)
        count += 1
    forecast_count = min(50, saves(found))
    assert abs(count - forecast_count) <= 1 if demand.kept_later else count == forecast_count


LOW, NONE = Forecast(saves_left=3, remaining_s=1200), Forecast(saves_left=50, remaining_s=9000)
OUT = Forecast(saves_left=0, remaining_s=0)


def test_an_alarm_warns_once_and_again_when_it_is_worse() -> None:
    """Then every half hour; a minute of room ends it."""
    alarm = Alarm()
    assert alarm.update(0, NONE) is Change.NONE
    assert alarm.update(10, LOW) is Change.LOW
    assert alarm.update(20, LOW) is Change.NONE
    assert alarm.update(30, OUT) is Change.LOW
    assert alarm.update(40, LOW) is Change.NONE
    assert alarm.update(1900, LOW) is Change.LOW
    assert alarm.is_low
    assert alarm.update(1910, NONE) is Change.NONE
    assert alarm.update(1971, NONE) is Change.REGAINED
    assert not alarm.is_low
    assert alarm.update(1980, LOW) is Change.LOW


def test_an_alarm_does_not_follow_every_jump() -> None:
    """Free space that jumps up and down for an hour gives two reports."""
    alarm = Alarm()
    changes = [alarm.update(5.0 * index, OUT if index % 3 else NONE) for index in range(720)]
    assert [change for change in changes if change is not Change.NONE] == [Change.LOW] * 2


@pytest.mark.parametrize(
    ("found", "is_low"),
    [
        (Forecast(), False),
        (Forecast(saves_left=4), False),
        (Forecast(saves_left=3), True),
        (Forecast(saves_left=100, remaining_s=3000), True),
        (Forecast(remaining_s=3700), False),
    ],
)
def test_early_means_three_saves_or_an_hour(found: Forecast, is_low: bool) -> None:
    assert (Alarm().update(0, found) is Change.LOW) == is_low
