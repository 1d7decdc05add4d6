"""Values without sense for `safepoint plan`: every option of every command refuses them or has an answer, at once.

A plan is arithmetic on what a user types, so that a missing limit shows as a traceback, as an answer that is not a
number, or as a command that never ends.
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.cli.lazy import walk
from safepoint.cli.main import root
from safepoint.planning.costs import Happened, read_history
from tests.support.commands import safepoint
from tests.support.patience import PATIENCE

REQUIRED = {
    "interval": ("--mtbf", "4h", "--stall", "2s"),
    "simulate": ("--ranks", "8", "--days", "1", "--trials", "2"),
}
ABSURD = (
    "",
    " ",
    "0",
    "-1",
    "-1s",
    "0s",
    "0/week",
    "1e-320",
    "1e999",
    "nan",
    "inf",
    "-inf",
    "9" * 400,
    "9" * 400 + "s",
    "9" * 400 + "d",
    "9" * 400 + "/hour",
    "9" * 400 + "G",
    "9" * 5000,
    "1" + "0" * 12,
    "10 m",
    "1/",
    "/week",
    "٣h",
    "1,2,,3",
    "1," * 2000 + "1",
    "a\nb",
    "\x1b[31mred",
    "\udcff",
    "../../etc/passwd",
)
_MOST_S = 10.0


def options() -> Iterator[tuple[str, str]]:
    for path, command in walk(root(), "plan"):
        name = path[-1]
        if name in {"interval", "cost", "simulate"}:
            for param in command.params:
                takes_value = not getattr(param, "is_flag", False) and param.param_type_name == "option"
                if takes_value and param.opts[0] not in {"--svg", "--on", "--namespace", "--help"}:
                    yield name, param.opts[0]


@pytest.mark.parametrize(("command", "option"), list(options()))
@pytest.mark.timeout(600)
def test_every_value_has_an_answer_or_a_message_that_names_the_option(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} in JSON")

    for value in ABSURD:
        # In this order, the last value of an option counts.
        began_s = time.monotonic()
        outcome = safepoint("plan", command, *REQUIRED.get(command, ()), option, value, "--json")
        assert time.monotonic() - began_s < _MOST_S * PATIENCE, value[:40]
        assert "Traceback" not in outcome.stderr, (value[:40], outcome.stderr)
        if outcome.code == 0:
            json.loads(outcome.stdout, parse_constant=refuse)
            continue
        assert outcome.code in {2, 10}, (value[:40], outcome.stderr)
        message = outcome.exit_error["message"]
        assert message.isprintable()
        if outcome.code == 2:
            assert option in message or re.search(r"--[a-z-]+", message), (value[:40], message)
    assert list(tmp_path.rglob("*.svg")) == []


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "--machine-failures", "1/hour", "--ranks", "10000000", "--days", "36525"),
        ("simulate", "--ranks", "8", "--days", "0.0001", "--step", "1s", "--trials", "100000"),
        ("simulate", "--preemptions", "3599/hour", "--days", "36525"),
        ("simulate", "--reclaims", "3599/hour", "--ranks", "131072", "--days", "3650", "--trials", "1000"),
    ],
)
def test_what_would_take_for_ever_is_refused(words: tuple[str, ...]) -> None:
    began_s = time.monotonic()
    outcome = safepoint("plan", *words)
    assert time.monotonic() - began_s < _MOST_S * PATIENCE
    assert outcome.code == 2, outcome.stdout
    assert "reduce --trials, --days or --ranks" in outcome.stderr


def test_times_of_events_that_are_far_away() -> None:
    """A run's events may have been written with any clock."""
    history = read_history(
        Happened(time_s=time_s, name=name)
        for time_s in (-1e300, 0.0, 1e300)
        for name in ("attempt_started", "failed", "resumed")
    )
    assert all(0 <= past.lost_s <= past.trained_s for past in history.interruptions)
