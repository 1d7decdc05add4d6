"""Stops all processes of several trees, so that all of them are dumped as they are at one moment.

The processes are stopped with SIGSTOP, not by CRIU. So they are still stopped after CRIU has dumped them. Each tree
is dumped by a CRIU process of its own, and these CRIU processes do not wait for each other. If anything fails,
SIGCONT is enough to undo the stop.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path

from safepoint.errors import FreezeError
from safepoint.foundation import clock
from safepoint.foundation.processes import STOPPED, children_of, name_of, run_state
from safepoint.transparent.criu.trees import held, send

_WITHIN_S = 10.0
_LOOK_S = 0.002
_AT_REST = STOPPED | {"Z", "X"}
"""The states in /proc of a thread that does not run: stopped, traced, or ended."""


@contextlib.contextmanager
def stopped_trees(
    roots: Sequence[int],
    *,
    stopping: Callable[[int], None],
    within_s: float = _WITHIN_S,
) -> Generator[dict[int, int]]:
    """Stop all processes of trees, and yield when every thread of them is stopped.

    When the `with` block ends, they are still stopped.

    Args:
        roots: the root processes.
        stopping: called with the number of each process before the process is stopped, so that a guard can send
            SIGCONT to it if Safepoint is killed.
        within_s: how long to wait.

    Yields:
        All processes of the trees, parents first, each with a pidfd for `send`. The pidfd was opened before the
        process was stopped, because the user may end the process at any time, and another process may get its number.

    Raises:
        FreezeError: not all of the processes stopped in time; they run on.
    """
    with contextlib.ExitStack() as stack:
        stopped: dict[int, int] = {}
        moving: list[int] = []
        deadline_s = clock.monotonic_s() + within_s
        try:
            pending: list[tuple[int, int | None]] = [(root, None) for root in roots]
            while pending and not moving:
                for pid, parent in pending:
                    for held_process in stack.enter_context(held([pid])):
                        # If the process is still a child of its parent, which is stopped, no other process has its
                        # number.
                        if parent is None or pid in (children_of(parent) or ()):
                            stopping(pid)
                            stopped[pid] = held_process
                            send(signal.SIGSTOP, [held_process])
                while (
                    moving := [pid for pid, _ in pending if pid in stopped and not _is_at_rest(pid)]
                ) and clock.monotonic_s() < deadline_s:
                    clock.sleep(_LOOK_S)
                # A process that has called vfork, as `subprocess` does, cannot stop before its child has executed a
                # program. A stopped child would never do that. So no process is stopped before its parent has
                # stopped. A stopped process starts no further processes.
                pending = [(new, pid) for pid in stopped for new in children_of(pid) or () if new not in stopped]
        except BaseException:
            send(signal.SIGCONT, stopped.values())
            raise
        if moving:
            send(signal.SIGCONT, stopped.values())
            names = ", ".join(f"{pid} ({name_of(pid)})" for pid in moving[:3])
            raise FreezeError(
                f"process {names} did not stop within {within_s:.0f} s; the processes run on, and no image was made",
                hint="it may wait for a file server or a device; try again later",
            )
        yield stopped


def refuse_stopped(pids: Iterable[int]) -> None:
    """Check that no process is stopped already.

    Raises:
        FreezeError: a process is stopped already. The signal that ends the freeze would let it run.
    """
    for pid in pids:
        if run_state(Path(f"/proc/{pid}")) in STOPPED:
            raise FreezeError(
                f"process {pid} ({name_of(pid)}) is stopped, or a debugger traces it; nothing was frozen",
                hint=f"end the debugger, or let the process continue: kill -CONT {pid}",
            )


def _is_at_rest(pid: int) -> bool:
    """Whether no thread of the process runs. True if the process has ended."""
    threads = Path(f"/proc/{pid}/task")
    with contextlib.suppress(OSError):
        return all(run_state(threads / name) in _AT_REST for name in os.listdir(threads))
    return True
