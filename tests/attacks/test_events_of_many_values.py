"""A stream of events of another person has many empty objects, or many starts.

An empty object takes 2 bytes of the stream, and 64 of memory; each start is an interruption for `plan cost --for`.
"""

import importlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from safepoint.answers.costs import cost_document
from safepoint.answers.versions import versioned
from safepoint.cli.output import print_answer
from safepoint.foundation.events import stream
from safepoint.jobs.local.attempt.rank_reports import EVENTS, events, job_events, newest_step
from safepoint.planning.costs import Happened, read_history

_TIME = "2026-01-01T00:00:00Z"


def _line(step: int, num_values: int) -> str:
    return json.dumps({"event": "saved", "time": _TIME, "step": step, "x": [{}] * num_values}) + "\n"


def test_an_event_with_many_values(tmp_path: Path) -> None:
    """It is left out."""
    (tmp_path / EVENTS).write_text(_line(1, 1) + _line(2, 100_000) + _line(3, 1))
    assert [event["step"] for event in events(tmp_path)] == [1, 3]
    assert [event.detail["step"] for event in job_events(tmp_path)] == [1, 3]
    assert newest_step(tmp_path) == (3, True)


def test_many_events_with_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all events, the newest are read, until they have the greatest number of values together."""
    monkeypatch.setattr(stream, "_MOST_VALUES_READ", 1000, raising=False)
    (tmp_path / EVENTS).write_text("".join(_line(step, 100) for step in range(50)))
    found = [event.detail["step"] for event in job_events(tmp_path)]
    assert found == list(range(50))[-len(found) :]
    assert 3 <= len(found) <= 10


def test_usual_events(tmp_path: Path) -> None:
    """All of them are read: a month has a hundred thousand."""
    (tmp_path / EVENTS).write_text("".join(_line(step, 1) for step in range(100_000)))
    assert len(job_events(tmp_path)) == 100_000


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 2500])
def test_a_list_is_printed_in_pieces(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The text is that of `json.dumps`."""
    documents: list[dict[str, Any]] = [{"a": number, "b": [{}, "x\n"], "c": {"d": []}} for number in range(count)]
    print_answer(True, documents, [])
    assert capsys.readouterr().out == json.dumps([versioned(one) for one in documents], indent=1) + "\n"


def test_the_memory_for_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not grow with the list."""
    num_bytes = 0

    def echo(text: str) -> None:
        nonlocal num_bytes
        num_bytes += len(text) + 1

    monkeypatch.setattr("typer.echo", echo)
    documents = [{"a": number, "b": ["x"] * 20} for number in range(20_000)]
    tracemalloc.start()
    try:
        print_answer(True, documents, [])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_bytes > 4_000_000
    assert peak < num_bytes


def test_many_interruptions(capsys: pytest.CaptureFixture[str]) -> None:
    """The newest ones are listed, and the sums count all."""
    many = 12_001
    history = read_history([Happened(time_s=1.7e9 + 60 * number, name="attempt_started") for number in range(many)])
    document = cost_document("j", history, price=1.0, interval_s=3600.0)
    assert len(document["interruptions"]) == 10_000
    assert document["seconds"]["down"] == history.down_s == 60.0 * (many - 1)
    importlib.import_module("safepoint.cli.commands.plan.cost")._print_history(
        "j", history, 1.0, 3600.0, as_json=False
    )
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 10_050
    assert "of 12000 interruptions, only the newest 10000 are listed" in shown
