"""The launcher's temporary folder, and those of dead launchers."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from safepoint.errors import StorageError
from safepoint.training.outcome.launcher_folder import (
    deliver_pending_events,
    launcher_folder,
    note_frozen,
    note_stop_signal,
    pending_events,
    reserve,
    reserved_s,
    share_event_stream,
    shared_event_stream,
    was_frozen,
)

_HOLDING = """
from safepoint.training.outcome.launcher_folder import launcher_folder
with launcher_folder() as folder:
    print(folder, flush=True)
    input()
"""


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message says what was tried and what to do, as in a pod whose root is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc", "/sys"])
    with pytest.raises(StorageError, match="no folder for temporary files") as error, launcher_folder():
        pytest.fail("it was opened")
    assert "emptyDir at /tmp" in str(error.value)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_launchers_that_start_together(place: Path) -> None:
    """Each looks for abandoned folders while the other has made its folder and has not locked it yet."""
    program = """
from safepoint.training.outcome.launcher_folder import launcher_folder
for _ in range(1000):
    with launcher_folder() as folder:
        assert folder.is_dir()
"""
    environment = {**os.environ, "TMPDIR": str(place)}
    both = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(2)]
    assert [one.wait() for one in both] == [0, 0]


def test_a_dead_launchers_folder_is_removed_and_a_living_ones_is_not(place: Path) -> None:
    """The next launcher tidies up after one that was killed, and only after that."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(place)},
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().decode().strip())
        with launcher_folder() as ours:
            assert theirs.is_dir()
            assert ours.is_dir()
        assert not ours.exists()
        other.kill()
        other.wait()
    assert theirs.is_dir()
    with launcher_folder():
        assert not theirs.exists()
    assert not list(place.iterdir())


def test_folders_that_are_not_ours_stay(place: Path) -> None:
    """What others may have put there is not opened: a link could lead anywhere."""
    aim = place / "aim"
    aim.mkdir()
    (aim / "lock").write_text("precious")
    (place / "safepoint-link").symlink_to(aim)
    anybodys = place / "safepoint-anybodys"
    anybodys.mkdir()
    anybodys.chmod(0o777)
    (anybodys / "lock").symlink_to(aim / "lock")
    (place / "safepoint-old").mkdir()
    with launcher_folder():
        pass
    assert (aim / "lock").read_text() == "precious"
    assert {path.name for path in place.iterdir()} == {"aim", "safepoint-link", "safepoint-anybodys", "safepoint-old"}


def test_in_memory_where_there_is_room(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Unless the user has named a place, or memory has no room for it."""
    memory = place / "memory"
    memory.mkdir()
    monkeypatch.setattr("safepoint.foundation.temporary_folders.places._IN_MEMORY", memory)
    with launcher_folder() as folder:
        assert folder.parent == place
    monkeypatch.delenv("TMPDIR")
    with launcher_folder() as folder:
        assert folder.parent == memory
    monkeypatch.setattr("safepoint.foundation.temporary_folders.places._ROOM_BYTES", 1 << 60)
    with launcher_folder() as folder:
        assert folder.parent == place


def test_pending_events_are_delivered_once(tmp_path: Path) -> None:
    """After the events that are in the stream; a launcher that is late finds the stream itself."""
    stream = tmp_path / "out" / "events.jsonl"
    stream.parent.mkdir()
    stream.write_bytes(b"first\n")
    assert shared_event_stream(tmp_path) is None
    deliver_pending_events(tmp_path, stream)
    pending_events(tmp_path).write_bytes(b"second\n")
    deliver_pending_events(tmp_path, stream)
    deliver_pending_events(tmp_path, stream)
    assert stream.read_bytes() == b"first\nsecond\n"
    share_event_stream(str(tmp_path), stream)
    assert shared_event_stream(tmp_path) == stream
    share_event_stream(None, stream)


def test_time_is_reserved_only_while_an_image_may_be_made(tmp_path: Path) -> None:
    """Not before a request to stop, not without a launcher, and not when the processes were frozen."""
    assert reserved_s(None) == 0.0
    reserve(tmp_path, 4.5)
    assert reserved_s(tmp_path) == 0.0
    note_stop_signal(tmp_path, 15)
    assert reserved_s(tmp_path) == 4.5
    note_frozen(tmp_path, is_frozen=True)
    assert (was_frozen(tmp_path), reserved_s(tmp_path)) == (True, 0.0)
    note_frozen(tmp_path, is_frozen=False)
    assert (was_frozen(tmp_path), reserved_s(tmp_path)) == (False, 4.5)
    (tmp_path / "reserved").write_text("soon")
    assert reserved_s(tmp_path) == 0.0
    reserve(tmp_path / "gone", 1.0)
    assert not was_frozen(None)
