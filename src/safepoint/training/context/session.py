"""One rank's life under Safepoint: its settings, its place, its signals, and the way it ends.

There is one session per process. Integrations find it with `current_session` and tell it where the run is;
it knows what a signal means there and which exit code is true.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safepoint.checkpoint.local.final_record import TrainingEnd
from safepoint.errors import ExitCode, Interrupted, StorageError
from safepoint.foundation import clock
from safepoint.foundation.bounded import do_within
from safepoint.foundation.environment import Place
from safepoint.foundation.events import console, run_events
from safepoint.foundation.events.store_events import UploadUnfinished
from safepoint.foundation.events.stream import Event, EventLog
from safepoint.foundation.service_links import forget_service_links
from safepoint.progress.record import State, state_after
from safepoint.progress.tracker import ProgressTracker
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.location import Location
from safepoint.training.context.keeper_connection import KeeperConnection
from safepoint.training.context.termination import Termination
from safepoint.training.outcome.rank_record import RecordFile, deliver_events, name_stream, passed_on

if TYPE_CHECKING:
    from safepoint.training.collective.peers import Peers
    from safepoint.training.context.uploads import Uploads

_LEAVING_S = 0.5
"""What a process needs to leave after the last upload."""
_WORD_S = 0.2
"""How long a word to the stream may hold up whoever watches the time."""
_LAST_WORD_S = 5.0
_current: "Session | None" = None


class Session:
    """One rank under Safepoint.

    Args:
        settings: what the run was asked to do.
        place: this rank among its peers.
    """

    def __init__(self, settings: RunSettings, place: Place) -> None:
        self.log = console.set_up(settings.verbosity)
        self.settings = settings
        self.place = place
        self.record = RecordFile(settings.record_folder, place.rank, place.restart)
        self.termination = Termination(
            within_s=settings.grace_s - settings.margin_s,
            on_outside=self._end_outside,
            on_deadline=self._end_at_deadline,
            look=lambda: self.look_at_time() if self.look_at_time is not None else None,
            on_signal=self._note_signal,
        )
        self.figures = ProgressTracker(
            places=settings.progress_places,
            is_first=place.is_first,
            restart=place.restart,
            world_size=place.world_size,
            grace_s=settings.grace_s,
        )
        """How far the training is, for whoever asks."""
        self.look_at_time: Callable[[], float | None] | None = None
        """Asked after a stop request whether the running step can still be ended in time; see `Termination`."""
        self.step = 0
        """Optimizer steps done, for messages."""
        self.saved_step: int | None = None
        """The newest step that is committed, in this attempt or before it."""
        self.interrupted: Interrupted | None = None
        """Set once the run has been told to leave; whoever continues anyway is stopped again."""
        self.peers: Peers | None = None
        """The ranks' process group, made by the first integration that needs it."""
        self.keeping = KeeperConnection(settings, place, self._end_with_snapshot)
        """The way to the node's keeper."""
        self.uploads: Uploads | None = None
        """The mover of the newest training with an object store; on the first rank only."""
        self.speaks_for_node = False
        """Whether this rank owns a folder of its node's own: then its warnings are heard too."""
        self.upload_failure: str | None = None
        """Why this run stops, when uploads fail and the user wants it to stop."""
        self.training_end: TrainingEnd | None = None
        """How the newest training with an object store has ended, when it has; on the first rank only."""
        self.final_missing: str | None = None
        """Why the finished model is not in the object store, and what to do; on the first rank only."""
        self.missing_before: str | None = None
        """What of an earlier training of this script is not in the object store; on the first rank only."""
        self.locations: dict[str, Location] = {}
        """The object store that a folder stands in front of, by the folder's path as the script sees it."""
        self.output_folders: set[Path] = set()
        """Where this process has trained into; a second training there would take the first one's checkpoints."""
        self._unsaved_end: int | None = None
        self._stream: Path | None = None
        self._events = self._log_to(None)
        self._ending = threading.Lock()

    def _log_to(self, stream: Path | None) -> EventLog:
        return EventLog(stream, self.settings.job_events, actor=f"rank {self.place.rank}")

    def write_events_to(self, path: Path) -> None:
        """From now on this rank's events go to the stream at `path` too."""
        self._events = self._log_to(path)
        if self.place.is_first and self.settings.record_folder is not None:
            deliver_events(Path(self.settings.record_folder), path)  # the launcher has said it on the console

    def share_stream(self, path: Path) -> None:
        """The start has succeeded, and this is where its events go: also those of other ranks and of the launcher."""
        self._stream = path
        if self.place.local_rank == 0:
            name_stream(self.settings.record_folder, path)

    def report(self, event: Event) -> None:
        """Tell people and programs; the first rank speaks for the job, others warn of what is their node's own."""
        if self.place.is_first or (self.speaks_for_node and event.is_warning):
            self._events.write(event)
            level = logging.WARNING if event.is_warning else logging.DEBUG if event.is_quiet else logging.INFO
            self.log.log(level, "%s", event.line)

    def report_in_time(self, event: Event) -> None:
        """Likewise, where a folder that hangs must not hold up whoever watches the time."""
        do_within(lambda: self.report(event), _WORD_S)

    def _note_signal(self, number: int) -> None:
        """On the watch thread. What a launcher passes on it has said itself; without one the first rank speaks."""
        name, folder = signal.Signals(number).name, self.settings.record_folder
        if self.place.is_first if folder is None else not (Path(folder) / passed_on(name)).exists():
            log = self._log_to(self._stream)
            do_within(lambda: log.write(run_events.SignalReceived(signal=name, rank=self.place.rank)), _WORD_S)

    def interrupt(self, *, saved: bool, reason: str = "") -> Interrupted:
        """Note that the run leaves here; the caller raises what is returned.

        Args:
            saved: whether the state of the last step is committed.
            reason: why not, otherwise.
        """
        event = run_events.Interrupted(step=self.step, saved=saved, reason=reason)
        code = ExitCode.INTERRUPTED_SAVED if saved else ExitCode.TERMINATED_UNSAVED
        if self.upload_failure is not None:
            code = ExitCode.STORAGE
        self.record.ended(code, event.line)
        self.report(event)
        self._tell_end(State.INTERRUPTED, event.line)
        if self.speaks_for_node and not self.place.is_first:  # whoever reads this node's log wants to know, too
            self.log.info("%s", event.line)
        self.interrupted = Interrupted(code, event.line)
        return self.interrupted

    def finish_uploads(self, *, newest_only: bool) -> bool:
        """Wait for the mover; when somebody asked to stop, until the deadline at most, and say so.

        Returns:
            Whether everything that was to arrive has arrived.
        """
        uploads = self.uploads
        if uploads is None:
            return True
        available_s = self.termination.available_s
        limit_s = self.settings.grace_s - self.settings.margin_s if newest_only else float("inf")
        wait_s = min(available_s, limit_s)
        deadline_s = None if wait_s == float("inf") else clock.monotonic_s() + max(0.0, wait_s - _LEAVING_S)
        has_arrived = uploads.finish(newest_only=newest_only, deadline_s=deadline_s)
        if not has_arrived:
            self.report(UploadUnfinished(location=uploads.location, folder=uploads.folder))
        return has_arrived

    def close_uploads(self) -> None:
        """Another training begins: wait for the mover of the one before, and keep in mind what is missing of it."""
        if self.uploads is not None and not self.finish_uploads(newest_only=False):
            self.missing_before = self.missing_before or f"uploads to {self.uploads.location} did not finish"
        self.missing_before = self.missing_before or self.final_missing
        self.training_end = self.final_missing = None

    def wait_for_ending(self) -> None:
        """When a signal is being answered on another thread, leave the end of the process to it."""
        with self._ending:
            pass

    def unsaved_end(self) -> str:
        """What to say of a training that has ended without a checkpoint of its end; empty when there is one."""
        if self._unsaved_end is None:
            return ""
        return (
            f"the training ended at step {self._unsaved_end}, which could not be saved; mend what the warning above "
            "says, and run it again"
        )

    def check_end(self) -> None:
        """Where no launcher waits for the end of the program: wait until everything is where it was to be.

        All ranks call it when a training has ended; the first one speaks for them, so that none is ended while
        another waits.

        Raises:
            StorageError: on the first rank: something is not there, and will not be.
        """
        unsaved_end = self.unsaved_end()
        self._unsaved_end = None  # whoever catches an error and trains again is not told once more
        if not self.finish_uploads(newest_only=False):
            raise StorageError(
                "not everything that was saved has arrived in the object store; the folder in front of it has it",
                hint="run the script again when the store can be used: it sends what is missing",
            )
        if self.final_missing is not None:
            raise StorageError(self.final_missing)
        self.uploads = None
        if unsaved_end and self.place.is_first:
            raise StorageError(unsaved_end)

    def watch_uploads(self) -> None:
        """At a step's end: see that the mover lives, and stop the run when uploads fail and the user wants that."""
        failure = self.uploads.failure() if self.uploads is not None else None
        if failure is None or self.settings.on_upload_failure != "stop" or self.upload_failure is not None:
            return
        self.upload_failure = failure
        self.log.error("stopping, because uploads fail: %s", failure)
        self.termination.stop_signal = signal.SIGTERM

    def end_now(self, code: int) -> None:
        """Leave without the interpreter's tear-down, which takes longer than a save; does not return."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
        os._exit(code)

    def _end_with_snapshot(self, message: dict[str, Any]) -> None:
        """The keeper has made the newest snapshot durable, because the running step would miss the deadline."""
        with self._ending:
            if self.interrupted is not None:
                return  # it got there in time
            step: int | None = message["step"]
            self.report(run_events.StepAbandoned(step=message["given_up"], snapshot_step=step, reason=message["why"]))
            if step is not None:
                self.step = self.saved_step = step
                self.figures.became_durable(step)
            interrupted = self.interrupt(saved=step is not None, reason="no snapshot was complete")
            self.finish_uploads(newest_only=True)
            self.end_now(interrupted.exit_code)

    def training_begins(self, step: int, *, is_saved: bool) -> None:
        """What an earlier training of this process has saved is not this one's.

        Args:
            step: where it begins.
            is_saved: whether that step is on a disk, or in the store.
        """
        self.step = step
        self.saved_step = step if is_saved else None

    def training_ended(self, step: int) -> None:
        """Say so; whether the end is saved decides the exit code, when the program has ended."""
        if 0 < step != self.saved_step:
            self._unsaved_end = step
        self.report(run_events.Finished(step=step))
        self._tell_end(State.FINISHED)

    def _tell_end(self, state: State, message: str = "") -> None:
        """A folder that hangs takes no more than half of the time that is left."""
        limit_s = max(_WORD_S, self.termination.available_s / 2)
        self.figures.end(state, message, limit_s=min(_LAST_WORD_S, limit_s))

    def program_ended(self, code: int, reason: str = "") -> None:
        """Say how the program has ended, where there is no launcher that does.

        Args:
            code: its exit code.
            reason: one sentence, for one that failed.
        """
        state = state_after(code)
        if self.settings.record_folder is not None or self.figures.state is state:
            return
        if state is State.FAILED:
            self.report(run_events.Failed(rank=self.place.rank, exit_code=code, reason=reason))
        self._tell_end(state, reason)

    def _end_outside(self, number: int) -> None:
        # Nothing of the training is in danger here: it has not begun, or its last step is committed.
        with self._ending:
            if self.interrupted is not None:  # it is leaving already; only faster now
                self.end_now(self.interrupted.exit_code)
            saved = self.saved_step is not None and self.saved_step == self.step
            reason = (
                "no training that can be saved has begun" if self.step == 0 else "the last step was not committed"
            )
            event = run_events.Interrupted(step=self.step, saved=saved, reason=reason)
            code = ExitCode.INTERRUPTED_SAVED if saved else ExitCode.TERMINATED_UNSAVED
            self.record.ended(code, event.line)
            self.report(event)
            self._tell_end(State.INTERRUPTED, event.line)
            self.finish_uploads(newest_only=True)
            self.end_now(code)

    def _end_at_deadline(self) -> None:
        with self._ending:
            if self.interrupted is not None:
                self.end_now(self.interrupted.exit_code)
            if 0 < self.step == self.saved_step:
                event = run_events.Interrupted(step=self.step, saved=True, reason="")
                self._leave_at_deadline(ExitCode.INTERRUPTED_SAVED, event)
            stands = f"step {self.saved_step} stands" if self.saved_step is not None else "no checkpoint exists"
            event = run_events.Interrupted(
                step=self.step,
                saved=False,
                reason=f"the {self.settings.grace_s:g} s of grace were not enough to finish and save; {stands}",
            )
            self._leave_at_deadline(ExitCode.TERMINATED_UNSAVED, event)

    def _leave_at_deadline(self, code: ExitCode, event: Event) -> None:
        self.record.ended(code, event.line)
        self.report(event)
        self.figures.end(State.INTERRUPTED, event.line, limit_s=min(_LAST_WORD_S, self.settings.margin_s / 4))
        self.end_now(code)


def start_session() -> Session:
    """Begin this process's session: signals first, because importing torch takes seconds.

    Raises:
        UsageError: a SAFEPOINT_* variable cannot be meant.
        ValueError: RANK or WORLD_SIZE cannot be meant.
    """
    global _current  # noqa: PLW0603  signals and exit codes are the process's, and so is the session
    forget_service_links()
    session = Session(RunSettings.from_environment(), Place.from_environment())
    session.termination.install()
    _current = session
    return session


def current_session() -> Session | None:
    """The session of this process, or None when it does not run under Safepoint."""
    return _current
