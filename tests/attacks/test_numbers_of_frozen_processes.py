"""A user ends processes of their own while root freezes them, and a process of another user gets their number."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.foundation.processes import ProcessId
from safepoint.transparent.criu import guard as guards
from safepoint.transparent.criu import stopping as stopping_module
from safepoint.transparent.criu.guard import Guard
from safepoint.transparent.criu.stopping import stopped_trees
from safepoint.transparent.criu.trees import send


@pytest.fixture
def innocent() -> Iterator["subprocess.Popen[bytes]"]:
    """A process of another user, which the number belongs to in the end."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def test_a_number_that_changes_while_the_tree_is_stopped(
    innocent: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root process is listed with a child that has ended: its number is that of no child any more."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as root:
        answers = [[innocent.pid], []]
        monkeypatch.setattr(
            stopping_module, "children_of", lambda pid: answers.pop(0) if pid == root.pid and answers else []
        )
        signalled: list[int] = []
        try:
            with stopped_trees([root.pid], stopping=signalled.append) as stopped:
                assert list(stopped) == signalled == [root.pid]
                send(signal.SIGKILL, stopped.values())
        finally:
            root.kill()
    assert innocent.poll() is None


def test_a_process_that_ends_after_it_was_stopped() -> None:
    """The signal at the end goes to the process that was stopped: by its number it would reach another one."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        with stopped_trees([process.pid], stopping=lambda _: None) as stopped:
            process.kill()
            process.wait()
            for descriptor in stopped.values():
                with pytest.raises(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGCONT)
            send(signal.SIGKILL, stopped.values())


@pytest.mark.parametrize("is_same", [True, False])
def test_the_guard_of_a_killed_command(
    is_same: bool, innocent: "subprocess.Popen[bytes]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compares when the process was started."""
    found = guards.identify(innocent.pid)
    assert found is not None
    earlier = ProcessId(pid=found.pid, start_ticks=found.start_ticks - (not is_same), boot=found.boot)
    monkeypatch.setattr(guards, "identify", lambda pid: earlier)
    (tmp_path / "pages").mkdir()
    with Guard(tmp_path / "pages", signal.SIGKILL) as guard:
        guard.watch(innocent.pid)
    assert not (tmp_path / "pages").exists()
    if is_same:
        assert innocent.wait() == -signal.SIGKILL
    else:
        assert os.waitpid(innocent.pid, os.WNOHANG) == (0, 0)


def test_a_process_with_the_number_of_criu(
    innocent: "subprocess.Popen[bytes]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the guard would wait for it, and the frozen processes would stay stopped as long as it runs."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as frozen:
        found = guards.identify(innocent.pid)
        assert found is not None
        earlier = ProcessId(pid=found.pid, start_ticks=found.start_ticks - 1, boot=found.boot)
        identify = guards.identify
        monkeypatch.setattr(guards, "identify", lambda pid: earlier if pid == innocent.pid else identify(pid))
        frozen.send_signal(signal.SIGSTOP)
        try:
            with Guard(tmp_path / "pages", signal.SIGKILL) as guard:
                guard.watch(frozen.pid)
                guard.started(innocent.pid)
            assert frozen.wait() == -signal.SIGKILL
        finally:
            frozen.kill()
    assert innocent.poll() is None


def test_the_guard_waits_for_criu(innocent: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    """While CRIU runs, it may be in the memory of the processes."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as frozen:
        try:
            guard = Guard(tmp_path / "pages", signal.SIGKILL)
            guard.watch(frozen.pid)
            guard.started(innocent.pid)
            ending = threading.Thread(target=guard.__exit__, args=(None, None, None))
            ending.start()
            ending.join(1)
            assert ending.is_alive()
            assert frozen.poll() is None
            innocent.kill()
            innocent.wait()
            ending.join()
            assert frozen.wait() == -signal.SIGKILL
        finally:
            frozen.kill()
