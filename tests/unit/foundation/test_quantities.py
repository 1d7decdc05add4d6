"""Quantities as people write them: read exactly, or refused by name."""

import pytest

from safepoint.foundation.quantities import parse_bytes, parse_count, parse_duration, parse_whole


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("1.5h", 5400), (" 2d ", 172800), ("0s", 0)]
)
def test_times(text: str, seconds: float) -> None:
    """Several parts add up."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "10 m", "-1m", "1m30", "1e3s", "soon", "10min", "\u0661m"])
def test_what_is_no_time(text: str) -> None:
    """A number without a unit is none: minutes would be as good a guess as seconds."""
    with pytest.raises(ValueError, match="is not a time"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8Gi", 8 << 30),
        ("8G", 8_000_000_000),
        ("1.5Ki", 1536),
        ("500k", 500_000),
        ("500K", 500_000),
        ("1Ti", 1 << 40),
        ("123", 123),
        (456, 456),
        ("0.3", 1),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    """As Kubernetes reads them; nothing is lost in a float."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "8 Gi", "8GiB", "8gi", "-1", "1e3", "Gi", "8Xi", -1])
def test_what_is_no_size(text: str | int) -> None:
    """The message names it."""
    with pytest.raises(ValueError, match=f"{text!r} is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("quantity", "count"), [(4, 4), ("4", 4), ("2500m", 3), ("100m", 1), (2.5, 3), ("0", 0), ("2.0", 2)]
)
def test_counts(quantity: str | float, count: int) -> None:
    """A part of a processor is one to start a rank on."""
    assert parse_count(quantity) == count


@pytest.mark.parametrize("quantity", ["", "four", "-1", -1, "4Gi", True, None, "m"])
def test_what_is_no_count(quantity: object) -> None:
    """The message names it."""
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_count(quantity)  # pyright: ignore[reportArgumentType]


def test_whole_numbers() -> None:
    """Of at most 18 digits: `int` raises a ValueError for 5,000 digits."""
    texts = {"0": 0, "007": 7, "9" * 18: 10**18 - 1, "9" * 19: None, "9" * 5000: None, "": None, "-1": None}
    texts |= {"1.0": None, " 1": None, "1\n": None, "٣": None, "²": None}
    assert {text: parse_whole(text) for text in texts} == texts
