"""The page of costs: prices of GPUs and of processor cores, and none where the price is not known."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.dashboard.settings import DashboardSettings
from safepoint.errors import UsageError
from safepoint.jobs.model.states import JobState
from tests.support.dashboards import Sample, write_sample
from tests.unit.dashboard.conftest import Dashboard


def test_each_unit_has_a_price() -> None:
    """A rank on a cluster counts as a GPU, or as a core if only that has a price."""
    both = DashboardSettings(gpu_price=2.5, cpu_price=0.04)
    assert [both.price_of(unit) for unit in ("GPU", "CPU", "rank")] == [2.5, 0.04, 2.5]
    cores = DashboardSettings(cpu_price=0.04)
    assert [cores.price_of(unit) for unit in ("GPU", "CPU", "rank")] == [0.0, 0.04, 0.04]
    for price in (float("nan"), float("inf"), -1.0):
        with pytest.raises(UsageError, match="is not a price; nothing was started"):
            DashboardSettings(gpu_price=price)


def test_money_is_shown_for_a_known_price(home: Path, start: Callable[..., Dashboard]) -> None:
    """The sample has two cores on one node; its document has the price of both."""
    write_sample(home, Sample(name="tiny", state=JobState.COMPLETE, step=30, num_points=30))
    for options, is_shown in (({"cpu_price": 100.0}, True), ({"gpu_price": 100.0}, False), ({}, False)):
        dashboard = start(**options)
        dashboard.visitor()
        page = dashboard.get("/costs").text
        assert ("CPU hours held <small>100.00 each</small>" in page) == is_shown
        assert ("--gpu-price" in page) == (not is_shown)
    assert re.search(r"<code>\[dashboard\]</code>", page)
