"""What a commit owes to a power loss, to a rename that fails, and to a file system without tricks."""

import errno
import os
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest
from safepoint.checkpoint.format.verify import verify
from safepoint.errors import SaveError
from safepoint.foundation import files
from safepoint.foundation.shared_folders import no_links
from tests.support.checkpoints import commit, describe, name_added_files, prepared, written

DEEP = {0: {"a/b/c/weights": b"weights", "top": b"top"}, 1: {"a/other/x": b"x"}}


class Journal:
    """Notes, by inode, what was fsynced and when names appeared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[int] = []
        self.named: list[tuple[str, int]] = []
        fsync, rename = os.fsync, no_links.rename

        def noting_fsync(descriptor: int) -> None:
            fsync(descriptor)
            self.synced.append(os.fstat(descriptor).st_ino)

        def noting_rename(source: Path, target: Path, *, below: Path | None = None) -> None:
            self.named.append((str(target), len(self.synced)))
            rename(source, target, below=below)

        monkeypatch.setattr(os, "fsync", noting_fsync)
        monkeypatch.setattr(no_links, "rename", noting_rename)

    def moment(self, target: Path) -> int:
        """How many fsyncs were done when `target` got its name."""
        return next(count for name, count in self.named if name == str(target))


def test_everything_is_durable_before_the_folder_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file, each folder at every depth and the manifest are fsynced before the rename, the parent after it."""
    output = prepared(tmp_path / "out")
    journal = Journal(monkeypatch)
    folder = commit(output, 8, DEEP)
    moment = journal.moment(folder)
    before, after = set(journal.synced[:moment]), set(journal.synced[moment:])
    for path in [folder, *folder.rglob("*")]:
        assert path.stat().st_ino in before, path.relative_to(folder.parent)
    assert output.root.stat().st_ino in after


def test_naming_added_files_makes_their_names_durable_before_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest never names a file whose folder entry a power loss could take away."""
    folder = commit(prepared(tmp_path / "out"), 8)
    (folder / "new/deep").mkdir(parents=True)
    (folder / "new/deep/notes").write_text("added")
    journal = Journal(monkeypatch)
    added = name_added_files(folder)
    assert added == ["new/deep/notes"]
    before = set(journal.synced[: journal.moment(folder / MANIFEST_NAME)])
    for path in (folder / "new", folder / "new/deep", folder / "new/deep/notes"):
        assert path.stat().st_ino in before, path


def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.ctypes, "CDLL", lambda *args, **kwargs: object())


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_failed_replacement_keeps_what_was_to_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    """Whichever rename fails, with or without the exchange of names, a valid checkpoint-8 stands afterwards."""
    if not can_exchange:
        no_exchange(monkeypatch)
    for fail_at in range(20):
        output = prepared(tmp_path / f"out-{fail_at}")
        folder = commit(output, 8, {0: {"old": b"old"}})
        working = written(output, 8)
        parts = [working.seal(0), working.seal(1)]
        calls = 0
        rename = no_links.rename

        def failing(
            source: Path, target: Path, fail_at: int = fail_at, rename=rename, **options: Path | None
        ) -> None:
            nonlocal calls
            calls += 1
            if calls == fail_at + 1:
                raise OSError(errno.EIO, "Input/output error")
            rename(source, target, **options)

        with monkeypatch.context() as patch:
            patch.setattr(no_links, "rename", failing)
            try:
                working.commit(parts, describe(8))
            except OSError:
                assert verify(folder).is_valid
                continue
        assert calls <= fail_at
        assert (folder / "model.safetensors").exists()
        return
    raise AssertionError("the replacement never succeeded")


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_exchange_gets_two_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Each way in which renameat2 says that it cannot leads to the fallback, and to the new content."""

    class Libc:
        @staticmethod
        def renameat2(*args: object) -> int:
            return -1

    output = prepared(tmp_path / "out")
    folder = commit(output, 8, {0: {"old": b"old"}})
    monkeypatch.setattr(files.ctypes, "CDLL", lambda *args, **kwargs: Libc)
    monkeypatch.setattr(files.ctypes, "get_errno", lambda: code)
    commit(output, 8)
    assert verify(folder).is_valid
    assert not (folder / "old").exists()
    monkeypatch.setattr(files.ctypes, "get_errno", lambda: errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        commit(output, 8, {0: {"third": b""}})
    assert verify(folder).is_valid


@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "pipe"])
def test_what_is_no_folder_makes_way_for_a_checkpoint(tmp_path: Path, kind: str) -> None:
    """A file, link or pipe under the checkpoint's name is moved to the trash; what a link points at is untouched."""
    output = prepared(tmp_path / "out")
    target, elsewhere = output.root / "checkpoint-8", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    if kind == "file":
        target.write_text("x")
    elif kind == "pipe":
        os.mkfifo(target)
    else:
        target.symlink_to(elsewhere if kind == "link" else tmp_path / "nowhere")
    assert verify(commit(output, 8)).is_valid
    assert not target.is_symlink()
    assert [path.name for path in elsewhere.iterdir()] == ["mine"]
    output.claim(wait_s=0, waiting=lambda who: None)
    output.clean()
    output.release()
    assert not list(output.trash.iterdir())
    assert (elsewhere / "mine").read_text() == "mine"


