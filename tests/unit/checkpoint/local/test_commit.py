"""The commit protocol: absent or complete, whatever fails."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints, set_aside
from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.working_checkpoint import RankPart
from safepoint.errors import ConflictError, SaveError, StorageError
from safepoint.foundation import files
from safepoint.foundation.shared_folders.leases import reading
from tests.support.checkpoints import FILES, commit, describe, name_added_files, prepared, written


def test_the_parts_of_all_ranks_are_one_checkpoint(tmp_path: Path) -> None:
    """Files of every rank are in the manifest, and nothing of the working folder remains."""
    output = prepared(tmp_path / "out")
    folder = commit(output, 8)
    verdict = verify(folder)
    assert verdict.is_valid
    assert verdict.manifest is not None
    assert {entry.path for entry in verdict.manifest.files} == {name for part in FILES.values() for name in part}
    assert not list(output.work.glob("*/checkpoint-8"))


def test_two_ranks_with_one_name_and_different_content_are_refused(tmp_path: Path) -> None:
    """It is unknown which content is right: the save fails."""
    with pytest.raises(SaveError, match="two ranks"):
        commit(prepared(tmp_path / "out"), 8, {0: {"a": b"1"}, 1: {"a": b"2"}})


def test_two_ranks_with_one_name_and_equal_content_are_one_file(tmp_path: Path) -> None:
    """Replicas may write the same file twice."""
    assert verify(commit(prepared(tmp_path / "out"), 8, {0: {"a": b"1"}, 1: {"a": b"1"}})).is_valid


def test_a_missing_part_fails_the_save_with_its_reason(tmp_path: Path) -> None:
    """One rank's full disk is everybody's failed save."""
    working = written(prepared(tmp_path / "out"), 8)
    with pytest.raises(SaveError, match="rank 1: disk full"):
        working.commit([working.seal(0), RankPart(rank=1, error="rank 1: disk full")], describe(8))
    assert not working.target.exists()


def test_a_link_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    """A framework that writes a link gets an error; the link is not followed."""
    working = written(prepared(tmp_path / "out"), 8)
    (working.rank_root(0) / working.name / "link").symlink_to("/etc/passwd")
    with pytest.raises(SaveError, match="link"):
        working.seal(0)


@pytest.mark.parametrize("with_older", [False, True])
def test_a_failure_at_any_step_leaves_it_absent_or_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_older: bool
) -> None:
    """ENOSPC injected at the n-th fsync, rename or write, for every n: never a torn checkpoint."""
    for fail_at in range(100):
        output = prepared(tmp_path / f"out-{fail_at}")
        if with_older:
            commit(output, 8, {0: {"old": b"old"}})
        calls = 0

        def failing(real):
            def call(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls == fail_at + 1:  # noqa: B023  used within this round only
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing(os.fsync))
            patch.setattr(Path, "rename", failing(Path.rename))
            patch.setattr(Path, "replace", failing(Path.replace))
            try:
                commit(output, 8)
                failed = False
            except OSError:
                failed = True
        for path in list_checkpoints(output.root):
            assert verify(path).is_valid, f"torn when call {fail_at + 1} failed"
        assert len(list_checkpoints(output.root)) == 1 or (failed and not with_older)
        if calls <= fail_at:
            assert not failed
            return
    raise AssertionError("the commit never succeeded")


def test_an_existing_checkpoint_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the exchange of two names, and without it."""
    output = prepared(tmp_path / "out")
    commit(output, 8, {0: {"old": b"old"}})
    assert (commit(output, 8) / "model.safetensors").exists()
    monkeypatch.setattr(files.ctypes, "CDLL", lambda *args, **kwargs: object())
    assert (commit(output, 8, {0: {"old": b"old"}}) / "old").exists()
    assert verify(output.root / "checkpoint-8").is_valid


