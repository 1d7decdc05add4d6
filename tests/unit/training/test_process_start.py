"""A process that is about to become ranks: what ends it while it still imports torch."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.foundation.processes import ProcessId, identify
from tests.support.patience import PATIENCE

_LAUNCHER = """
import os, subprocess, sys
os.environ["SAFEPOINT_LAUNCHER_PID"] = str(os.getpid())
rank = subprocess.Popen([sys.executable, "-P", "-m", "safepoint.training", "train.py"], close_fds=False)
print(rank.pid, flush=True)
sys.stdin.read()
os._exit(0)
"""


class Start:
    """A process that a launcher has started, and that imports a torch which takes minutes."""

    def __init__(self, folder: Path, *, is_template: bool) -> None:
        (folder / "torch").mkdir()
        self._mark = folder / "importing"
        (folder / "torch" / "__init__.py").write_text(
            f"import pathlib, time\npathlib.Path({str(self._mark)!r}).touch()\ntime.sleep(300)\n"
        )
        (folder / "train.py").touch()
        self._link, other = socket.socketpair()
        os.set_inheritable(other.fileno(), True)
        path = os.pathsep.join([str(folder), *sys.path])
        variables = os.environ | {"PYTHONPATH": path, "SAFEPOINT_TEMPLATE": str(other.fileno())}
        if not is_template:
            del variables["SAFEPOINT_TEMPLATE"]
        self.launcher = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            cwd=folder,
            close_fds=False,
        )
        other.close()
        assert self.launcher.stdout is not None
        found = identify(int(self.launcher.stdout.readline()))
        assert found is not None
        self.process: ProcessId = found

    def wait_for_import(self) -> None:
        """Wait until the process imports torch."""
        end_s = time.monotonic() + 60 * PATIENCE
        while not self._mark.exists():
            assert time.monotonic() < end_s
            time.sleep(0.01)

    def ends(self) -> bool:
        """Whether the process ends soon."""
        end_s = time.monotonic() + 5 * PATIENCE
        while self.process.is_alive and time.monotonic() < end_s:
            time.sleep(0.01)
        return not self.process.is_alive

    def end_launcher(self) -> None:
        """End the launcher, and wait for its end. The process has the pipe to stdout open, too."""
        for stream in (self.launcher.stdin, self.launcher.stdout):
            if stream is not None:
                stream.close()
        self.launcher.wait()

    def close(self) -> None:
        self.process.send(signal.SIGKILL)
        self.end_launcher()
        self._link.close()


@pytest.fixture(params=[True, False], ids=["template", "rank"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    start = Start(tmp_path, is_template=request.param)
    yield start
    start.close()


def test_it_ends_with_its_launcher(start: Start) -> None:
    """A launcher that was stopped before its ranks began leaves no process that goes on importing."""
    start.wait_for_import()
    start.end_launcher()
    assert start.ends()


def test_it_ends_at_sigterm_and_not_at_a_request_to_save(start: Start) -> None:
    """Nothing is to be saved yet."""
    start.wait_for_import()
    start.process.send(signal.SIGUSR1)
    time.sleep(0.2)
    assert start.process.is_alive
    start.process.send(signal.SIGTERM)
    assert start.ends()
