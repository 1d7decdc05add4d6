"""The figures of the plans: one way to write each kind, and no other unit in any answer."""

import math
import re

import pytest

from safepoint.cli.commands.plan.formats import (
    money_text,
    percent_range_text,
    percent_text,
    speed_text,
    time_text,
    volume_text,
)
from tests.support.commands import safepoint


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (0.0032, "3.2 ms"),
        (0.09996, "0.10 s"),
        (0.09994, "99.9 ms"),
        (9.996, "10 s"),
        (48 * 3600 - 0.4, "2 d 00 h"),
        (0.5, "0.50 s"),
        (48, "48 s"),
        (130, "2 m 10 s"),
        (11_100, "3 h 05 m"),
        (47.9 * 3600, "47 h 54 m"),
        (48 * 3600, "2 d 00 h"),
        (41.25 * 86_400, "41 d 06 h"),
        (1e9, "11,574 d 02 h"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_shares_money_speeds_and_volumes() -> None:
    assert [percent_text(one) for one in (0, 1e-9, 4.2e-5, 0.0007, 0.000996, 0.98831, 1)] == [
        *("0.00 %", "0.00 %", "0.0042 %", "0.07 %", "0.10 %", "98.83 %", "100.00 %")
    ]
    assert percent_range_text(0.98153, 0.0088) == "98.15 ± 0.88 %"
    assert percent_range_text(0.5, math.inf) == "50.00 %"
    assert money_text(25_048.975) == "25,048.97"
    assert speed_text(68e6) == "68.0 MB/s"
    assert volume_text(205 << 30) == "205Gi"


@pytest.mark.parametrize(
    "words",
    [
        "interval --mtbf 4h --stall 0.01s --durable 40s --announced 0.5",
        "cost --price 55 --interval 1h",
        "simulate --ranks 8,1024 --days 3 --trials 2 --store-requests 3500",
        "storage --params 8B --nodes 2 --gpus 2",
        "storage --params 8B --compare 2x1 1x2",
    ],
)
def test_every_figure_of_an_answer_has_one_of_the_units(words: str) -> None:
    """Inputs are repeated as they were typed, and are left out here."""
    text = "\n".join(
        line for line in safepoint("plan", *words.split()).stdout.splitlines() if not line.startswith("inputs ")
    )
    sizes = re.findall(r"\d (?:[kKMGTPE]i?B|[kKMGTPE]ib|B)\b", text)
    assert all(re.fullmatch(r"\d (?:kB|MB|GB|TB|B)", one) for one in sizes)
    assert "GiB" not in text
    assert not re.search(r"\d (?:min|sec|hrs?|hours?|seconds?|minutes?)\b", text)
    assert not re.search(r"\d%", text)


def test_no_summary_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal of 80 columns, each command of `safepoint plan` has its whole summary."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    lines = safepoint("plan", "--help").stdout.partition("Commands:\n")[2].splitlines()
    assert len(lines) == 4
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


@pytest.mark.parametrize("command", ["storage", "interval", "cost", "simulate"])
def test_help_has_none_of_the_words_that_readers_stumbled_over(command: str) -> None:
    text = " ".join(safepoint("plan", command, "--help").stdout.split())
    for words in (
        "documents' figure",
        " room ",
        "For how long",
        "The same after",
        "as the layers need it",
        "come on top",
    ):
        assert words not in text
    assert "Exit codes: 0" in text
