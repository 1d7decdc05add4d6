"""The end of a child is noticed at once, and its exit code can be read before it is waited for."""

import os
import signal
import subprocess
import sys

import pytest

from safepoint.foundation import clock
from safepoint.training.rank_processes.death_watch import DeathWatch, exit_code_of_child
from tests.support.patience import PATIENCE


def child(code: str = "import sys; sys.stdin.read()") -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE)


def test_a_death_ends_the_wait_at_once() -> None:
    """A process that runs, then one that was killed; the same death does not end a second wait."""
    one, other = child(), child()
    watch = DeathWatch()
    try:
        watch.watch([one.pid, other.pid])
        assert not watch.wait(0)
        assert exit_code_of_child(one.pid) is None
        one.send_signal(signal.SIGKILL)
        assert watch.wait(60 * PATIENCE)
        assert exit_code_of_child(one.pid) == -signal.SIGKILL
        assert not watch.wait(0)
        assert one.wait() == -signal.SIGKILL, "its exit code is still there"
        assert exit_code_of_child(one.pid) is None
        watch.watch([other.pid])
        assert other.stdin is not None
        other.stdin.close()
        assert watch.wait(60 * PATIENCE)
        assert exit_code_of_child(other.pid) == 0
    finally:
        for process in (one, other):
            process.kill()
            process.communicate()
        watch.close()


def test_no_descriptor_is_left() -> None:
    """Many restarts watch many processes, one after the other."""
    processes = [child() for _ in range(3)]
    before = len(os.listdir("/proc/self/fd"))
    watch = DeathWatch()
    try:
        for process in processes:
            watch.watch([process.pid])
        assert len(os.listdir("/proc/self/fd")) == before + 1
        watch.close()
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_without_pidfds_the_caller_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an old kernel the wait is short, and reports nothing."""

    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    slept: list[float] = []
    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(clock, "sleep", slept.append)
    watch = DeathWatch()
    watch.watch([os.getpid()])
    assert not watch.wait(1.0)
    assert not watch.wait(0.05)
    assert slept == [0.1, 0.05]
