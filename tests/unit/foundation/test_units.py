"""Tests of safepoint.foundation.units: no text has a number that belongs to the next unit."""

import re

import pytest

from safepoint.foundation.units import format_age, format_bytes, format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((9.994, "9.99 s"), (9.996, "10 s"), (59.4, "59 s"), (59.7, "1 m 00 s"), (59.5, "1 m 00 s")),
        *((119.6, "2 m 00 s"), (3599.4, "59 m 59 s"), (3599.6, "1 h 00 m"), (7199, "1 h 59 m")),
    ],
)
def test_durations_near_the_next_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        *((999, "999 B"), (1000, "1.0 kB"), (99_940, "99.9 kB"), (99_960, "100 kB"), (999_499, "999 kB")),
        *((999_500, "1.0 MB"), (999_999, "1.0 MB"), (999_999_999, "1.0 GB"), (999_999_999_999, "1.0 TB")),
        *((999_999_999_999_999, "1000 TB"), (99_960_000_000, "100 GB")),
    ],
)
def test_sizes_near_the_next_unit(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(59.7, "59 s"), (60, "1 m"), (3599.9, "59 m"), (86399.9, "23 h")])
def test_ages_near_the_next_unit(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


def test_every_number_fits_its_unit() -> None:
    """For sizes and durations of all orders of magnitude, just below and above each power of ten and 60."""
    for base in (10, 60):
        for power in range(1, 16 if base == 10 else 3):
            for factor in (0.9949, 0.995, 0.99949, 0.9996, 0.99999, 1, 1.00001):
                value = factor * base**power
                size = re.fullmatch(r"([0-9.]+) (B|kB|MB|GB|TB)", format_bytes(round(value)))
                assert size is not None
                assert float(size[1]) < 1000 or size[2] == "TB", value
                duration = re.fullmatch(r"([0-9.]+) s|(\d+) m (\d\d) s|(\d+) h (\d\d) m", format_duration(value))
                assert duration is not None
                assert all(float(number) < 60 for number in duration.group(1, 2, 3, 5) if number), value
