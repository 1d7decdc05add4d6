"""When snapshots are taken in memory only."""

import pytest

from safepoint.estimates.cadence import Cadence


def test_nobody_asked() -> None:
    """Without the option there are none."""
    assert not Cadence(None).is_due(step=5, last=None, cost_s=0.01, step_s=1)


def test_every_so_many_steps() -> None:
    """The first at once, then by number; a save counts as a snapshot."""
    cadence = Cadence("3")
    assert cadence.is_due(step=1, last=None, cost_s=None, step_s=0)
    assert [step for step in range(2, 9) if cadence.is_due(step=step, last=4, cost_s=0.5, step_s=0.1)] == [7, 8]
    assert not cadence.is_due(step=4, last=4, cost_s=0.5, step_s=0.1)


@pytest.mark.parametrize(
    ("cost_s", "step_s", "interval"),
    [(None, 0.5, 1), (0.01, 0, 1), (0.001, 1, 1), (0.02, 0.5, 4), (0.021, 0.5, 5), (0.5, 0.1, 500)],
)
def test_as_often_as_costs_less_than_a_hundredth(cost_s: float | None, step_s: float, interval: int) -> None:
    """Cost over interval is at most 1 % of the steps' time; unknown costs are measured as soon as can be."""
    assert Cadence("auto").interval(cost_s=cost_s, step_s=step_s) == interval
    if cost_s and step_s:
        assert cost_s / (interval * step_s) <= 0.01
