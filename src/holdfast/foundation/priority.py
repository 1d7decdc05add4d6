"""How much of the processors a process takes while others want them.

Linux puts each session of processes into a group of its own and shares the processors between the groups, unless
control groups do that, as in a pod; then a process's own niceness counts. So both are set. A niceness cannot be taken
back without privileges, a group's can; that is why the first is moderate and the second as low as it goes.
"""

import contextlib
import os
from pathlib import Path

_GROUP = Path("/proc/self/autogroup")
_NICENESS = 10
_GROUP_NICENESS = 19


class Priority:
    """The priority of this process, which has a session of its own; where groups do not count, a lower one now."""

    def __init__(self) -> None:
        self._gives_way = False
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)

    def give_way(self) -> None:
        """Take what others leave."""
        if not self._gives_way:
            self._gives_way = _set_group(_GROUP_NICENESS)

    def hurry(self) -> None:
        """Somebody waits: take as much as others do."""
        if self._gives_way:
            self._gives_way = not _set_group(0)


def _set_group(niceness: int) -> bool:
    """Whether it was done; the system refuses more than ten changes a second, so that callers ask again later."""
    try:
        _GROUP.write_text(str(niceness))
    except OSError:
        return False
    return True


__all__ = ["Priority"]
