"""Temporary folders of killed programs are removed, but not while a program in one is being restored."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from safepoint.foundation.files import FolderLock
from safepoint.foundation.temporary_folders import abandoned
from safepoint.foundation.temporary_folders.abandoned import LOCK_NAME, kept, remove_if_abandoned


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose program was killed."""
    folder = tmp_path / "safepoint-x"
    folder.mkdir()
    (folder / LOCK_NAME).write_bytes(b'{"pid": 7}')
    return folder


def test_a_folder_is_removed_unless_it_is_in_use(folder: Path, tmp_path: Path) -> None:
    lock = FolderLock.acquire(folder / LOCK_NAME, {})
    assert lock is not None
    with pytest.raises(BlockingIOError):
        remove_if_abandoned(folder)
    lock.release()
    remove_if_abandoned(folder)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_kept(folder: Path) -> None:
    """CRIU compares the length of an open file with that at the freeze."""
    before = (folder / LOCK_NAME).read_bytes()
    with kept(folder):
        assert (folder / LOCK_NAME).read_bytes() == before
        with pytest.raises(BlockingIOError):
            remove_if_abandoned(folder)
        assert folder.is_dir()
    assert os.listdir(folder) == [LOCK_NAME]
    remove_if_abandoned(folder)
    assert not folder.exists()


def test_nobody_else_locks_the_file_of_a_folder_that_is_kept(folder: Path) -> None:
    """CRIU locks it once, and the restore fails if another process has the lock at this moment."""
    program = """
import contextlib, sys
from pathlib import Path
from safepoint.foundation.temporary_folders.abandoned import remove_if_abandoned
print(flush=True)
while True:
    with contextlib.suppress(OSError):
        remove_if_abandoned(Path(sys.argv[1]))
"""
    with (
        kept(folder),
        subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE) as remover,
    ):
        assert remover.stdout is not None
        remover.stdout.readline()
        try:
            for _ in range(3000):
                lock = FolderLock.acquire(folder / LOCK_NAME, owner=None)
                assert lock is not None
                lock.release()
        finally:
            remover.kill()


def test_a_restore_that_was_killed_keeps_nothing(folder: Path) -> None:
    (folder / "guard").touch()
    remove_if_abandoned(folder)
    assert not folder.exists()


def test_a_removal_that_was_killed_is_finished(folder: Path, tmp_path: Path) -> None:
    remove_if_abandoned(folder.rename(tmp_path / "safepoint-x.abandoned"))
    assert not list(tmp_path.iterdir())


def test_a_removal_that_has_begun_is_awaited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the guard: then the folder is gone."""
    has_locked, goes_on = threading.Event(), threading.Event()
    original = Path.rename

    def slow(path: Path, target: Path) -> Path:
        has_locked.set()
        goes_on.wait()
        return original(path, target)

    monkeypatch.setattr(Path, "rename", slow)
    monkeypatch.setattr(abandoned.clock, "sleep", lambda _: goes_on.set())
    removal = threading.Thread(target=remove_if_abandoned, args=(folder,))
    removal.start()
    has_locked.wait()
    with pytest.raises(FileNotFoundError), kept(folder):
        pass
    removal.join()
    assert not list(folder.parent.iterdir())


def test_a_folder_that_is_gone_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), kept(tmp_path / "gone"):
        pass
