"""What NFS does differently, imitated; `test_nfs.py` has the real one."""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.working_checkpoint import RankPart
from safepoint.foundation import files
from safepoint.foundation.shared_folders.leases import Lease, lease_on, reading
from safepoint.snapshot.keeper.persist.snapshot_commit import Nodes
from tests.support.checkpoints import commit, prepared


@pytest.fixture
def posix_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS makes byte-range locks of `flock`: an exclusive one needs a file that is open for writing."""
    real = fcntl.flock

    def flock(file: Any, operation: int) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        may_write = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        if operation & fcntl.LOCK_EX and not may_write:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("posix_flock")
def test_a_checkpoint_that_is_being_read_is_not_deleted(tmp_path: Path) -> None:
    """Also where `flock` refuses an exclusive lock on a file that is open for reading."""
    output = prepared(tmp_path / "out")
    folder = commit(output, 3)
    with reading(folder / "safepoint-manifest.json"):
        assert output.is_in_use("checkpoint-3")
        assert not output.delete("checkpoint-3")
    assert not output.is_in_use("checkpoint-3")
    assert output.delete("checkpoint-3")


def test_a_lease_on_a_file_that_may_not_be_written(tmp_path: Path) -> None:
    """A manifest with a second name is opened for reading only."""
    folder = commit(prepared(tmp_path / "out"), 3)
    os.link(folder / "safepoint-manifest.json", tmp_path / "second")
    with reading(folder / "safepoint-manifest.json"):
        assert lease_on(folder / "safepoint-manifest.json") is Lease.READER
    assert lease_on(folder / "safepoint-manifest.json") is Lease.NONE


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutRenameat2:
        def __init__(self, *arguments: object, **options: object) -> None:
            pass

    monkeypatch.setattr(files.ctypes, "CDLL", WithoutRenameat2)


@pytest.mark.usefixtures("no_exchange")
@pytest.mark.parametrize("num_renames", [1, 2, 3])
def test_a_crash_while_a_checkpoint_is_replaced_loses_none(num_renames: int, tmp_path: Path) -> None:
    """Where two names cannot be exchanged, the checkpoint has no name for a moment. The next run gives it back."""
    output = prepared(tmp_path / "out")
    commit(output, 3)
    working = tmp_path / "out/.safepoint/work/dead"
    working.mkdir()
    os.link(output.root / "checkpoint-3/safepoint-manifest.json", working / "not-a-checkpoint")
    child = os.fork()
    if child == 0:
        left = [num_renames]
        real = os.rename

        def rename(*names: str, **folders: int | None) -> None:
            real(*names, **folders)
            left[0] -= 1
            if left[0] == 0:
                os._exit(0)  # a crash after this call

        setattr(os, "rename", rename)  # noqa: B010  in the child, which ends at once
        files.replace_folder(working, output.root / "checkpoint-3", trash=output.trash)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert (output.root / "checkpoint-3").exists() == (num_renames > 1), "the crash is where it should be"
    after = OutputFolder(output.root)
    assert after.claim(wait_s=0, waiting=lambda who: None)
    after.clean()
    if num_renames == 1:
        assert verify(output.root / "checkpoint-3").is_valid
    else:
        assert (output.root / "checkpoint-3/not-a-checkpoint").exists()
    assert list(output.trash.iterdir()) == []
    after.release()


class ForgetfulNames:
    """Remembers that a name is missing until its folder is opened, as an NFS client does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._missing: set[Path] = set()
        self._open, self._stat = os.open, os.stat
        monkeypatch.setattr(os, "open", self._opening)
        monkeypatch.setattr(os, "stat", self._looking)

    def _checked(self, call: Callable[..., Any], path: Any, *arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() or isinstance(path, int):
            return call(path, *arguments, **options)  # the other machine
        if Path(path) in self._missing:
            raise FileNotFoundError(errno.ENOENT, "no such file, says the cache", str(path))
        try:
            return call(path, *arguments, **options)
        except FileNotFoundError:
            self._missing.add(Path(path))
            raise

    def _opening(self, path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECTORY:
            self._missing = {name for name in self._missing if name.parent != Path(path)}
        return self._checked(self._open, path, flags, *arguments, **options)

    def _looking(self, path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        return self._checked(self._stat, path, *arguments, **options)


def test_keepers_of_several_nodes_see_each_others_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has looked for a file remembers for half a minute that it was missing."""
    first, second = (Nodes(tmp_path, index=index, count=2) for index in (0, 1))
    (tmp_path / "1").mkdir()
    ForgetfulNames(monkeypatch)
    give_up_s = time.monotonic() + 10

    def is_over() -> bool:
        return time.monotonic() > give_up_s

    assert not first.is_called()

    def act() -> None:
        time.sleep(0.2)  # the other has looked by now, and more often
        second.publish(1, RankPart(rank=1))
        second.offer([1])

    other = threading.Thread(target=act)
    other.start()
    assert [part.error for part in first.collect(1, is_over)] == [None]
    other.join()
    assert first.is_called()
