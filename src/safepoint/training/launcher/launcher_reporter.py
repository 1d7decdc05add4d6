"""Writes the launcher's events: who started the run, signals, failed and restarted ranks, how the run has ended.

On the first node, the reporter also passes on the progress that the first rank writes. It serves the progress over
HTTP (`--metrics-port`), and posts the progress to the controller of Kubeflow Trainer. If the first rank was killed,
the reporter writes into the progress how the run has ended. Writes to folders have a time limit, because a folder
that hangs must not block the launcher.
"""

import contextlib
import dataclasses
import getpass
import logging
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from safepoint.checkpoint.format.verify import read_manifest_of_any
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import ExitCode, SafepointError
from safepoint.foundation import clock
from safepoint.foundation.bounded import do_within
from safepoint.foundation.environment import host_name
from safepoint.foundation.events.run_events import Failed, Interrupted, Restarted, SignalReceived, Started
from safepoint.foundation.events.stream import Event, EventLog
from safepoint.foundation.files import write_atomic
from safepoint.progress.record import PROGRESS_NAME, Progress, State, read_progress, state_after
from safepoint.progress.trainer_status import TERMINATION_LOG, TrainerStatus
from safepoint.settings.run_settings import STATUS_URL, RunSettings
from safepoint.training.outcome.launcher_folder import deliver_pending_events, pending_events, shared_event_stream

if TYPE_CHECKING:
    from safepoint.checkpoint.tools.receipt import CheckpointReceipt
    from safepoint.progress.metrics_server import MetricsServer
    from safepoint.training.launcher.status_post import StatusPost

_log = logging.getLogger("safepoint")
_EVENT_LIMIT_S = 0.2
"""How long an event may block the launcher."""
_LEAST_END_S = 0.5
"""The last writes may take this many seconds, even if less time is left, because nothing else records the end."""


