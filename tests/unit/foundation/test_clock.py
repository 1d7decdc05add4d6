"""Tests of safepoint.foundation.clock."""

import time
from collections.abc import Generator
from datetime import UTC, timedelta

import pytest

from safepoint.foundation import clock


@pytest.fixture(params=["UTC", "Asia/Tokyo", "America/New_York"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """The time zone of the machine."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize(
    "text",
    [
        *("2026-01-31T09:30:00.125Z", "2026-01-31T10:30:00.125+01:00"),
        *("2026-01-31T09:30:00.125", "2026-01-31 09:30:00.125", "20260131T093000.125"),
    ],
)
def test_a_time_without_a_zone_is_in_utc(text: str) -> None:
    """Files and servers on other machines write times; the zone of the reader does not change them."""
    assert clock.parse_utc(text) == 1769851800.125
    assert clock.parse_date(text).astimezone(UTC).isoformat() == "2026-01-31T09:30:00.125000+00:00"


@pytest.mark.usefixtures("zone")
def test_a_day_begins_at_midnight_in_utc() -> None:
    assert clock.parse_utc("2026-01-31") == 1769817600
    assert clock.parse_date("2026-01-31").utcoffset() == timedelta(0)


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01", "09:30"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match=r"isoformat|month"):
        clock.parse_utc(text)
    assert clock.parse_utc_or_inf(text) == float("inf")


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"])
def test_a_time_at_either_end(text: str) -> None:
    """It has a number, or is refused; the zone of the machine does not matter."""
    assert abs(clock.parse_utc(text)) < 1e12
