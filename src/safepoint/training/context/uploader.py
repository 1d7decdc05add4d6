"""The uploader's process, seen from the rank: started before the first step, asked to finish at the end."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.uploader_process import UploaderPlan, plan_text
from safepoint.errors import ExitCode
from safepoint.foundation import clock

_MOST_DEATHS = 5
_FORGET_AFTER_S = 600.0


class Uploader:
    """A running uploader.

    Args:
        plan: what it does.
    """

    def __init__(self, plan: UploaderPlan) -> None:
        self.location = plan.location
        self.folder = plan.folder
        self._plan = plan
        # The status of an earlier uploader is not this one's.
        self._status = OutputFolder(Path(plan.folder)).control / "upload.json"
        self._status.unlink(missing_ok=True)
        self._process = _start(plan)
        self._deaths_s: list[float] = []
        self._result: bool | None = None
        self._check_at_s = 0.0

    def failure(self) -> str | None:
        """Why uploads fail now, or None; checks at most once a second, and restarts an uploader that died."""
        if clock.monotonic_s() < self._check_at_s:
            return None
        self._check_at_s = clock.monotonic_s() + 1.0
        code = self._process.poll()
        if code is not None:
            if code == ExitCode.CONFLICT:
                return "another run uses the location now"
            now_s = clock.monotonic_s()
            self._deaths_s = [death_s for death_s in self._deaths_s if now_s - death_s < _FORGET_AFTER_S]
            if len(self._deaths_s) >= _MOST_DEATHS:
                return f"the uploader ended {len(self._deaths_s)} times, the last time with exit code {code}"
            self._deaths_s.append(now_s)
            self._restart()
            return None
        return self.status().get("error")

    @property
    def is_idle(self) -> bool:
        """Whether the uploader had nothing left to do when it last wrote its status."""
        return self.status().get("state") == "idle"

    def status(self) -> dict[str, Any]:
        """The last status that the uploader wrote: `time`, `state` and more; empty before it wrote one."""
        try:
            return cast("dict[str, Any]", json.loads(self._status.read_bytes()))
        except (OSError, ValueError):
            return {}

    def _restart(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process = _start(self._plan)

    def finish(self, *, newest_only: bool, deadline_s: float | None) -> bool:
        """Wait until everything, or the newest checkpoint, is in the store, or until the deadline.

        Args:
            newest_only: leave out all other checkpoints.
            deadline_s: by the monotonic clock; None waits as long as it takes.

        Returns:
            Whether it is in the store; later calls return the same.
        """
        if self._result is None:
            if self._process.poll() not in {None, ExitCode.CONFLICT}:
                self._restart()
            command = json.dumps({"newest_only": newest_only, "deadline_s": deadline_s}).encode() + b"\n"
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - clock.monotonic_s()) + 0.5
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended; its exit code says how
                self._process.stdin.write(command)
                self._process.stdin.flush()
            try:
                self._result = self._process.wait(timeout_s) == 0
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
                self._result = False
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        return self._result


def _start(plan: UploaderPlan) -> "subprocess.Popen[bytes]":
    # A session of its own: a launcher that kills this rank's process group leaves the uploader its grace period.
    return subprocess.Popen(
        [sys.executable, "-m", "safepoint.checkpoint.remote.uploader_process", plan_text(plan)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
