"""The output folder: writable or refused, one writer, attempts counted, and nothing of others deleted."""

import errno
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import ConflictError, ExitCode, StorageError
from safepoint.foundation import clock, files
from safepoint.foundation.files import FolderLock
from tests.support.checkpoints import commit, prepared


def test_a_full_disk_is_found_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that exists and cannot be written is a StorageError, exit code 13, with the system's reason."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_atomic", full)
    with pytest.raises(StorageError, match="No space left on device") as error:
        OutputFolder(tmp_path / "out").prepare()
    assert error.value.exit_code == ExitCode.STORAGE


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    """A path through a file cannot be a folder, and says so."""
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="not a folder"):
        OutputFolder(tmp_path / "file" / "out").prepare()


def test_preparing_twice_changes_nothing(tmp_path: Path) -> None:
    """What is there stays, and no probe is left behind."""
    output = prepared(tmp_path / "out")
    commit(output, 4)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    output.prepare()
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_waiting_for_a_leaving_run_is_told_once_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the deadline the lock is tried again; then the holder is named; the clock is the tests' own."""
    output = prepared(tmp_path / "out")
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def held(path: Path, owner: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "held")

    (output.control / "lock").write_text('{"pid": 17, "host": "node", "since": "noon"}')
    monkeypatch.setattr(clock, "monotonic_s", lambda: now)
    monkeypatch.setattr(clock, "sleep", sleep)
    monkeypatch.setattr(FolderLock, "acquire", held)
    reported: list[str] = []
    with pytest.raises(ConflictError, match="pid 17 on node since noon"):
        output.claim(wait_s=3, waiting=reported.append)
    assert reported == ["pid 17 on node since noon"]
    assert now == pytest.approx(3, abs=0.5)


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", '{"run_id": "a", "attempt": "x"}', '{"run_id": "a"}'])
def test_a_damaged_count_starts_again_behind_the_checkpoint(tmp_path: Path, content: str) -> None:
    """The number of the checkpoint to go on from is enough to never use one twice."""
    output = prepared(tmp_path / "out")
    (output.control / "attempt.json").write_text(content)
    assert output.next_attempt("a", after=5) == 6
    assert output.next_attempt("a", after=5) == 7


def test_cleaning_keeps_what_runs_need(tmp_path: Path) -> None:
    """Leftovers of torn writes go; events, the count and checkpoints stay."""
    output = prepared(tmp_path / "out")
    folder = commit(output, 4)
    output.next_attempt("a", after=0)
    output.events.write_text("event\n")
    (output.control / f".attempt.json.{'0' * 32}").touch()
    output.open_attempt("dead")
    assert (output.work / "dead").is_dir()
    output.clean()
    assert not (output.work / "dead").exists()
    assert {path.name for path in output.control.iterdir()} == {"work", "trash", "events.jsonl", "attempt.json"}
    assert [path for path, _ in output.manifests()] == [folder]


def test_a_linked_checkpoint_is_not_counted(tmp_path: Path) -> None:
    """Retention neither counts nor deletes through a link, so what it points at is safe."""
    output = prepared(tmp_path / "out")
    elsewhere = commit(prepared(tmp_path / "other"), 9)
    (output.root / "checkpoint-9").symlink_to(elsewhere)
    folder = commit(output, 4)
    assert [path for path, _ in output.manifests()] == [folder]
