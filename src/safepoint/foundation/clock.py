"""Time, in one place, so that tests can replace it."""

import time
from datetime import UTC, datetime


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


def as_utc(time_s: float) -> str:
    """A time in seconds since 1970, in the form of `utc_now`."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_utc(text: str) -> float:
    """Seconds since 1970 of a time that `utc_now` wrote.

    Raises:
        ValueError: `text` is not a time in this format.
    """
    return datetime.fromisoformat(text).timestamp()
