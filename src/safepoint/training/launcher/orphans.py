"""Ends orphans at the end of the run: processes that a script has started, and whose parent has ended.

With `PR_SET_CHILD_SUBREAPER`, the launcher becomes the parent of such processes. Without this call, init would become
their parent, and the launcher could not find them. If the launcher itself is killed with SIGKILL, the orphans
continue.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection

from safepoint.foundation import clock, processes

_log = logging.getLogger("safepoint")
_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 3.0
"""How long to wait until the processes have ended by themselves. After SIGTERM, the launcher waits for this time once
more."""
_LOOK_EVERY_S = 0.05
_MOST_NAMED = 3


class Orphans:
    """The processes that ranks of this launcher leave behind."""

    def __init__(self) -> None:
        self._others = frozenset(processes.tree_of(os.getpid()))
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def reap(self, own: Collection[int]) -> None:
        """Collect the exit codes of orphans that have ended, as init would do.

        Args:
            own: processes that this method must not reap, because other code of the launcher waits for them.
        """
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in own or ended.si_pid in self._others:
                    return
                os.waitpid(ended.si_pid, 0)

    def end(self, left_s: Callable[[], float | None]) -> None:
        """End the processes that still run when the ranks have ended: with SIGTERM, then with SIGKILL.

        At this time, the keeper (the process of the node that writes snapshots to disk) has ended too.

        Args:
            left_s: returns the seconds that are left before this process is killed, or None for no limit.
        """
        if not self._wait(left_s):
            left = self._running()
            names = ", ".join(f"{pid} ({processes.name_of(pid)})" for pid in sorted(left)[:_MOST_NAMED])
            more = f" and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
            _log.warning("the script left processes behind: %s%s; Safepoint ends them", names, more)
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM)
            if not self._wait(left_s):
                processes.kill(self._running())
                self._wait(lambda: None)

    def _wait(self, left_s: Callable[[], float | None]) -> bool:
        """Wait for a few seconds until no process is left. Return whether no process is left."""
        end_s = clock.monotonic_s() + _PATIENCE_S
        while self._running():
            left = left_s()
            if clock.monotonic_s() >= end_s or (left is not None and left <= _PATIENCE_S):
                return False
            clock.sleep(_LOOK_EVERY_S)
        return True

    def _running(self) -> set[int]:
        self.reap(())
        return {pid for pid in processes.tree_of(os.getpid()) if pid not in self._others and _is_running(pid)}


def _is_running(pid: int) -> bool:
    identity = processes.identify(pid)
    return identity is not None and identity.is_alive
