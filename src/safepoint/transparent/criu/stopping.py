"""Stops all processes of several trees, so that all of them are dumped as they are at one moment.

The processes are stopped with SIGSTOP, not by CRIU. So they stay stopped when CRIU has dumped them, and no CRIU has
to wait for another one. If anything fails, SIGCONT is enough to undo it.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from safepoint.errors import FreezeError
from safepoint.foundation import clock
from safepoint.transparent.criu.trees import children_of, held, name_of, send

_WITHIN_S = 10.0
_LOOK_S = 0.002
_AT_REST = frozenset("TtZX")
"""The states in /proc of a thread that does not run: stopped, traced, or ended."""


def stop_trees(
    roots: Sequence[int],
    *,
    stopping: Callable[[int], None],
    within_s: float = _WITHIN_S,
    proc: Path = Path("/proc"),
) -> list[int]:
    """Stop all processes of trees, and return when every thread of them is stopped.

    Args:
        roots: the root processes.
        stopping: called with each process before it is stopped, so that a guard can let it run on.
        within_s: how long to wait.
        proc: where the proc file system is mounted.

    Returns:
        All processes of the trees.

    Raises:
        FreezeError: not all of them stopped in time; they run on.
    """
    stopped: list[int] = []
    moving: list[int] = []
    deadline_s = clock.monotonic_s() + within_s
    try:
        pending = list(roots)
        while pending and not moving:
            for pid in pending:
                stopping(pid)
                stopped.append(pid)
                with held([pid]) as processes:
                    send(signal.SIGSTOP, processes)
            while (
                moving := [pid for pid in pending if not _is_at_rest(pid, proc)]
            ) and clock.monotonic_s() < deadline_s:
                clock.sleep(_LOOK_S)
            # A process that starts a program stops only after the new process has executed the program. So no process
            # is stopped before its parent has stopped. A stopped process starts no further ones.
            pending = [new for pid in stopped for new in children_of(pid, proc) or () if new not in stopped]
        if not moving:
            return stopped
    except BaseException:
        _let_run(stopped)
        raise
    _let_run(stopped)
    names = ", ".join(f"{pid} ({name_of(pid, proc)})" for pid in moving[:3])
    raise FreezeError(
        f"process {names} did not stop within {within_s:.0f} s; the processes run on, and no image was made",
        hint="it may wait for a file server or a device; try again later",
    )


def _let_run(pids: Iterable[int]) -> None:
    with held(pids) as processes:
        send(signal.SIGCONT, processes)


def refuse_stopped(pids: Iterable[int], proc: Path = Path("/proc")) -> None:
    """Check that no process is stopped already.

    Raises:
        FreezeError: one is; it would run on after the freeze.
    """
    for pid in pids:
        if _state(proc / str(pid)) in {"T", "t"}:
            raise FreezeError(
                f"process {pid} ({name_of(pid, proc)}) is stopped, or a debugger traces it; nothing was frozen",
                hint=f"end the debugger, or let the process run on: kill -CONT {pid}",
            )


def _is_at_rest(pid: int, proc: Path) -> bool:
    """Whether no thread of the process runs. True if the process has ended."""
    threads = proc / str(pid) / "task"
    with contextlib.suppress(OSError):
        return all(_state(threads / name) in _AT_REST for name in os.listdir(threads))
    return True


def _state(folder: Path) -> str:
    """The state of a process or a thread; X if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        # The state follows the name, which may contain anything, in brackets.
        return (folder / "stat").read_bytes().rsplit(b")", 1)[1].split()[0].decode()
    return "X"
