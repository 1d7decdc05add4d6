"""Safepoint's own files in an output folder, with sizes and numbers that no release writes: a start does not wait,
fail or fill the disk."""

import json
import os
from pathlib import Path

import pytest

from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.checkpoint.remote.verified_upload import UploadRecord
from safepoint.foundation import clock
from safepoint.foundation.events.stream import append_lines
from safepoint.progress.record import read_progress
from safepoint.progress.tracker import ProgressTracker
from safepoint.training.engine.save_clock import read_losses
from tests.support.checkpoints import prepared

_STARTED = b'{"event": "attempt_started", "time": "2026-01-01T00:00:00Z"}\n'


@pytest.mark.timeout(60)
def test_a_stream_of_a_terabyte(tmp_path: Path) -> None:
    """It takes no space on the disk, and would take an hour to read. Its end counts."""
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + _STARTED * 2)
    begun_s = clock.monotonic_s()
    assert read_losses(path).count == 1
    assert clock.monotonic_s() - begun_s < 10


@pytest.mark.timeout(60)
def test_a_second_name_of_a_large_stream(tmp_path: Path) -> None:
    """A stream with a second name is copied before it grows; not one that would fill the disk."""
    path, other = tmp_path / "events.jsonl", tmp_path / "backup"
    path.write_bytes(_STARTED)
    os.link(path, other)
    append_lines(path, _STARTED)
    assert path.read_bytes() == 2 * _STARTED
    assert other.read_bytes() == _STARTED
    with path.open("wb") as file:
        file.truncate(1 << 40)
    other.unlink()
    os.link(path, other)
    append_lines(path, _STARTED)
    assert path.stat().st_size == 1 << 40
    assert sum(entry.stat().st_blocks for entry in tmp_path.iterdir()) < 1000


_NUMBERS = {
    "total of 400 digits": {"max_steps": 10**400, "step_s": 1.0, "step": 1},
    "step of 400 digits": {"max_steps": 1, "step": 10**400, "step_s": 1.0},
    "slow": {"max_steps": 10**17, "step_s": 1e308, "pause_s": 1e308, "samples_per_step": 10**18},
    "fast": {"max_steps": 10, "step_s": 5e-324, "samples_per_step": 10**18},
    "saves": {"max_steps": 10, "step_s": 1e308, "saves": {"expected_s": 1e308, "count": 10**400}},
    "epochs": {"epoch": 1e308, "num_epochs": -1e308},
}


@pytest.mark.parametrize("name", _NUMBERS)
def test_numbers_of_progress(name: str, tmp_path: Path) -> None:
    """A start reads the record of the previous attempt, and writes its own; a command shows it."""
    path = prepared(tmp_path).progress
    path.write_text(json.dumps({"time": clock.utc_now(), "state": "training", "run_id": "run", **_NUMBERS[name]}))
    found = read_progress(path)
    if found is not None:
        json.loads(found.to_bytes())
    tracker = ProgressTracker(is_first=True)
    tracker.begin(
        path, location="", run_id="run", attempt=2, samples_per_step=1, resumed_step=1,
        resumed_time="2026-01-01T00:00:00Z", resumed_bytes=1,
    )  # fmt: skip
    tracker.loop_begins()
    json.loads(tracker.now().to_bytes())


_ENTRY = FileEntry(path="a", size_bytes=1, digest=digest_bytes(b"x"))


@pytest.mark.parametrize(
    "content",
    [
        '{"a": ["x", "y", "z"]}', '{"a": ["x"]}', '{"a": "x"}', '{"a": {"b": 1}}', '{"a": null}', "[]", "\n\n", "\0",
        '{"path": "a"}', '{"path": ["a"], "digest": 1, "version": {}}', '{"path": "a", "digest": "x", "version":',
    ],
)  # fmt: skip
def test_a_record_of_uploads(content: str, tmp_path: Path) -> None:
    """It is ignored, and goes on behind it; a wrong record would end the uploader."""
    path = tmp_path / "upload-checkpoint-5.json"
    path.write_text(content)
    record = UploadRecord(path)
    assert record.version_of(_ENTRY) is None
    record.add(_ENTRY, "v")
    assert UploadRecord(path).version_of(_ENTRY) == "v"


def test_a_record_of_many_uploads(tmp_path: Path) -> None:
    """Each upload adds one line. If it wrote all of them, a checkpoint of 100,000 files would write a terabyte."""
    path = tmp_path / "upload-checkpoint-5.json"
    record = UploadRecord(path)
    begun_s = clock.monotonic_s()
    for number in range(5000):
        record.add(FileEntry(path=f"{number:0200}", size_bytes=1, digest=_ENTRY.digest), f'"{number}"')
    assert clock.monotonic_s() - begun_s < 20
    last = FileEntry(path=f"{4999:0200}", size_bytes=1, digest=_ENTRY.digest)
    assert UploadRecord(path).version_of(last) == '"4999"'


def test_a_record_that_is_a_link(tmp_path: Path) -> None:
    """Nothing is written where it leads."""
    (tmp_path / "elsewhere").write_text("own")
    (tmp_path / "record").symlink_to(tmp_path / "elsewhere")
    os.link(tmp_path / "elsewhere", tmp_path / "second")
    for name in ("record", "second"):
        UploadRecord(tmp_path / name).add(_ENTRY, "v")
    assert (tmp_path / "elsewhere").read_text() == "own"
