"""How much of the processors a process takes while others want them.

Linux puts each session of processes into a group of its own and shares the processors between the groups, unless
control groups do that, as in a pod; then a process's own niceness counts. So both are set. A niceness cannot be taken
back without privileges, a group's can; that is why the first is moderate and the second as low as it goes.
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
    """The priority of this process, which has a session of its own; where groups do not count, a lower one now."""

    def __init__(self) -> None:
        self._niceness = self._wanted = 0
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)

    def give_way(self) -> None:
        """Take what others leave."""
        self._want(_GROUP_NICENESS)

    def hurry(self) -> None:
        """Somebody waits: take as much as others do."""
        self._want(0)

    def _want(self, niceness: int) -> None:
        with self._lock:
            self._wanted = niceness
            self._apply()

    def _apply(self) -> None:
        if self._niceness == self._wanted:
            return
        try:
            _GROUP.write_text(str(self._wanted))
            self._niceness = self._wanted
        except BlockingIOError:  # the system takes ten changes a second, of all processes together
            retry = threading.Timer(_RETRY_S, self._try_again)
            retry.daemon = True
            retry.start()
        except OSError:
            self._niceness = self._wanted  # there are no groups

    def _try_again(self) -> None:
        with self._lock:
            self._apply()
