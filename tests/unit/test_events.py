"""Events: one line for a person, one JSON line for programs."""

import dataclasses
import json
from pathlib import Path

from safepoint.foundation.events import run_events, space_events, start_events
from safepoint.foundation.events.stream import Event, EventLog
from safepoint.foundation.units import format_bytes, format_duration, plural


def test_every_event_has_a_line_and_survives_json(tmp_path: Path) -> None:
    """All fields arrive under the event's name."""
    log = EventLog(tmp_path / "events.jsonl")
    samples = {"str": "text", "int": 3, "float": 1.5, "bool": True}
    known = vars(run_events) | vars(start_events) | vars(space_events)
    kinds = [one for one in known.values() if isinstance(one, type) and issubclass(one, Event)]
    kinds.remove(Event)
    for kind in kinds:
        values = {
            field.name: samples.get(getattr(field.type, "__name__", ""), ()) for field in dataclasses.fields(kind)
        }
        event = kind(**values)
        assert event.line
        log.write(event)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert len(lines) == len(kinds)
    assert {"time", "event"} <= set(lines[0])
    assert len({line["event"] for line in lines}) == len(lines)


def test_a_record_says_who_when_and_why(tmp_path: Path) -> None:
    """In every stream alike; a cause only where there is one, and the names that readers know stay."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    log = EventLog(paths[0], None, paths[1], actor="keeper")
    log.write(run_events.SaveSuperseded(step=3, trigger="periodic", by=4))
    log.write(run_events.Finished(step=5))
    assert paths[0].read_text() == paths[1].read_text()
    first, second = (json.loads(line) for line in paths[0].read_text().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "event": "save_superseded",
        "actor": "keeper",
        "cause": "periodic",
        "step": 3,
        "trigger": "periodic",
        "by": 4,
    }
    assert "cause" not in second


def test_a_log_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    """The stream reports; it is not a reason to end."""
    EventLog(tmp_path / "missing" / "events.jsonl").write(run_events.Finished(step=1))


def test_figures_read_well() -> None:
    """Units that people use."""
    assert [format_bytes(size) for size in (12, 340_000, 1_200_000_000, 7 * 10**15)] == [
        "12 B",
        "340 kB",
        "1.2 GB",
        "7000 TB",
    ]
    assert [format_duration(seconds) for seconds in (0.123, 48, 130, 11_100)] == [
        "0.12 s",
        "48 s",
        "2 m 10 s",
        "3 h 05 m",
    ]
    assert [plural(count, "file") for count in (1, 3)] == ["1 file", "3 files"]
