"""Lowers the priority of a background process, and restores it while another process waits for that process.

Linux puts each session of processes into a group of its own (autogroup), and shares the processors between these
groups by the niceness of the groups. In a control group, such as the control group of a pod, Linux uses the niceness
of the process instead. So this module sets the niceness of both. Without privileges, a process cannot reduce its own
niceness again, but it can reduce its group's niceness. So the process keeps a niceness of 5, and the group has a
niceness of 19 while the priority is low, and of 0 while the priority is normal.
"""

import contextlib
import os
import threading
from pathlib import Path

_GROUP = Path("/proc/self/autogroup")
_NICENESS = 5
_GROUP_NICENESS = 19
_RETRY_S = 0.1


class Priority:
    """The priority of this process. The process must have a session of its own."""

    def __init__(self) -> None:
        self._niceness = self._requested = 0
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)

    def lower(self) -> None:
        """Use only processor time that no other process needs."""
        self._request(_GROUP_NICENESS)

    def restore(self) -> None:
        """Compete with other processes at normal priority."""
        self._request(0)

    def _request(self, niceness: int) -> None:
        with self._lock:
            self._requested = niceness
            self._apply()

    def _apply(self) -> None:
        if self._niceness == self._requested:
            return
        try:
            _GROUP.write_text(str(self._requested))
            self._niceness = self._requested
        except BlockingIOError:  # Linux accepts ten changes a second, of all processes together
            retry = threading.Timer(_RETRY_S, self._try_again)
            retry.daemon = True
            retry.start()
        except OSError:
            self._niceness = self._requested  # this kernel has no autogroups

    def _try_again(self) -> None:
        with self._lock:
            self._apply()
