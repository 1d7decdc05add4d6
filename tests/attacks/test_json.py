"""Records in folders and stores that are no JSON, nested too deep, of another type, too large, links or pipes.

They are ignored or refused; none raises something unexpected, or blocks.
"""

import json
import os
from pathlib import Path

import pytest

from safepoint.checkpoint.format.sealed_record import parse_json_object
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.remote_folder import ATTEMPT_KEY, RemoteFolder
from safepoint.checkpoint.remote.verified_upload import UploadRecord
from safepoint.checkpoint.tools.atomic_export import MARK, _read_mark
from safepoint.doctor.deadline import look_at_history
from safepoint.errors import ManifestError
from safepoint.foundation import files
from safepoint.foundation.bounded_json import parse_object, read_object
from safepoint.foundation.events.stream import read_events
from safepoint.jobs.local.attempt import rank_reports
from safepoint.progress.record import read_progress
from safepoint.snapshot.keeper.persist.snapshot_commit import _part_of
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location
from safepoint.training.engine.save_clock import read_losses
from safepoint.training.outcome.rank_record import read_records

HOSTILE = {
    "text": b"no JSON at all",
    "a string": b'"attempt"',
    "a number": b"7",
    "null": b"null",
    "a list": b"[1, 2]",
    "nested lists": b"[" * 60_000 + b"]" * 60_000,
    "nested objects": b'{"a":' * 60_000 + b"1" + b"}" * 60_000,
    "nested less deep": b'{"a":' * 500 + b"1" + b"}" * 500,
    "bytes that are no UTF-8": b"\xff\xfe{}",
    "a huge number": b'{"attempt": 1e999, "run_id": "r", "event": "saved", "duration_s": 1e999}',
    "an integer of many digits": b'{"attempt": '
    + b"9" * 4000
    + b', "run_id": "r", "event": "saved", "duration_s": '
    + b"9" * 4000
    + b"}",
    "an integer of too many digits": b'{"attempt": ' + b"9" * 100_000 + b"}",
    "NaN": b'{"attempt": NaN, "run_id": "r"}',
    "other types": b'{"attempt": [1], "run_id": {"a": 1}, "time": {}, "event": ["saved"], "duration_s": []}',
    "a name twice": b'{"attempt": 1, "attempt": 2, "run_id": "r"}',
    "empty": b"",
    "too large": b'{"a": "' + b"x" * (3 << 20) + b'"}',
}


@pytest.fixture(params=HOSTILE)
def hostile(request: pytest.FixtureRequest) -> bytes:
    return HOSTILE[request.param]


def test_attempt_of_a_folder_counts_from_the_checkpoint(tmp_path: Path, hostile: bytes) -> None:
    output = OutputFolder(tmp_path)
    output.prepare()
    (output.control / "attempt.json").write_bytes(hostile)
    assert output.next_attempt("r", after=4) == 5
    assert output.next_attempt("r", after=4) == 6


def test_claim_of_a_store_is_none(tmp_path: Path, hostile: bytes) -> None:
    store = LocalStore(Location.of_folder(tmp_path))
    store.write(ATTEMPT_KEY, hostile)
    assert RemoteFolder(store)._read_claim(None)[0] is None


def test_mark_of_an_export_is_empty(tmp_path: Path, hostile: bytes) -> None:
    store = LocalStore(Location.of_folder(tmp_path))
    store.write(MARK, hostile)
    assert not _read_mark(store).sizes


def test_progress_is_none(tmp_path: Path, hostile: bytes) -> None:
    path = tmp_path / "progress.json"
    path.write_bytes(hostile)
    record = read_progress(path)
    assert record is None or record.step == 0


def test_stream_of_events_goes_on_behind_it(tmp_path: Path, hostile: bytes) -> None:
    good = b'{"event": "attempt_started", "time": "2026-01-01T00:00:00Z"}\n'
    later = b'{"event": "saved", "time": "2026-01-01T00:01:00Z", "duration_s": 2.5}\n'
    naive = b'{"event": "saved", "time": "2026-01-01T00:00:30"}\n{"event": "saved", "time": "0001-01-01T00:00:00"}\n'
    path = tmp_path / ".safepoint" / "events.jsonl"
    path.parent.mkdir()
    path.write_bytes(good + hostile + b"\n" + naive + later + later)
    (tmp_path / "events.jsonl").write_bytes(path.read_bytes())
    assert read_losses(path).trained_s >= 0
    assert look_at_history(tmp_path).save_s == 2.5
    assert rank_reports.has_begun(tmp_path)
    assert rank_reports.newest_step(tmp_path) == (None, False)
    assert list(read_events(path))[-1]["duration_s"] == 2.5


def test_owner_of_a_lock_is_unknown(tmp_path: Path, hostile: bytes) -> None:
    (tmp_path / "lock").write_bytes(hostile)
    assert files.read_lock_owner(tmp_path / "lock").get("pid") is None


def test_record_of_uploads_is_empty(tmp_path: Path, hostile: bytes) -> None:
    (tmp_path / "uploads").write_bytes(hostile)
    UploadRecord(tmp_path / "uploads")


def test_record_of_a_rank_is_left_out(tmp_path: Path, hostile: bytes) -> None:
    (tmp_path / "start-0-rank-0.json").write_bytes(hostile)
    assert read_records(tmp_path, 0) == {}


@pytest.mark.parametrize("record", [{}, {"files": 1}, {"files": [1], "error": ""}, {"files": [{"path": 1}]}])
def test_part_of_a_node_is_an_error(record: dict[str, object]) -> None:
    assert "malformed" in str(_part_of(1, record).error)


def test_manifest_is_refused(hostile: bytes) -> None:
    if b"attempt" in hostile and b"NaN" not in hostile and b"100" not in hostile:
        return  # valid JSON, judged by its fields
    try:
        parse_json_object(hostile)
    except ManifestError:
        return
    assert json.loads(hostile)


def test_depth_of_129_is_refused() -> None:
    parse_object(b'{"a":' * 128 + b"1" + b"}" * 128)
    with pytest.raises(ValueError, match="nested"):
        parse_object(b'{"a":' * 129 + b"1" + b"}" * 129)


def test_pipes_folders_devices_and_links_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "real").write_text("{}")
    (tmp_path / "link").symlink_to("real")
    before = len(os.listdir("/proc/self/fd"))
    for path in [tmp_path / "pipe", tmp_path / "folder", tmp_path / "link", Path("/dev/zero")]:
        with pytest.raises(OSError):
            read_object(path)
        assert list(read_events(path)) == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("letter", ["x", "ü", "€", "\N{GRINNING FACE}", "\ud800"])
def test_the_size_of_a_text_is_that_of_its_bytes(letter: str) -> None:
    """A text is refused if its bytes are refused; some characters take four bytes."""
    text = f'{{"a": "{letter * 1000}"}}'
    data = text.encode("utf-8", "surrogatepass")
    assert parse_object(text, max_bytes=len(data))["a"] == letter * 1000
    with pytest.raises(ValueError, match=f"it is larger than {len(data) - 1} bytes"):
        parse_object(text, max_bytes=len(data) - 1)
    with pytest.raises(ValueError, match="it is larger than"):
        parse_object(data, max_bytes=len(data) - 1)
