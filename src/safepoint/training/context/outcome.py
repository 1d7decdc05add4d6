"""The progress and the end of a rank's run: the last step, the last saved step, and the exit code.

One object holds all of these values, because any of three threads can end the run: the thread of the training loop,
the thread that watches signals, and the thread that receives messages from the keeper (the process that writes
snapshots to disk). The first thread that ends the run decides the exit code.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from safepoint.errors import ExitCode, Interrupted, StorageError
from safepoint.foundation.environment import Place
from safepoint.foundation.events import run_events
from safepoint.progress.record import State, state_after
from safepoint.progress.tracker import ProgressTracker
from safepoint.settings.run_settings import RunSettings
from safepoint.snapshot.protocol.messages import Leave
from safepoint.training.context.reporter import Reporter
from safepoint.training.context.termination import Termination
from safepoint.training.context.uploads import Uploads
from safepoint.training.outcome.launcher_folder import reserved_s
from safepoint.training.outcome.rank_record import RankRecordWriter

_log = logging.getLogger("safepoint")
_LEAST_REPORT_S = 0.2
_MOST_REPORT_S = 5.0
"""The shortest and the longest time limit for the last write of the progress, in seconds."""


class Outcome:
    """The outcome of one rank.

    Args:
        settings: the options of the run.
        place: the position of this rank among the ranks.
        reporter: writes the events of the end.
        progress: publishes the progress and the end to `safepoint list` and other readers.
        record: reports the end to the launcher.
        termination: says how much time is left.
        uploads: the uploads of this rank. After an interruption, only the newest checkpoint is uploaded, and the
            process waits for this upload at most until the deadline.
    """

    def __init__(
        self,
        settings: RunSettings,
        place: Place,
        *,
        reporter: Reporter,
        progress: ProgressTracker,
        record: RankRecordWriter,
        termination: Termination,
        uploads: Uploads,
    ) -> None:
        self._settings = settings
        self._folder = None if settings.record_folder is None else Path(settings.record_folder)
        self._place = place
        self._reporter = reporter
        self._progress = progress
        self._record = record
        self._termination = termination
        self._uploads = uploads
        self._ending = threading.Lock()
        self.step = 0
        """Optimizer steps done."""
        self.saved_step: int | None = None
        """The newest committed step of this training: saved in this attempt, or the step that the attempt resumed
        from."""
        self.interrupted: Interrupted | None = None
        """The exception that ended the run early, or None. If the program catches the exception and continues to
        train, `check_not_interrupted` raises it again."""
        self.on_first_step: Callable[[], None] | None = None
        """Called once, when this process has done its first optimizer step."""
        self.resumed_from: Path | None = None
        """The checkpoint from which the training has resumed; None when a further step is done."""
        self.unsaved_end = ""
        """The error message for a training whose last step was not saved; empty when it was saved."""

    # ---- how far the training is -----------------------------------------------------------------------------------

    @property
    def is_saved(self) -> bool:
        """Whether the last step is committed."""
        return self.saved_step == self.step

    def check_not_interrupted(self) -> None:
        """Stop a program that caught the interruption and continued.

        Raises:
            Interrupted: the run has ended early.
        """
        if self.interrupted is not None:
            raise self.interrupted

    def training_begins(self, step: int, *, is_saved: bool) -> None:
        """Record that a training begins.

        Saves of an earlier training of this process do not count as saves of the new training.

        Args:
            step: optimizer steps done before the training begins.
            is_saved: whether a checkpoint of that step is committed.
        """
        self.step = step
        self.saved_step = step if is_saved else None

    def reached(self, step: int) -> None:
        """Record that `step` optimizer steps were done before the loop begins."""
        self.step = step

    def step_done(self, step: int) -> None:
        """Record that the training has done optimizer step `step`."""
        self.step = step
        self.resumed_from = None
        if self.on_first_step is not None:
            call, self.on_first_step = self.on_first_step, None
            call()
        self._record.stepped()

    def saved(self, step: int) -> None:
        """Record that a checkpoint of `step` is committed."""
        self.saved_step = step

    # ---- the end of a training -------------------------------------------------------------------------------------

    def interrupt(
        self, *, is_saved: bool, reason: str = "", uploads_failed: bool = False, limit_s: float | None = None
    ) -> Interrupted:
        """Record and report that the run ends early. The caller raises the returned exception, or ends the process.

        Args:
            is_saved: whether the state of the last step is committed.
            reason: why that state is not committed; ignored if it is committed.
            uploads_failed: whether the run ends because uploads fail.
            limit_s: the time limit of the last write of the progress. None: the limit follows from the deadline.
        """
        event = run_events.Interrupted(step=self.step, saved=is_saved, reason="" if is_saved else reason)
        code = ExitCode.INTERRUPTED_SAVED if is_saved else ExitCode.TERMINATED_UNSAVED
        if uploads_failed:
            code = ExitCode.STORAGE
        self._record.ended(code, event.line)
        self._reporter.report(event)
        self._end_progress(State.INTERRUPTED, event.line, limit_s=limit_s)
        if self._reporter.warns_for_node and not self._place.is_first:  # for readers of this node's log
            _log.info("%s", event.line)
        self.interrupted = Interrupted(code, event.line)
        return self.interrupted

    def training_ended(self, step: int) -> None:
        """Report the end of the training. If its last step is not saved, set `unsaved_end`, for exit code 13."""
        if 0 < step != self.saved_step:
            self.unsaved_end = (
                f"the training ended at step {step}, and this step could not be saved; fix the cause given in the "
                "warning above, and run the same command again"
            )
        self.resumed_from = None
        self._reporter.report(run_events.Finished(step=step))
        self._end_progress(State.FINISHED)

    def require_saved_end(self) -> None:
        """Wait for the uploads of this rank, and check that the last step is saved; used if there is no launcher.

        All ranks call this method when a training has ended. Only the first rank raises the error for an unsaved last
        step, after it has waited for its uploads. If another rank raised this error, torchrun would end the first
        rank, perhaps before the uploads of the first rank are complete.

        Raises:
            StorageError: on the first rank, if the last step could not be saved; on a rank with an uploader, if
                uploads have failed permanently.
        """
        unsaved_end = self.unsaved_end
        self.unsaved_end = ""  # if the program catches the error and trains again, the error is not raised again
        self._uploads.require_complete()
        if unsaved_end and self._place.is_first:
            raise StorageError(unsaved_end)

    def program_ended(self, code: int, reason: str = "") -> None:
        """Report how the program has ended, if no launcher reports it.

        If the program has failed in its first step after a resume, name the checkpoint: its states may be the cause.

        Args:
            code: the program's exit code.
            reason: one sentence, if the program failed.
        """
        if code == ExitCode.FAILED and self.resumed_from is not None:
            _log.warning(
                "the program has failed in its first step after it resumed from %s; if a state in this checkpoint is "
                "the cause, and someone else may have written the checkpoint, delete it to resume from an older one",
                self.resumed_from,
            )
            self.resumed_from = None
        state = state_after(code)
        if self._settings.record_folder is not None or self._progress.state is state:
            return
        if state is State.FAILED:
            self._reporter.report(run_events.Failed(rank=self._place.rank, exit_code=code, reason=reason))
        self._end_progress(state, reason)

    # ---- the end of the process ------------------------------------------------------------------------------------

    def end_now(self, code: int) -> None:
        """End the process without the interpreter's tear-down, which is slower than a save. Does not return."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)

    def wait_for_end(self) -> None:
        """If another thread is ending the process, block until the process has ended."""
        with self._ending:
            pass

    def end_with_snapshot(self, message: Leave) -> None:
        """End the process in the middle of a step. The keeper has committed the newest complete snapshot, if any."""
        with self._ending:
            if self.interrupted is not None:
                return  # the training loop finished and saved the step in time
            step, abandoned = message.step, message.abandoned_step
            self._reporter.report(run_events.StepAbandoned(step=abandoned, snapshot_step=step, reason=message.reason))
            if step is not None:
                self.step = self.saved_step = step
                self._progress.became_durable(step)
            interrupted = self.interrupt(
                is_saved=step is not None,
                reason="no snapshot was committed",
                uploads_failed=self._uploads.stop_reason is not None,
            )
            self._uploads.finish(newest_only=True)
            self.end_now(interrupted.exit_code)

    def end_outside_training(self) -> None:
        """Wait for the upload of the newest checkpoint, then end the process without a save.

        Called if SIGTERM arrives outside a training.

        The method does nothing if three conditions hold: the run has not ended yet, its last step is not saved, and a
        process image of the process will be made.
        """
        if not self.is_saved and self.interrupted is None and reserved_s(self._folder) > 0:
            return
        with self._ending:
            if self.interrupted is not None:  # another thread has ended the run already
                self.end_now(self.interrupted.exit_code)
            reason = (
                "no training that Safepoint can save had begun"
                if self.step == 0
                else "the last step was not committed"
            )
            interrupted = self.interrupt(is_saved=self.is_saved, reason=reason)
            self._uploads.finish(newest_only=True)
            self.end_now(interrupted.exit_code)

    def end_at_deadline(self) -> None:
        """End the process at once: the deadline has passed in a training. Nothing more is saved."""
        with self._ending:
            last = (
                f"the newest checkpoint is of step {self.saved_step}"
                if self.saved_step is not None
                else "no checkpoint exists"
            )
            interrupted = self.interrupted or self.interrupt(
                is_saved=self.step > 0 and self.is_saved,
                reason=f"the grace period of {self._settings.grace_s:g} s was too short to finish and save; {last}",
                limit_s=min(_MOST_REPORT_S, self._settings.margin_s / 4),
            )
            self.end_now(interrupted.exit_code)

    def _end_progress(self, state: State, message: str = "", *, limit_s: float | None = None) -> None:
        # The file system may hang. So the time limit of the write is half of the time that is left, but at least
        # 0.2 s and at most 5 s.
        if limit_s is None:
            limit_s = min(_MOST_REPORT_S, max(_LEAST_REPORT_S, self._termination.available_s / 2))
        self._progress.end(state, message, limit_s=limit_s)