def test_an_output_folder_that_is_a_file_is_a_storage_error(tmp_path: Path) -> None:
    """And the file is left alone."""
    (tmp_path / "out").write_text("mine")
    for check in (OutputFolder(tmp_path / "out").prepare, OutputFolder(tmp_path / "out").check_usable):
        with pytest.raises(StorageError, match="not a folder"):
            check()
    assert (tmp_path / "out").read_text() == "mine"


def test_the_lock_refuses_a_second_writer_and_dies_with_its_owner(tmp_path: Path) -> None:
    """Another process holds the folder: refused with its pid. It is killed: the folder is free."""
    output = prepared(tmp_path / "out")
    code = (
        "import sys, time, pathlib; from safepoint.checkpoint.local.output_folder import OutputFolder\n"
        "output = OutputFolder(pathlib.Path(sys.argv[1]))\n"
        "output.claim(wait_s=0, waiting=print); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(output.root)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConflictError, match=f"pid {other.pid} "):
            output.claim(wait_s=0, waiting=lambda who: None)
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert output.claim(wait_s=5, waiting=lambda who: None)
    output.release()


def test_dead_runs_working_folders_are_cleaned_up(tmp_path: Path) -> None:
    """Whatever a crash left under work/ and trash/ goes; checkpoints stay."""
    output = prepared(tmp_path / "out")
    commit(output, 4)
    written(output, 8)
    (output.trash / "half").mkdir()
    output.claim(wait_s=0, waiting=lambda who: None)
    assert output.clean() == 2
    assert not list(output.work.iterdir())
    assert verify(output.root / "checkpoint-4").is_valid
    output.release()


def test_a_checkpoint_that_is_being_read_is_not_pruned(tmp_path: Path) -> None:
    """A lease on the manifest holds the pruner off; without it the checkpoint goes."""
    output = prepared(tmp_path / "out")
    folder = commit(output, 4)
    with reading(folder / MANIFEST_NAME):
        assert not output.delete(folder.name)
        assert verify(folder).is_valid
    assert output.delete(folder.name)
    assert not folder.exists()


def test_attempts_are_counted_per_run(tmp_path: Path) -> None:
    """Each start gets a higher number, also when it follows a checkpoint of a later one."""
    output = prepared(tmp_path / "out")
    assert [output.next_attempt("a", after=0) for _ in range(2)] == [1, 2]
    assert output.next_attempt("a", after=7) == 8
    assert output.next_attempt("b", after=0) == 1


def test_added_files_are_named(tmp_path: Path) -> None:
    """A callback's file is a stray until the manifest names it."""
    folder = commit(prepared(tmp_path / "out"), 8)
    (folder / "notes").write_text("added")
    assert verify(folder).strays == ("notes",)
    added = name_added_files(folder)
    assert added == ["notes"]
    assert verify(folder).is_valid
    assert verify(folder).strays == ()
    assert name_added_files(folder) == []


def test_set_aside_deletes_nothing(tmp_path: Path) -> None:
    """What a run does not continue is moved, still valid."""
    output = prepared(tmp_path / "out")
    paths = [commit(output, 4), commit(output, 8)]
    place = set_aside(output.root, paths).place
    assert place is not None
    assert list_checkpoints(output.root) == []
    assert all(verify(place / path.name).is_valid for path in paths)
    assert set_aside(output.root, []).place is None


def test_a_folder_of_another_program_is_moved_aside(tmp_path: Path) -> None:
    """A commit under its name does not delete it."""
    output = prepared(tmp_path / "out")
    (output.root / "checkpoint-5").mkdir()
    (output.root / "checkpoint-5" / "model.safetensors").write_bytes(b"another program's")
    commit(output, 5)
    assert verify(output.root / "checkpoint-5").is_valid
    (moved,) = output.root.glob("set-aside-*/checkpoint-5/model.safetensors")
    assert moved.read_bytes() == b"another program's"
    commit(output, 5)
    assert len(list(output.root.glob("set-aside-*"))) == 1