class LauncherReporter:
    """Writes the events of the launcher of one node.

    Args:
        settings: the options of the run.
        folder: the launcher's folder, where the first rank writes its progress.
        node: this node's number, from 0.
        num_nodes: how many nodes there are.
    """

    def __init__(self, settings: RunSettings, folder: Path, *, node: int, num_nodes: int) -> None:
        self._settings = settings
        self._folder = folder
        self._node = node
        self._num_nodes = num_nodes
        self._actor = "launcher" if node == 0 else f"launcher of node {node}"
        self._ending = threading.Lock()
        self._final: Progress | None = None
        self._has_ended = False
        self._server: MetricsServer | None = None
        self._post: StatusPost | None = None

    # ---- while the ranks run --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Report who has started the run; on the first node, begin to serve and to post its progress."""
        settings = self._settings
        self.report(
            Started(
                user=_user_name(),
                host=host_name(),
                pid=os.getpid(),
                node=self._node,
                num_nodes=self._num_nodes,
                grace_s=settings.grace_s,
            )
        )
        if self._node != 0:
            return
        if settings.metrics_port:
            self._serve(settings.metrics_port, settings.metrics_host)
        if os.environ.get(STATUS_URL):
            self._start_posts()

    def _start_posts(self) -> None:
        # Imported here, and in `_serve`, because modules for HTTP take a while to import, and most jobs need none.
        from safepoint.training.launcher.status_post import StatusPost, StatusTarget

        target = StatusTarget.from_environment()
        if target is not None:
            self._post = StatusPost(self.progress, target)

    def _serve(self, port: int, host: str | None) -> None:
        from safepoint.progress.metrics_server import MetricsServer, default_host

        try:
            self._server = MetricsServer(self.progress, host=default_host() if host is None else host, port=port)
        except OSError as error:
            _log.warning(
                "port %s cannot be used: %s; the progress is not served, and training continues; "
                "name another port with --metrics-port",
                port,
                error.strerror or error,
            )

    def progress(self) -> tuple[Progress, bool] | None:
        """The last progress that the first rank wrote, and whether the run has ended; None without any progress."""
        progress = self._final or read_progress(self._folder / PROGRESS_NAME)
        return None if progress is None else (progress, self._has_ended)

    def signal_received(self, number: int) -> None:
        """Report that the launcher has received a signal."""
        self.report(SignalReceived(signal=signal.Signals(number).name, rank=None))

    def restarting(self, event: Restarted) -> None:
        """Report that the ranks restart; called when the ranks of the last start have ended."""
        self.report(event)
        progress = read_progress(self._folder / PROGRESS_NAME)
        if progress is not None:
            restarting = dataclasses.replace(
                progress, state=State.STARTING, restart=event.restart, message=event.reason, time=clock.utc_now()
            )
            self._write(restarting)

    # ---- the end ------------------------------------------------------------------------------------------------

    def end(
        self,
        exit_code: int,
        reason: str,
        *,
        limit_s: float,
        rank: int | None = None,
        error: str = "",
        is_reported: bool = False,
    ) -> None:
        """Report how the run has ended on this node. Calls after the first do nothing.

        Args:
            exit_code: the launcher's exit code.
            reason: one sentence, for a job that has not succeeded.
            limit_s: seconds for the last writes to folders; the last post to the controller also gets this time.
            rank: the rank that failed, or None.
            error: the error that the user's program raised on this rank; empty if the error is not known.
            is_reported: whether a rank has already reported how it ended.
        """
        with self._ending:
            if self._has_ended:
                return
            failure = Failed(rank=rank, exit_code=exit_code, reason=reason, error=error)
            do_within(lambda: self._write_end(failure, is_reported=is_reported), max(limit_s, _LEAST_END_S))
            self._has_ended = True
        known = self.progress() if self._node == 0 else None
        if known is not None:
            path = Path(self._settings.termination_log) if self._settings.termination_log else TERMINATION_LOG
            status = TrainerStatus.of(known[0], has_ended=True)
            # The end is written first without the check of the newest checkpoint, because the check may take longer
            # than the time that is left. Then the end is written again with the result of the check.
            do_within(lambda: status.write_termination_message(path), _LEAST_END_S)
            if exit_code == ExitCode.INTERRUPTED_SAVED and path.is_file():
                do_within(lambda: status.write_termination_message(path, _check_newest(known[0])), limit_s)
            if self._post is not None:
                self._post.finish(limit_s)
        if self._server is not None:
            self._server.close()

    def _write_end(self, end: Failed, *, is_reported: bool) -> None:
        state, progress = state_after(end.exit_code), read_progress(self._folder / PROGRESS_NAME)
        if self._node == 0 and progress is not None:
            if progress.state is not state:
                progress = dataclasses.replace(
                    _with_newest(progress), state=state, message=end.error or end.reason, time=clock.utc_now()
                )
            self._final = progress
        if state is State.FAILED:
            self._write_event(end)
        elif state is State.INTERRUPTED and not is_reported:
            step = 0 if progress is None else progress.step
            reason = end.reason or "it was stopped before it could save"
            self._write_event(Interrupted(step=step, saved=False, reason=reason))
        stream = shared_event_stream(self._folder)
        if stream is not None:
            deliver_pending_events(self._folder, stream)
        if self._final is not None:
            self._write(self._final)

    # ---- writes --------------------------------------------------------------------------------------------------

    def report(self, event: Event) -> None:
        """Write an event. If a folder hangs, continue after a time limit."""
        do_within(lambda: self._write_event(event), _EVENT_LIMIT_S)

    def _write_event(self, event: Event) -> None:
        stream = shared_event_stream(self._folder) or pending_events(self._folder)
        EventLog(stream, self._settings.job_events, actor=self._actor).write(event)

    def _write(self, progress: Progress) -> None:
        """Write the progress to all files that the first rank writes."""
        paths = [self._folder / PROGRESS_NAME, *self._settings.progress_places]
        if progress.output_dir:
            paths.append(OutputFolder(Path(progress.output_dir)).progress)
        for path in paths:
            with contextlib.suppress(OSError):
                write_atomic(path, progress.to_bytes(), durable=False)


def _with_newest(progress: Progress) -> Progress:
    """Return the progress with the step of the newest checkpoint.

    The keeper (the process that writes snapshots to disk) may have committed a checkpoint after the ranks had ended.
    """
    with contextlib.suppress(OSError, SafepointError, ValueError):
        for path in OutputFolder(Path(progress.output_dir)).checkpoints()[:1] if progress.output_dir else []:
            manifest = read_manifest_of_any(path)
            if manifest.run_id == progress.run_id and manifest.step > (progress.safe_step or -1):
                return dataclasses.replace(progress, safe_step=manifest.step, safe_time=manifest.created)
    return progress


def _check_newest(progress: Progress) -> "CheckpointReceipt | None":
    """Check the newest checkpoint. Return None if there is no checkpoint, or if it cannot be checked.

    If there is an object store, the checkpoint is checked there, and not in the output folder.
    """
    from safepoint.checkpoint.tools.receipt import check_checkpoint  # imports the object stores

    if progress.safe_step is None:
        return None
    try:
        return check_checkpoint(progress.location or progress.output_dir, progress.safe_step, deep=False)
    except (SafepointError, OSError, ValueError) as error:
        _log.warning("the checkpoint of step %d was not checked: %s", progress.safe_step, error)
        return None


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())  # the user has no name, as in many pods
