"""Durable file operations: whole or not at all, and links are never followed."""

import errno
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from safepoint.foundation import files
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.leases import Lease, lease_on, reading

SPAWN = multiprocessing.get_context("spawn")


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("broken", ["fsync", "replace", "write"])
def test_a_failed_write_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, durable: bool
) -> None:
    """Whichever step runs out of space, the old file stands and no working file is left."""
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if broken == "fsync":
            patch.setattr(os, "fsync", full)
        elif broken == "replace":
            patch.setattr(no_links, "rename", full)
        data: Any = b"new" if broken != "write" else "text, which a binary file refuses"
        if broken == "fsync" and not durable:
            files.write_atomic(path, data, durable=durable)
            assert path.read_bytes() == b"new"
            return
        with pytest.raises((OSError, TypeError)):
            files.write_atomic(path, data, durable=durable)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_interrupt_during_a_write_cleans_up_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl+C in the middle is no reason to leave a working file behind."""

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_atomic(tmp_path / "file", b"new", durable=True)
    assert os.listdir(tmp_path) == []


def test_a_durable_write_syncs_the_content_before_the_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order on disk: content, name, folder; a power loss at any point shows the old or the new."""
    order: list[str] = []
    fsync, rename = os.fsync, no_links.rename
    folder = tmp_path.stat().st_ino

    def noting(descriptor: int) -> None:
        order.append("folder" if os.fstat(descriptor).st_ino == folder else "content")
        fsync(descriptor)

    def naming(source: Path, target: Path, *, below: Path | None) -> None:
        order.append("name")
        rename(source, target, below=below)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(no_links, "rename", naming)
    files.write_atomic(tmp_path / "file", b"new", durable=True)
    assert order == ["content", "name", "folder"]
    order.clear()
    files.write_atomic(tmp_path / "file", b"newer", durable=False)
    assert order == ["name"]


def test_a_link_under_the_name_is_replaced_and_its_target_untouched(tmp_path: Path) -> None:
    """Writing over a link changes the name, not the file that the link points at."""
    (tmp_path / "target").write_bytes(b"mine")
    (tmp_path / "file").symlink_to(tmp_path / "target")
    files.write_atomic(tmp_path / "file", b"new", durable=True)
    assert (tmp_path / "target").read_bytes() == b"mine"
    assert not (tmp_path / "file").is_symlink()


def test_fsync_does_not_follow_a_link(tmp_path: Path) -> None:
    """A link in place of a file is an error, not a sync of something else."""
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        files.fsync_file(tmp_path / "link")


def test_every_kind_of_entry_is_listed_and_none_is_followed(tmp_path: Path) -> None:
    """Files, links, pipes at any depth come sorted by path; a linked folder is one entry."""
    (tmp_path / "b/c").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "b/c/file").write_bytes(b"123")
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "linked").symlink_to("/etc")
    os.mkfifo(tmp_path / "b/pipe")
    found = dict(files.walk_files(tmp_path))
    assert list(found) == ["a", "b/c/file", "b/pipe", "linked"]
    assert found["b/c/file"].st_size == 3


@pytest.mark.parametrize("kind", ["file", "folder", "link to a folder", "dangling link", "pipe", "nothing"])
def test_deleting_takes_the_thing_itself(tmp_path: Path, kind: str) -> None:
    """Whatever it is, it is gone afterwards, and what a link pointed at stays."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    doomed = tmp_path / "doomed"
    if kind == "file":
        doomed.touch()
    elif kind == "folder":
        (doomed / "deep").mkdir(parents=True)
        (doomed / "deep/link").symlink_to(kept)
    elif kind == "link to a folder":
        doomed.symlink_to(kept)
    elif kind == "dangling link":
        doomed.symlink_to(tmp_path / "nowhere")
    elif kind == "pipe":
        os.mkfifo(doomed)
    files.delete_tree(doomed)
    assert not os.path.lexists(doomed)
    assert (kept / "file").exists()


def test_discarding_takes_it_out_of_sight_before_deleting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash while deleting leaves the remains in the trash and none under the name."""
    trash, doomed = tmp_path / "trash", tmp_path / "doomed"
    trash.mkdir()
    (doomed / "sub").mkdir(parents=True)
    monkeypatch.setattr(files, "delete_tree", lambda path: None)
    files.discard(doomed, trash=trash)
    assert not doomed.exists()
    assert [(path / "sub").is_dir() for path in trash.iterdir()] == [True]


