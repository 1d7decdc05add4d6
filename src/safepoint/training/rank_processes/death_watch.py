"""Waits until a child process ends, without polling.

A pidfd is a descriptor that becomes readable when its process ends. If the kernel has no pidfds (before Linux 5.3,
and in some sandboxes), the wait ends after a tenth of a second, and the caller checks the processes itself.
"""

import contextlib
import os
import select
from collections.abc import Iterable

from safepoint.foundation import clock

_WITHOUT_DESCRIPTORS_S = 0.1


class DeathWatch:
    """Watches children of this process. The caller still has to collect their exit codes."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}
        self._poll = select.poll()
        self._is_complete = True

    def watch(self, pids: Iterable[int]) -> None:
        """Watch only these processes from now on. Their exit codes must not have been collected yet."""
        wanted = set(pids)
        for pid in self._descriptors.keys() - wanted:
            self._forget(pid)
        self._is_complete = True
        for pid in wanted - self._descriptors.keys():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue  # the process has ended, and its exit code was collected
            except (OSError, AttributeError):
                self._is_complete = False
                continue
            self._descriptors[pid] = descriptor
            self._poll.register(descriptor, select.POLLIN)

    def wait(self, limit_s: float) -> bool:
        """Wait until a process has ended, or for `limit_s` seconds.

        A process that has already been reported as ended does not end the wait again.

        Returns:
            Whether a process has ended. If the kernel has no pidfds, always False.
        """
        if not self._is_complete:
            clock.sleep(min(limit_s, _WITHOUT_DESCRIPTORS_S))
            return False
        ready = {descriptor for descriptor, _ in self._poll.poll(1000 * limit_s)}
        for pid in [pid for pid, descriptor in self._descriptors.items() if descriptor in ready]:
            self._poll.unregister(self._descriptors[pid])
        return bool(ready)

    def close(self) -> None:
        """Stop watching."""
        for pid in list(self._descriptors):
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        descriptor = self._descriptors.pop(pid)
        with contextlib.suppress(KeyError):
            self._poll.unregister(descriptor)
        os.close(descriptor)


def exit_code_of_child(pid: int) -> int | None:
    """The exit code of a child that has ended, negative for a signal; None while it runs, or if it is not a child.

    This call does not collect the exit code.
    """
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
