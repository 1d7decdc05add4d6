"""Which process is which."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from safepoint.foundation.processes import (
    JOB_VARIABLE,
    ProcessId,
    boot_id,
    identify,
    kill,
    memory_of,
    processes_of,
)

_GRANDCHILD = """
import os, subprocess, sys
grandchild = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL)
print(grandchild.pid, flush=True)
os._exit(0)
"""


def wait_until(found: Callable[[], object], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_process_is_known_again_and_ends() -> None:
    """Alive, then gone; a process that waits to be reaped is gone, too."""
    child = subprocess.Popen(["sleep", "60"])
    identity = identify(child.pid)
    assert identity is not None
    assert identity == identify(child.pid)
    assert identity.is_alive
    identity.send(signal.SIGKILL)
    wait_until(lambda: not identity.is_alive)
    assert identify(child.pid) == identity
    assert child.wait() == -signal.SIGKILL
    assert identify(child.pid) is None
    child.wait()
    assert not identity.is_alive
    identity.send(signal.SIGKILL)


def test_another_process_of_the_same_number_is_not_taken_for_it() -> None:
    """Numbers are used again: who started at another time, or since another start of the machine, gets no signal."""
    child = subprocess.Popen(["sleep", "60"])
    identity = identify(child.pid)
    assert identity is not None
    for other in (replace(identity, start_ticks=identity.start_ticks - 1), replace(identity, boot="another")):
        assert not other.is_alive
        other.send(signal.SIGKILL)
    assert identity.is_alive
    assert child.poll() is None
    kill([child.pid])
    assert child.wait() == -signal.SIGKILL


def test_a_name_with_brackets_and_spaces_misleads_nobody(tmp_path: Path) -> None:
    """The system puts the name of the program between the number and everything else."""
    program = tmp_path / "a) Z 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as child:
        try:
            wait_until(lambda: b"a) Z" in Path(f"/proc/{child.pid}/stat").read_bytes())
            identity = identify(child.pid)
            assert identity is not None
            assert identity.is_alive
            system_ticks = float(Path("/proc/uptime").read_text().split()[0]) * os.sysconf("SC_CLK_TCK")
            assert -1 <= system_ticks - identity.start_ticks < 3600 * os.sysconf("SC_CLK_TCK")
        finally:
            child.kill()


def test_numbers_that_nobody_has_are_nobody() -> None:
    """No error either."""
    missing = ProcessId(pid=2**22 + 1, start_ticks=1, boot=boot_id())
    assert identify(missing.pid) is None
    assert not missing.is_alive
    missing.send(signal.SIGTERM)
    kill([missing.pid])


def test_a_grandchild_that_left_its_parent_is_found(tmp_path: Path) -> None:
    """By the name of the job in its environment: its parent is gone, and its session is its own."""
    environ = {**os.environ, JOB_VARIABLE: str(tmp_path)}
    parent = subprocess.run([sys.executable, "-c", _GRANDCHILD], env=environ, stdout=subprocess.PIPE, check=True)
    grandchild = int(parent.stdout)
    assert processes_of(tmp_path) == [grandchild]
    assert processes_of(tmp_path.parent) == [], "the folder of another job, although its name begins alike"
    assert (memory_of(grandchild, tmp_path) or 0) > 1 << 20
    assert (memory_of(grandchild, tmp_path.parent), memory_of(os.getpid(), tmp_path)) == (None, None)
    kill(processes_of(tmp_path))
    wait_until(lambda: processes_of(tmp_path) == [])


def test_whoever_asks_is_never_among_them(tmp_path: Path) -> None:
    """Or a process of a job that looks after another one would end itself."""
    code = f"""
from pathlib import Path
from safepoint.foundation.processes import processes_of
print(processes_of(Path({str(tmp_path)!r})))
"""
    environ = {**os.environ, JOB_VARIABLE: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n", done.stderr
