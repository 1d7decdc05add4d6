"""A rank's uploads to the object store.

This module starts the uploader, a process that sends committed checkpoints to the object store. The module finds out
which uploads are missing at the end, and whether the run has to stop because uploads fail.
"""

import contextlib
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

from safepoint.checkpoint.local.final_model import TrainingEnd, adopt_scripts_model
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.uploader_process import UploaderPlan, plan_line
from safepoint.errors import ExitCode, SafepointError, StorageError
from safepoint.foundation import clock
from safepoint.foundation.bounded_json import read_object
from safepoint.foundation.events.upload_events import UploadUnfinished
from safepoint.foundation.shared_folders import no_links
from safepoint.settings.run_settings import RunSettings
from safepoint.training.context.reporter import Reporter
from safepoint.training.context.termination import Termination

_log = logging.getLogger("safepoint")
_EXIT_S = 0.5
"""Seconds that a process needs to exit after the last upload."""
_MOST_DEATHS = 5
_FORGET_AFTER_S = 600.0


class Uploader:
    """The uploader process of one training. If the process dies, this class starts it again.

    Args:
        plan: what to upload, and where to.
    """

    def __init__(self, plan: UploaderPlan) -> None:
        self.plan = plan
        # Remove the status that an earlier uploader left.
        self._status = OutputFolder(Path(plan.folder)).control / "upload.json"
        with contextlib.suppress(OSError):  # if it stays, the uploader replaces it
            no_links.unlink(self._status)
        self._process = _start(plan)
        self._deaths_s: list[float] = []
        self._result: bool | None = None
        self.newest_only = True
        """Whether `finish` was called for the newest checkpoint only. Also True before the first call of `finish`."""
        self._check_at_s = 0.0

    def failure(self) -> str | None:
        """Check the uploader, and restart it if it died.

        Returns:
            Why uploads fail. None if they do not fail, if the uploader has just been restarted, or if the last check
            was less than a second ago.
        """
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

    def status(self) -> dict[str, Any]:
        """The last status that the uploader wrote; empty if there is no status yet.

        Its entries are `time`, `state` (`idle` without work) and more.
        """
        try:
            return read_object(self._status)
        except (OSError, ValueError):
            return {}

    def _restart(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process = _start(self.plan)

    def finish(self, *, newest_only: bool, deadline_s: float | None) -> bool:
        """Request that the uploader finishes its work, and wait for its end, at most until the deadline.

        Args:
            newest_only: whether to upload only the newest checkpoint.
            deadline_s: a time of the monotonic clock; None for no limit.

        Returns:
            Whether all files are in the store. If `newest_only` is True: whether the newest checkpoint is in the
            store. Later calls return the result of the first call.
        """
        if self._result is None:
            if self._process.poll() not in {None, ExitCode.CONFLICT}:
                self._restart()
            self.newest_only = self.newest_only and newest_only
            command = json.dumps({"newest_only": newest_only, "deadline_s": deadline_s}).encode() + b"\n"
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - clock.monotonic_s()) + 0.5
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # the uploader has ended; its exit code says how
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