@pytest.mark.parametrize("content", [b"", b"torn", b"changed size"])
def test_a_file_that_changed_after_sealing_is_not_committed(tmp_path: Path, content: bytes) -> None:
    """A zombie that goes on writing makes the save fail when a size differs, and the checkpoint invalid otherwise."""
    output = prepared(tmp_path / "out")
    working = written(output, 8)
    parts = [working.seal(0), working.seal(1)]
    merged = output.work / "attempt" / "checkpoint-8" / "merged"
    (merged / "rng_state_0.pth").write_bytes(content)
    if len(content) != 4:
        with pytest.raises(SaveError, match="differ from the manifest"):
            working.commit(parts, describe(8))
        assert list_checkpoints(output.root) == []
    else:
        working.commit(parts, describe(8))
        assert not verify(working.target).is_valid


def test_an_unreported_file_is_not_committed(tmp_path: Path) -> None:
    """A file in the merged folder that no rank reported fails the save; so does a reported one that is gone."""
    output = prepared(tmp_path / "out")
    merged = output.work / "attempt" / "checkpoint-8" / "merged"
    working = written(output, 8)
    parts = [working.seal(0), working.seal(1)]
    (merged / "stowaway").touch()
    with pytest.raises(SaveError, match="differ from the manifest"):
        working.commit(parts, describe(8))
    (merged / "stowaway").unlink()
    (merged / "rng_state_1.pth").unlink()
    with pytest.raises(SaveError, match="differ from the manifest"):
        working.commit(parts, describe(8))
    assert list_checkpoints(output.root) == []


def test_what_no_manifest_can_say_is_a_failed_save(tmp_path: Path) -> None:
    """No files at all, and figures that a manifest refuses, are a SaveError that all ranks hear of."""
    output = prepared(tmp_path / "out")
    with pytest.raises(SaveError, match="at least one file"):
        commit(output, 8, {0: {}})

    def impossible(entries: tuple[FileEntry, ...]) -> Manifest:
        return describe(-1)(entries)

    working = written(output, 9)
    with pytest.raises(SaveError, match="step -1"):
        working.commit([working.seal(0), working.seal(1)], impossible)
    assert list_checkpoints(output.root) == []


def test_a_zombie_of_an_earlier_start_writes_elsewhere(tmp_path: Path) -> None:
    """Two starts of one run at one step have working folders of their own, and discarding one keeps the other."""
    from safepoint.checkpoint.local.working_checkpoint import WorkingCheckpoint

    output = prepared(tmp_path / "out")
    zombie, living = (WorkingCheckpoint(output, attempt_id=name, step=8) for name in ("one", "two"))
    assert zombie.rank_root(0) != living.rank_root(0)
    (zombie.rank_root(0) / zombie.name / "half").write_bytes(b"half")
    (living.rank_root(0) / living.name / "whole").write_bytes(b"whole")
    parts = [living.seal(0)]
    zombie.discard()
    living.commit(parts, describe(8))
    assert [path.name for path in sorted(living.target.iterdir())] == [MANIFEST_NAME, "whole"]


def test_naming_added_files_leaves_the_old_manifest_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk while added files are named keeps the manifest that stood there, and no working file beside it."""
    folder = commit(prepared(tmp_path / "out"), 8)
    before = (folder / MANIFEST_NAME).read_bytes()
    (folder / "notes").write_text("added")

    def full(source: Path, target: Path, *, below: Path | None) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(no_links, "rename", full)
        with pytest.raises(OSError, match="No space"):
            name_added_files(folder)
    assert (folder / MANIFEST_NAME).read_bytes() == before
    (folder / "notes").unlink()
    assert verify(folder).is_valid
