"""The keepers of jobs, and what a job may leave behind: processes, sockets, temporary folders."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.jobs import Job, is_alive, wait_until_gone
from tests.support.patience import PATIENCE

_POLL_S = 0.002


def keepers_of(pid: int) -> list[int]:
    """The keepers that a launcher, a torchrun agent or a single process has started, by their names."""
    names = (f'"safepoint-{os.getuid()}-{pid}-'.encode(), f'"safepoint-{os.getuid()}-of-{pid}-'.encode())
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if (
                b"safepoint.snapshot.keeper" in command
                and any(name in command for name in names)
                and is_alive(int(folder.name))
            ):
                found.append(int(folder.name))
    return found


def commands_with(name: str) -> list[bytes]:
    """The command lines of processes that contain a keeper's name."""
    found: list[bytes] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.append(path.read_bytes())
    return [command for command in found if name.encode() in command]


def sockets_of(pid: int) -> list[str]:
    """The sockets of the keepers that process `pid` has started."""
    names = (f"@safepoint-{os.getuid()}-{pid}-", f"@safepoint-{os.getuid()}-of-{pid}-")
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line.split()[-1] for line in lines if any(name in line for name in names)]


def memory_of(pid: int) -> list[str]:
    """The names of the shared memory blocks that a process has open."""
    found: list[str] = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(link)
            if target.startswith("/memfd:safepoint"):
                found.append(target)
    return found


def assert_nothing_left(job: Job, temp: Path, keepers: list[int]) -> None:
    """No keeper, socket or temporary folder is left when the job and its keepers have ended."""
    wait_until_gone(keepers)
    assert not keepers_of(job.process.pid)
    deadline = (
        time.monotonic() + 20 * PATIENCE
    )  # the system releases files that were in transit through a socket only after a while
    while sockets_of(job.process.pid):
        assert time.monotonic() < deadline, sockets_of(job.process.pid)
        time.sleep(_POLL_S)
    assert [path.name for path in temp.iterdir() if path.name.startswith(("safepoint", "scratch"))] == []


def writing_under_way(output: Path) -> bool:
    """Whether a process is writing a checkpoint now."""
    return any((output / ".safepoint" / "work").glob("**/checkpoint-*/merged/*"))


def stop_while_writing(job: Job, timeout_s: float = 60) -> int:
    """Send SIGSTOP to the keeper in the middle of a write; returns its pid."""
    deadline = time.monotonic() + timeout_s * PATIENCE
    while time.monotonic() < deadline:
        assert job.process.poll() is None, job.text
        if not writing_under_way(job.output):
            time.sleep(_POLL_S)
            continue
        for pid in keepers_of(job.process.pid):
            os.kill(pid, signal.SIGSTOP)
            _wait_until_stopped(pid)
            if writing_under_way(job.output):
                return pid
            os.kill(pid, signal.SIGCONT)
    raise AssertionError(f"no write was caught within {timeout_s} s\n{job.text}")


def _wait_until_stopped(pid: int) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(_POLL_S)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process is stopped while the block runs."""
    os.kill(pid, signal.SIGSTOP)
    _wait_until_stopped(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def kill(*pids: int) -> None:
    """Send SIGKILL."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def last_mark(output: Path, num_ranks: int = 1) -> int:
    """Steps done when the newest micro-batch of any rank began."""
    steps = [0]
    for rank in range(num_ranks):
        with contextlib.suppress(OSError, IndexError):
            lines = (output / f"marks-{rank}").read_text().split("\n")[:-1]
            steps.append(int([line for line in lines if line.startswith("train")][-1].split()[1]))
    return max(steps)


def expect_saves_beside_training(job: Job) -> None:
    """Training continues while the keeper is stopped and cannot write anything."""
    [keeper] = keepers_of(job.process.pid)
    with stopped(keeper):
        saved = len(job.events("saved"))
        job.wait_for_mark(f"train {last_mark(job.output) + 3}")
        assert len(job.events("saved")) == saved