def _hold_lease(path: Path, held: Any, done: Any) -> None:
    with reading(path):
        held.set()
        done.wait(30)


def test_another_process_that_reads_is_seen(tmp_path: Path) -> None:
    """A lease of another process counts while it holds it, and ends with it."""
    path = tmp_path / "manifest"
    path.touch()
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    reader = context.Process(target=_hold_lease, args=(path, held, done))
    reader.start()
    try:
        assert held.wait(30)
        assert lease_on(path) is Lease.READER
        with reading(path):
            assert lease_on(path) is Lease.READER
    finally:
        done.set()
        reader.join(30)
    assert lease_on(path) is Lease.NONE
    assert lease_on(tmp_path / "missing") is Lease.NONE


@pytest.mark.parametrize("content", [b"", b"[]", b"not json", b"\xff", b"3"])
def test_a_lock_file_that_says_nothing_has_no_owner(tmp_path: Path, content: bytes) -> None:
    """Whatever the file contains, the message about a refused lock can be made."""
    (tmp_path / "lock").write_bytes(content)
    assert files.read_lock_owner(tmp_path / "lock") == {}
    assert files.read_lock_owner(tmp_path / "missing") == {}


@pytest.mark.parametrize(
    ("code", "outcome"), [(errno.ENOLCK, None), (errno.ENOTSUP, None), (errno.EAGAIN, BlockingIOError)]
)
def test_a_file_system_without_locks_is_not_one_that_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, outcome: type[OSError] | None
) -> None:
    """No locks means None, so that nothing is cleaned up; held means BlockingIOError; anything else is raised."""

    def refuse(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.fcntl, "fcntl", refuse)
    if outcome is None:
        assert files.FolderLock.acquire(tmp_path / "lock", {}) is None
    else:
        with pytest.raises(outcome):
            files.FolderLock.acquire(tmp_path / "lock", {})
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        files.FolderLock.acquire(tmp_path / "lock", {})


def test_a_new_owner_overwrites_the_old_ones_name(tmp_path: Path) -> None:
    """After a long owner's record, a short one's is whole and alone."""
    for owner in ({"pid": 1, "host": "a" * 100}, {"pid": 2}):
        lock = files.FolderLock.acquire(tmp_path / "lock", owner)
        assert lock is not None
        lock.release()
        assert files.read_lock_owner(tmp_path / "lock") == owner


def test_looking_at_a_lock_is_not_holding_it(tmp_path: Path) -> None:
    """Two concurrent checks would take each other for the holder, and a writer would be refused."""
    path = tmp_path / "lock"
    path.touch()
    done, gate = SPAWN.Event(), SPAWN.Barrier(3)
    lookers = [SPAWN.Process(target=_look_until, args=(path, done, gate)) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        gate.wait(60)
        for _ in range(3000):
            assert not files.is_locked(path)
            lock = files.FolderLock.acquire(path, {})  # never refused
            assert lock is not None
            lock.release()
    finally:
        done.set()
        for looker in lookers:
            looker.join(30)


def _look_until(path: Path, done: Any, gate: Any) -> None:
    gate.wait(60)
    while not done.is_set():
        files.is_locked(path)


def test_whoever_holds_a_lock_is_seen(tmp_path: Path) -> None:
    """From another process, until it ends."""
    path = tmp_path / "lock"
    gate = SPAWN.Barrier(2)
    holder = SPAWN.Process(target=_hold, args=(path, gate))
    holder.start()
    try:
        gate.wait(60)
        assert files.is_locked(path)
        with pytest.raises(BlockingIOError):
            files.FolderLock.acquire(path, {})
    finally:
        gate.wait(60)
        holder.join(30)
    assert not files.is_locked(path)
    assert not files.is_locked(tmp_path / "missing")


def _hold(path: Path, gate: Any) -> None:
    lock = files.FolderLock.acquire(path, {})
    gate.wait(60)
    gate.wait(60)
    assert lock is not None


def test_a_folder_below_a_control_folder_may_be_the_limit(tmp_path: Path) -> None:
    """Such as that of a store in another location's control folder. Links in it are refused."""
    root = tmp_path / ".safepoint" / "backup"
    files.make_folder(root / "checkpoint-1" / "rank-0", below=root)
    assert (root / "checkpoint-1" / "rank-0").is_dir()
    (root / "checkpoint-2").symlink_to(tmp_path)
    with pytest.raises(OSError, match="link"):
        files.make_folder(root / "checkpoint-2" / "rank-0", below=root)
    assert not (tmp_path / "rank-0").exists()
