"""Time, in one place, so that tests can replace it."""

import math
import time
from datetime import UTC, datetime

_EARLIEST_S = datetime(1, 1, 2, tzinfo=UTC).timestamp()
_LATEST_S = datetime(9999, 12, 30, tzinfo=UTC).timestamp()
"""The range of dates. A day is left at both ends, so that a date can be converted to any time zone."""


def monotonic_s() -> float:
    """Seconds on a clock that never goes back; only differences are meaningful."""
    return time.monotonic()


def wall_s() -> float:
    """Seconds since 1970, comparable with `time.time`."""
    return time.time()


def sleep(seconds: float) -> None:
    """Sleep; for polling loops and locks, never in a training step."""
    time.sleep(seconds)


def utc_now() -> str:
    """The wall clock as RFC 3339 UTC with milliseconds, such as `2026-01-31T09:30:00.125Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def date_of(time_s: float) -> datetime:
    """The date in UTC of a time in seconds since 1970.

    A file system may store times before year 1 and after year 9999. For these the result is the first or last date.
    For NaN the result is the start of 1970.
    """
    is_number = not math.isnan(time_s)
    return datetime.fromtimestamp(min(max(time_s, _EARLIEST_S), _LATEST_S) if is_number else 0.0, UTC)


def as_utc(time_s: float) -> str:
    """A time in seconds since 1970, in the form of `utc_now`; see `date_of` for times that are out of range."""
    return date_of(time_s).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_date(text: str) -> datetime:
    """The time that `utc_now`, another program or a server has written, with its time zone.

    A time without a zone is a time in UTC, so that it means the same on every machine.

    Raises:
        ValueError: `text` is not a time in a format of ISO 8601.
    """
    date = datetime.fromisoformat(text)
    return date if date.tzinfo is not None else date.replace(tzinfo=UTC)


def parse_utc(text: str) -> float:
    """Seconds since 1970 of a time; see `parse_date`.

    Raises:
        ValueError: `text` is not a time in a format of ISO 8601, or the time is out of range.
    """
    try:
        return parse_date(text).timestamp()
    except OverflowError as error:
        raise ValueError(f"the time {text!r} is out of range") from error


def parse_utc_or_inf(text: str) -> float:
    """Like `parse_utc`, but infinite where `parse_utc` raises an error."""
    try:
        return parse_utc(text)
    except ValueError:
        return float("inf")
