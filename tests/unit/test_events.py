"""Events: one line for a person, one JSON line for programs."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from safepoint.foundation.events import image_events, run_events, space_events, start_events, upload_events
from safepoint.foundation.events.stream import Event, EventLog
from safepoint.foundation.units import format_age, format_bytes, format_duration, plural


def test_every_event_has_a_line_and_survives_json(tmp_path: Path) -> None:
    """All fields arrive under the event's name."""
    log = EventLog(tmp_path / "events.jsonl")
    samples = {"str": "text", "int": 3, "float": 1.5, "bool": True}
    modules = (image_events, run_events, space_events, start_events, upload_events)
    known = {name: one for module in modules for name, one in vars(module).items()}
    kinds = [one for one in known.values() if isinstance(one, type) and issubclass(one, Event)]
    kinds.remove(Event)
    for kind in kinds:
        values = {
            field.name: samples.get(getattr((get_args(field.type) or (field.type,))[0], "__name__", ""), ())
            for field in dataclasses.fields(kind)
        }
        event = kind(**values)
        assert event.line
        log.write(event)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert len(lines) == len(kinds)
    assert {"time", "event"} <= set(lines[0])
    assert len({line["event"] for line in lines}) == len(lines)


@pytest.mark.parametrize(
    ("is_running", "after"),
    [
        (True, "the ranks continue to run"),
        (False, "the ranks have ended, and the next start of the job restores them"),
    ],
)
def test_an_image_on_request_says_what_happened_to_the_ranks(is_running: bool, after: str) -> None:
    event = image_events.FrozenOnRequest(path="/images/image-1", size_bytes=2000, is_running=is_running)
    assert event.line == f"a process image of the ranks was made: /images/image-1 (2.0 kB); {after}"


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
    borders = {999_499: "999 kB", 999_500: "1.0 MB", 99_960_000: "100 MB", 99_940_000: "99.9 MB"}
    assert {size: format_bytes(size) for size in borders} == borders
    assert [format_duration(seconds) for seconds in (0.123, 48, 130, 11_100)] == [
        "0.12 s",
        "48 s",
        "2 m 10 s",
        "3 h 05 m",
    ]
    edges = {9.994: "9.99 s", 9.996: "10 s", 59.4: "59 s", 59.6: "1 m 00 s", 3599.6: "1 h 00 m"}
    assert {seconds: format_duration(seconds) for seconds in edges} == edges
    assert [format_age(seconds) for seconds in (0.9, 59.6, 60, 3599.9)] == ["0 s", "59 s", "1 m", "59 m"]
    assert [plural(count, "file") for count in (1, 3)] == ["1 file", "3 files"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            "will be full in 3 saves, about 40 m 00 s: 35.0 GB are free, a save needs 10.3 GB; when a save does not",
        ),
        ({"saves_left": None}, "will be full in about 40 m 00 s: "),
        ({"saves_left": 0}, "will have no room for the next save: "),
        ({"saves_left": 0, "free_bytes": 5}, "has no room for the next save: 5 B are free, a save needs 10.3 GB; "),
        ({"limit": "eviction"}, ": 35.0 GB are free before the node evicts the pod, a save needs"),
        ({"limit": "size_limit"}, ": 35.0 GB are free within the size limit of the volume, a save needs"),
        ({"limit": "inodes", "free_inodes": 30}, ": 30 inodes are free for files and folders, and a save needs 25; "),
        ({"growth_bytes_per_s": 2e6}, ", and other files grow by 2.0 MB/s; "),
        (
            {"num_deletable": 1},
            "up to 1 older checkpoint will be deleted, oldest first; to keep them, free some space",
        ),
        ({"num_deletable": 0}, "saves may fail; free some space, or use --keep newest=N"),
        ({"place": "temporary folder"}, "training waits for saves; make it larger, or set TMPDIR to another folder"),
    ],
)
def test_a_warning_about_room_says_when_and_what_to_do(changes: dict[str, Any], expected: str) -> None:
    """With the forecast, what limits the room, and what Safepoint will do."""
    event = space_events.SpaceLow(
        place="output folder",
        path="/out",
        limit="disk",
        free_bytes=35 * 10**9,
        needed_bytes=10_300_000_000,
        free_inodes=None,
        needed_inodes=25,
        growth_bytes_per_s=0.0,
        saves_left=3,
        remaining_s=2400.0,
        num_deletable=4,
    )
    assert expected in dataclasses.replace(event, **changes).line
