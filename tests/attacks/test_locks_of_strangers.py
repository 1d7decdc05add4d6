"""Another program holds the lock of a file that a frozen process had locked: who may read a file can do that.

CRIU waits for the lock, and does not end while it waits.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from safepoint.errors import FreezeError
from safepoint.foundation import clock
from safepoint.transparent.criu import tree_dump
from safepoint.transparent.criu.program import Criu
from safepoint.transparent.criu.tree_dump import TreeRestore
from safepoint.transparent.criu.trees import awaited_lock
from tests.support.patience import PATIENCE

_LOCKS: dict[str, Callable[[int, int], object]] = {"flock": fcntl.flock, "lockf": fcntl.lockf}
_CRIU = """#!{python}
import fcntl, os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
file = open({path!r}, "r+")
fcntl.{kind}(file, fcntl.LOCK_EX)
"""


@pytest.fixture(params=_LOCKS)
def criu(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Criu]:
    """A stand-in for CRIU that waits for the lock of `file`, as CRIU does. This process holds the lock."""
    path, program = tmp_path / "file", tmp_path / "criu"
    program.write_text(_CRIU.format(python=sys.executable, path=str(path), kind=request.param))
    program.chmod(0o700)
    with path.open("w") as file:
        _LOCKS[request.param](file.fileno(), fcntl.LOCK_EX)
        yield Criu(path=str(program), version="4.2")


@pytest.mark.skipif(shutil.which("flock") is None, reason="a restore needs util-linux")
def test_a_restore_that_waits_for_a_lock(criu: Criu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The restore ends with an error that names the file, and so does CRIU."""
    for name in ("_LOCKED_S", "_LOOK_AT_LOCKS_S", "_ENDING_S"):
        monkeypatch.setattr(tree_dump, name, 0.1)
    (tmp_path / "part").mkdir()
    restore = TreeRestore(
        criu, tmp_path / "part", tmp_path / "gate", log=tmp_path / "log", is_in_session_of_other=False
    )
    process: subprocess.Popen[bytes] = getattr(restore, "_process")  # noqa: B009  private
    try:
        with pytest.raises(FreezeError, match=r"had locked .*/file, and another program holds a lock"):
            restore.wait()
        restore.give_up()
        assert process.poll() == -9
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def test_the_file_whose_lock_is_awaited(criu: Criu, tmp_path: Path) -> None:
    """Only of the processes that are asked for. The program that has the lock does not wait."""
    with subprocess.Popen([criu.path]) as process:
        try:
            deadline_s = clock.monotonic_s() + 10 * PATIENCE
            while awaited_lock([process.pid]) is None and clock.monotonic_s() < deadline_s:
                clock.sleep(0.01)
            assert awaited_lock([os.getpid(), process.pid]) == str(tmp_path / "file")
            assert awaited_lock([os.getpid()]) is None
        finally:
            process.kill()
    assert awaited_lock([process.pid]) is None
