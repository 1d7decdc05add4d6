"""The page of costs: prices of GPUs and of processor cores, and none where the price is not known."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safepoint.dashboard.pages import overviews
from safepoint.dashboard.reading import cost_view
from safepoint.dashboard.settings import DashboardSettings
from safepoint.errors import NotFoundError, UsageError
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


def test_older_jobs_are_left_out_and_counted(
    home: Path, start: Callable[..., Dashboard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page says how many. A job that is deleted while the page is read takes no other with it."""
    for name in ("one", "two", "three"):
        write_sample(home, Sample(name=name, state=JobState.COMPLETE, step=3))
    dashboard = start()
    dashboard.visitor()
    assert "left out" not in dashboard.get("/costs").text
    for module in (cost_view, overviews):
        monkeypatch.setattr(module, "MOST_JOBS", 2)
    page = dashboard.get("/costs").text
    assert "Only the newest 2 jobs of each place are counted here; 1 older job is left out." in page
    assert len(re.findall(r'data-label="Interruptions"', page)) == 2
    monkeypatch.setattr(cost_view, "MOST_JOBS", 200)
    cost = cost_view._cost

    def deleted(reader: Any, one: Any, price_of: Any) -> Any:
        if one.job.name == "two":
            raise NotFoundError("there is no job two")
        return cost(reader, one, price_of)

    monkeypatch.setattr(cost_view, "_cost", deleted)
    assert {one["job"] for one in dashboard.get("/costs.json").json()} == {"one", "three"}
