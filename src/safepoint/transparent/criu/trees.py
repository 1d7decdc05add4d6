"""Processes of a tree: what they have open and in memory, and how they are ended."""

import contextlib
import os
import signal
from collections.abc import Generator, Iterable
from pathlib import Path

from safepoint.errors import printable
from safepoint.foundation import clock
from safepoint.foundation.processes import kernel_lines, place_of, wait_for_end

_ENDED_S = 5.0
"""How long killed processes may take to end. In this time, the kernel also frees their memory."""


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


def environment_of(pid: int, proc: Path = Path("/proc")) -> dict[str, str]:
    """The environment with which a process was started; empty if it has ended.

    Of two values of a variable, the first counts, as for the process.
    """
    try:
        text = os.fsdecode((proc / str(pid) / "environ").read_bytes())
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in reversed(text.split("\0")) if "=" in entry)


def resident_bytes(pids: Iterable[int]) -> int:
    """The memory of processes, in bytes: an upper limit for what CRIU writes.

    Shared memory is counted once for each process.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = kernel_lines(Path(f"/proc/{pid}/status"))
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith((b"VmRSS:", b"VmSwap:")))
    return total


def awaited_lock(pids: Iterable[int]) -> str | None:
    """The file whose lock one of the processes waits for; None if no process waits. Another program holds the
    lock."""
    own = set(pids)
    with contextlib.suppress(OSError):
        for line in kernel_lines(Path("/proc/locks")):
            # `1: -> FLOCK ADVISORY WRITE 4711 fe:00:815 0 EOF`; without the arrow, the process has the lock.
            fields = line.split()
            if len(fields) > 6 and fields[1] == b"->" and int(fields[5]) in own:
                return _path_of(int(fields[5]), fields[6].decode())
    return None


def _path_of(pid: int, place: str) -> str:
    """The path of a file that a process has open, from its device and number as the kernel lists them."""
    folder = Path(f"/proc/{pid}/fd")
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if place_of(os.stat(folder / name)) == place:
                    return printable(os.readlink(folder / name))
    return f"the file {place}"


@contextlib.contextmanager
def held(pids: Iterable[int]) -> Generator[list[int]]:
    """Open a pidfd (a descriptor that stands for one process) of each process. A process that has ended has none.

    The user of stopped processes may end them, and then other processes may get their numbers. A pidfd never stands
    for another process.
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
        wait_for_end(descriptor, deadline_s - clock.monotonic_s())
