"""How a rank ended, reported to its launcher."""

from pathlib import Path

import pytest

from safepoint.errors import ExitCode, Interrupted, NothingValidError
from safepoint.foundation.environment import Place
from safepoint.training.outcome.rank_record import (
    RankRecordWriter,
    deliver_events,
    exit_code_after,
    find_stream,
    in_a_sentence,
    name_stream,
    read_records,
    waiting_events,
)


def test_the_first_verdict_stands(tmp_path: Path) -> None:
    """What follows an ending is only the way out; steps and messages arrive as written."""
    record = RankRecordWriter(str(tmp_path), Place(rank=3, world_size=4, restart=1))
    assert not read_records(tmp_path, 1)[3].has_stepped
    record.stepped()
    record.ended(75, "saved")
    record.ended(1, "later")
    read = read_records(tmp_path, 1)[3]
    assert (read.has_stepped, read.exit_code, read.message) == (True, 75, "saved")
    assert read_records(tmp_path, 0) == {}


def test_unreadable_records_are_left_out(tmp_path: Path) -> None:
    """A torn, foreign or misnamed record does not affect the others."""
    RankRecordWriter(str(tmp_path), Place())
    for rank, text in enumerate(["", "[]", "3", '{"rank": 1}', '{"unknown": 1}', '{"rank": [], "pid": 1}'], start=1):
        (tmp_path / "0" / f"rank-{rank}.json").write_text(text)
    assert list(read_records(tmp_path, 0)) == [0]


def test_without_a_launcher_nothing_is_written(tmp_path: Path) -> None:
    """No folder, or one that is gone with its launcher, changes nothing for the rank."""
    for folder in (None, str(tmp_path / "gone")):
        record = RankRecordWriter(folder, Place())
        record.stepped()
        record.ended(0, "")
    assert list(tmp_path.iterdir()) == []


def test_what_the_launcher_has_to_say_is_delivered_once(tmp_path: Path) -> None:
    """Behind what stands in the stream already; a launcher that was not heard in time finds the stream itself."""
    stream = tmp_path / "out" / "events.jsonl"
    stream.parent.mkdir()
    stream.write_bytes(b"first\n")
    assert find_stream(tmp_path) is None
    deliver_events(tmp_path, stream)
    waiting_events(tmp_path).write_bytes(b"second\n")
    deliver_events(tmp_path, stream)
    deliver_events(tmp_path, stream)
    assert stream.read_bytes() == b"first\nsecond\n"
    name_stream(str(tmp_path), stream)
    assert find_stream(tmp_path) == stream
    name_stream(None, stream)


def test_an_error_in_a_sentence() -> None:
    """Its kind and its first line; nothing that moves a terminal's cursor, and not the whole of a long one."""
    assert in_a_sentence(ValueError("one\ntwo")) == "ValueError: one"
    assert in_a_sentence(KeyError()) == "KeyError"
    assert in_a_sentence(ValueError("\x1b[2J")) == "ValueError: \\x1b[2J"
    assert len(in_a_sentence(ValueError("x" * 10_000))) == 300


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(), 0),
        (SystemExit(7), 7),
        (SystemExit("a text"), 1),
        (NothingValidError("x"), 14),
        (Interrupted(ExitCode.INTERRUPTED_SAVED, "x"), 75),
    ],
)
def test_the_exit_code_after_an_error(error: BaseException, code: int) -> None:
    """As the interpreter has it, and Safepoint's own."""
    assert exit_code_after(error) == code
