"""Process trees: which processes belong to one, what they have open and in memory, and how they are ended."""

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


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
        try:
            tasks = list((proc / str(pid) / "task").iterdir())
        except OSError:
            continue
        found.append(pid)
        for task in tasks:
            with contextlib.suppress(OSError):
                pending += map(int, (task / "children").read_text().split())
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
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = dict(
                line.split(":", 1) for line in (proc / str(pid) / "status").read_text().splitlines() if ":" in line
            )
            total += sum(int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmSwap") if name in fields)
    return total


def name_of(pid: int, proc: Path = Path("/proc")) -> str:
    """The name of a process, such as `python3`; `?` if it has ended."""
    try:
        return (proc / str(pid) / "comm").read_text(errors="replace").strip() or "?"
    except OSError:
        return "?"


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Send a signal to processes that are stopped, and cannot have ended: their numbers are still theirs."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
