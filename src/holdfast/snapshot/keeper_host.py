"""Starts a keeper's process, and another one when it dies."""

import contextlib
import subprocess
import sys

from holdfast.snapshot.keeper_process import KeeperPlan, plan_text
from holdfast.snapshot.messages import keep_from_children


class KeeperHost:
    """A keeper that lives as long as this process, and until its work is done.

    Args:
        plan: what it needs to know.
    """

    def __init__(self, plan: KeeperPlan) -> None:
        self.name = plan.name
        self._plan = plan
        self._process = _start(plan)

    @property
    def pid(self) -> int:
        """Of the keeper that runs now."""
        return self._process.pid

    def ensure(self) -> bool:
        """Start a new one when the last one has died; whether that was so."""
        if self._process.poll() is None:
            return False
        self._hang_up()
        self._process = _start(self._plan)
        return True

    def _hang_up(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"bye")
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def finish(self, timeout_s: float | None = None) -> bool:
        """Let it end after its work, and wait for that.

        Args:
            timeout_s: how long at most; then it is killed.

        Returns:
            Whether it ended by itself.
        """
        self._hang_up()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True


def _start(plan: KeeperPlan) -> "subprocess.Popen[bytes]":
    # A session of its own: whoever kills a rank's or a launcher's process group does not kill what keeps their work.
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.snapshot.keeper_process", plan_text(plan)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    keep_from_children(process.stdin)
    return process


__all__ = ["KeeperHost"]