class Uploads:
    """The uploads of this rank's trainings, one training after another; most ranks upload nothing.

    Args:
        settings: what to do when uploads fail, and the grace period.
        reporter: reports uploads that did not finish.
        termination: says how much time is left.
    """

    def __init__(self, settings: RunSettings, reporter: Reporter, termination: Termination) -> None:
        self._settings = settings
        self._reporter = reporter
        self._termination = termination
        self._training_end: TrainingEnd | None = None
        self._final_missing: str | None = None
        self._missing_before: str | None = None
        self.uploader: Uploader | None = None
        """The uploader of the last training that had an uploader on this rank."""
        self.stop_reason: str | None = None
        """Why uploads fail, if the run stops for this reason; None if it does not."""

    def start(self, plan: UploaderPlan) -> None:
        """Start the uploader of a training."""
        self.uploader = Uploader(plan)

    def close_training(self) -> None:
        """Wait for the last training's uploader, and record missing files; called before a further training."""
        if not self.finish(newest_only=False):
            self._missing_before = self._missing_before or self._unfinished
        self._missing_before = self._missing_before or self._final_missing
        self._training_end = self._final_missing = None

    def training_ended(self, end: TrainingEnd) -> None:
        """Record that the training has ended. A model that the script saves from now on becomes the final model."""
        self._training_end = end

    def final_model_missing(self, reason: str) -> None:
        """Record that the final model is not in the object store.

        Args:
            reason: why the model is not there, and what to do.
        """
        self._final_missing = reason

    def check(self) -> None:
        """Restart an uploader that died; called at the end of each step.

        If uploads fail, and the setting `on_upload_failure` is `stop`, this method requests a stop of the run.
        """
        failure = self.uploader.failure() if self.uploader is not None else None
        if failure is None or self._settings.on_upload_failure != "stop" or self.stop_reason is not None:
            return
        self.stop_reason = failure
        _log.error("stopping, because uploads fail: %s", failure)
        self._termination.request_stop()

    def finish(self, *, newest_only: bool) -> bool:
        """Wait for the uploader; after a stop request, at most until the deadline. Report unfinished uploads.

        Args:
            newest_only: see `Uploader.finish`. If True, the wait is limited by the grace period, even if no stop was
                requested.

        Returns:
            Whether everything that was to be uploaded is in the object store.
        """
        uploader = self.uploader
        if uploader is None:
            return True
        limit_s = self._settings.grace_s - self._settings.margin_s if newest_only else float("inf")
        wait_s = min(self._termination.available_s, limit_s)
        deadline_s = None if wait_s == float("inf") else clock.monotonic_s() + max(0.0, wait_s - _EXIT_S)
        is_complete = uploader.finish(newest_only=newest_only, deadline_s=deadline_s)
        if not is_complete:
            self._reporter.report(
                UploadUnfinished(
                    location=uploader.plan.location, folder=uploader.plan.folder, newest_only=uploader.newest_only
                )
            )
        return is_complete

    def adopt_scripts_model(self) -> None:
        """If the script has saved a model after its training, upload that model as the final model."""
        if self.uploader is None or self._training_end is None:
            return
        try:
            if adopt_scripts_model(OutputFolder(Path(self.uploader.plan.folder)), self._training_end):
                self._final_missing = None
        except (OSError, ValueError, SafepointError) as error:
            _log.warning(
                "the model that the script saved cannot be used: %s; Safepoint's own save stays the final model",
                error,
            )

    def missing(self, *, is_complete: bool) -> str:
        """What is not in the object store at the end of the program, in a sentence; empty if nothing is missing.

        Args:
            is_complete: what `finish` returned.
        """
        if self.uploader is None:
            return ""
        if not is_complete:
            return self._unfinished
        before = self._missing_before and f"in an earlier training of this script: {self._missing_before}"
        return self._final_missing or before or ""

    def require_complete(self) -> None:
        """Wait until everything is in the object store; used when no launcher waits for the end of the program.

        Raises:
            StorageError: files are missing in the object store.
        """
        if not self.finish(newest_only=False):
            raise StorageError(
                "some files are missing in the object store; the local folder has them",
                hint="run the script again when the store can be used; the script then uploads the missing files",
            )
        if self._final_missing is not None:
            raise StorageError(self._final_missing)
        self.uploader = None

    @property
    def _unfinished(self) -> str:
        return "" if self.uploader is None else f"uploads to {self.uploader.plan.location} did not finish"


def _start(plan: UploaderPlan) -> "subprocess.Popen[bytes]":
    # The uploader gets a session of its own: a launcher that kills this rank's process group must not kill it.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "safepoint.checkpoint.remote.uploader_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # the uploader has ended; `Uploader.failure` starts it again
        process.stdin.write(plan_line(plan))
        process.stdin.flush()
    return process
