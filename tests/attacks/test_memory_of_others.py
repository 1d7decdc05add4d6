"""What the kernel reads from the memory of a process of another user, such as its environment.

Its user can map this memory from a file system that never answers (FUSE, which needs no rights in a user namespace).
Then everyone who reads the environment waits for ever; root may read that of every process.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from safepoint.foundation import processes
from safepoint.foundation.processes import JOB_VARIABLE, processes_of
from safepoint.jobs.local.images import last_resort
from safepoint.jobs.local.images.last_resort import carried_folders

_STRANGER = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
_PATIENCE_S = 30.0


def test_the_environment_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe stands for an environment that never answers."""
    own = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        env={**os.environ, JOB_VARIABLE: str(tmp_path)},
    )
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / str(own.pid)).symlink_to(f"/proc/{own.pid}")
    other = tmp_path / "proc" / "4194303"
    other.mkdir()
    (other / "status").write_text(f"Name:\tx\nUid:\t{_STRANGER}\t{_STRANGER}\t{_STRANGER}\t{_STRANGER}\n")
    os.mkfifo(other / "environ")
    found: list[list[int]] = []
    monkeypatch.setattr(processes, "_PROC", tmp_path / "proc")
    thread = threading.Thread(target=lambda: found.append(processes_of(tmp_path)))
    thread.start()
    try:
        thread.join(_PATIENCE_S)
        assert found == [[own.pid]]
    finally:
        if thread.is_alive():
            (other / "environ").write_bytes(b"")
        thread.join()
        own.communicate()


@needs_root
def test_a_process_of_another_user_names_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`freeze --pid` would copy the folder into the image as root, and `thaw` would give the copy to the user."""
    folder = tmp_path / "safepoint_code_abcdefgh"
    environment = {"PYTHONPATH": str(folder)}
    own = subprocess.Popen("/bin/cat", stdin=subprocess.PIPE, env=environment)
    other = subprocess.Popen("/bin/cat", stdin=subprocess.PIPE, env=environment, user=_STRANGER)
    monkeypatch.setattr(last_resort, "running_launchers", list)
    try:
        for one in (own, other):
            while not Path(f"/proc/{one.pid}/environ").read_bytes():
                time.sleep(0.001)  # the kernel shows the variables a moment after the new program has begun
        assert carried_folders([own.pid, other.pid]) == {own.pid: [folder], other.pid: []}
    finally:
        own.communicate()
        other.communicate()
