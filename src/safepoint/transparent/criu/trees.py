"""Process trees: which processes belong to one, what they have open and in memory, and how they are ended."""

import contextlib
import os
import select
import signal
from collections.abc import Generator, Iterable
from pathlib import Path

from safepoint.errors import printable
from safepoint.foundation import clock
from safepoint.foundation.processes import kernel_lines

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ENDED_S = 5.0
"""How long killed processes may take to end, which includes that the kernel frees their memory."""


def processes_of(root: int, proc: Path = Path("/proc")) -> list[int]:
    """The processes of the tree of `root`, parents first; empty if `root` does not exist.

    Args:
        root: the number of the root process.
        proc: where the proc file system is mounted.
    """
    found: list[int] = []
    pending = [root]
    while pending:
        pid = pending.pop(0)
        children = children_of(pid, proc)
        if children is not None:
            found.append(pid)
            pending += children
    return found


def children_of(pid: int, proc: Path = Path("/proc")) -> list[int] | None:
    """The processes that a process has started; None if it does not exist.

    Args:
        pid: the number of the process.
        proc: where the proc file system is mounted.
    """
    found: list[int] = []
    try:
        tasks = list((proc / str(pid) / "task").iterdir())
    except OSError:
        return None
    for task in tasks:
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def open_files(pid: int, proc: Path = Path("/proc")) -> list[str]:
    """What a process has open: paths, and names such as `anon_inode:[io_uring]`; empty if it has ended.

    Args:
        pid: the process.
        proc: where the proc file system is mounted.
    """
    folder = proc / str(pid) / "fd"
    found: list[str] = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                found.append(os.readlink(folder / name))
    return found


def resident_bytes(pids: Iterable[int], proc: Path = Path("/proc")) -> int:
    """The memory of processes, in bytes: an upper limit for what CRIU writes.

    Shared memory is counted once for each process.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = kernel_lines(proc / str(pid) / "status")
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith((b"VmRSS:", b"VmSwap:")))
    return total


def name_of(pid: int, proc: Path = Path("/proc")) -> str:
    """The name of a process, such as `python3`, with escapes for control characters; `?` if it has ended."""
    try:
        return printable((proc / str(pid) / "comm").read_text(errors="replace").strip()) or "?"
    except OSError:
        return "?"


@contextlib.contextmanager
def held(pids: Iterable[int]) -> Generator[list[int]]:
    """Open a pidfd (a descriptor that stands for one process) of each process. A process that has ended has none.

    Their user may end stopped processes, and then other processes may get their numbers. A pidfd never stands for
    another process.
    """
    found: list[int] = []
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                found.append(os.pidfd_open(pid))
        yield found
    finally:
        for descriptor in found:
            os.close(descriptor)


def send(number: signal.Signals, held_processes: Iterable[int]) -> None:
    """Send a signal to processes.

    Args:
        number: the signal.
        held_processes: what `held` has yielded.
    """
    for descriptor in held_processes:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)


def kill(held_processes: Iterable[int], within_s: float = _ENDED_S) -> None:
    """End processes, and wait until they have ended: then their memory, files and ports are free.

    A process that waits for a device or a file server ends later. This function does not wait for it longer than
    `within_s`.

    Args:
        held_processes: what `held` has yielded.
        within_s: how long to wait, in seconds.
    """
    descriptors = list(held_processes)
    send(signal.SIGKILL, descriptors)
    deadline_s = clock.monotonic_s() + within_s
    for descriptor in descriptors:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)  # a pidfd is readable when its process has ended
        waiting.poll(max(0, deadline_s - clock.monotonic_s()) * 1000)
