"""What a node's launcher tells: who started the job, its signals, what became of its ranks, how the job has ended.

On the first node it also serves and posts the first rank's record, and writes the end where that rank has
none. Nothing here may keep the launcher from its work: what writes to folders is given a short time only.
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

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.node_part import read_manifest_of_any
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import SafepointError
from safepoint.foundation import clock
from safepoint.foundation.bounded import do_within
from safepoint.foundation.environment import host_name
from safepoint.foundation.events.run_events import Failed, Interrupted, Restarted, SignalReceived, Started
from safepoint.foundation.events.stream import Event, EventLog
from safepoint.foundation.files import write_atomic
from safepoint.progress.record import PROGRESS_NAME, Progress, State, read_progress, state_after
from safepoint.progress.termination_message import DEFAULT_PATH, write_termination_message
from safepoint.progress.trainer_status import TrainerStatus
from safepoint.settings.run_settings import STATUS_URL, RunSettings
from safepoint.training.outcome.rank_record import deliver_events, find_stream, waiting_events

if TYPE_CHECKING:
    from safepoint.progress.metrics_server import MetricsServer
    from safepoint.training.launcher.status_post import StatusPost

_log = logging.getLogger("safepoint")
_WORD_S = 0.2
"""How long a word to the stream may hold up the launcher."""
_LEAST_S = 0.5
"""How long the last words to folders may take at least; they are the only trace of what has happened."""


class Announcer:
    """Speaks for the launcher of one node.

    Args:
        settings: the run's.
        records: the launcher's folder, in which the ranks tell.
        node: this node's number, from 0.
        num_nodes: how many there are.
    """

    def __init__(self, settings: RunSettings, records: Path, *, node: int, num_nodes: int) -> None:
        self._settings = settings
        self._records = records
        self._node = node
        self._num_nodes = num_nodes
        self._actor = "launcher" if node == 0 else f"launcher of node {node}"
        self._ending = threading.Lock()
        self._final: Progress | None = None
        self._has_ended = False
        self._server: MetricsServer | None = None
        self._post: StatusPost | None = None

    # ---- while the ranks run --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Say who has started the job; on the first node, begin to serve and to post."""
        settings = self._settings
        self._tell(
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
            self._begin_posts()

    def _begin_posts(self) -> None:
        # Here and below: what speaks HTTP takes a while to import, and most jobs need none of it.
        from safepoint.training.launcher.status_post import StatusPost, StatusTarget

        target = StatusTarget.from_environment()
        if target is not None:
            self._post = StatusPost(self.look, target)

    def _serve(self, port: int, host: str | None) -> None:
        from safepoint.progress.metrics_server import MetricsServer, default_host

        try:
            self._server = MetricsServer(self.look, host=default_host() if host is None else host, port=port)
        except OSError as error:
            _log.warning(
                "port %s cannot be used: %s; how far the training is, is not served, and training goes on; "
                "name another one with --metrics-port",
                port,
                error.strerror or error,
            )

    def look(self) -> tuple[Progress, bool] | None:
        """The first rank's last record, and whether the job has ended; None before the first record."""
        progress = self._final or read_progress(self._records / PROGRESS_NAME)
        return None if progress is None else (progress, self._has_ended)

    def signalled(self, number: int) -> None:
        """The launcher got a signal."""
        self._tell(SignalReceived(signal=signal.Signals(number).name, rank=None))

    def failed(self, event: Failed) -> None:
        """A rank has failed, and the ranks are restarted."""
        self._tell(event)

    def restarting(self, event: Restarted) -> None:
        """The ranks are restarting; call it when the previous ones have ended."""
        self._tell(event)
        progress = read_progress(self._records / PROGRESS_NAME)
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
        """Say how the job has ended on this node; the first call counts.

        Args:
            exit_code: the launcher's.
            reason: one sentence, for one that has not ended well.
            limit_s: how long the last words may take, to folders and to the controller each.
            rank: which has failed, or None.
            error: what its program raised.
            is_reported: whether a rank has said itself that the run was interrupted.
        """
        with self._ending:
            if self._has_ended:
                return
            failure = Failed(rank=rank, exit_code=exit_code, reason=reason, error=error)
            do_within(lambda: self._close_story(failure, is_reported=is_reported), max(limit_s, _LEAST_S))
            self._has_ended = True
        known = self.look() if self._node == 0 else None
        if known is not None:
            path = Path(self._settings.termination_log) if self._settings.termination_log else DEFAULT_PATH
            status = TrainerStatus.of(known[0], has_ended=True)
            do_within(lambda: write_termination_message(path, status), _LEAST_S)
            if self._post is not None:
                self._post.finish(limit_s)
        if self._server is not None:
            self._server.close()

    def _close_story(self, end: Failed, *, is_reported: bool) -> None:
        state, progress = state_after(end.exit_code), read_progress(self._records / PROGRESS_NAME)
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
        stream = find_stream(self._records)
        if stream is not None:
            deliver_events(self._records, stream)
        if self._final is not None:
            self._write(self._final)

    # ---- words --------------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        do_within(lambda: self._write_event(event), _WORD_S)

    def _write_event(self, event: Event) -> None:
        stream = find_stream(self._records) or waiting_events(self._records)
        EventLog(stream, self._settings.job_events, actor=self._actor).write(event)

    def _write(self, progress: Progress) -> None:
        """To everywhere where the first rank writes it."""
        settings = self._settings
        folders = [self._records, *([Path(settings.job_dir)] if settings.job_dir else [])]
        paths = [folder / PROGRESS_NAME for folder in folders]
        if progress.output_dir:
            paths.append(OutputFolder(Path(progress.output_dir)).progress)
        for path in paths:
            with contextlib.suppress(OSError):
                write_atomic(path, progress.to_bytes(), durable=False)


def _with_newest(progress: Progress) -> Progress:
    """The keeper may have committed a checkpoint after the ranks had gone."""
    with contextlib.suppress(OSError, SafepointError, ValueError):
        for path in list_checkpoints(Path(progress.output_dir))[:1] if progress.output_dir else []:
            manifest = read_manifest_of_any(path)
            if manifest.run_id == progress.run_id and manifest.step > (progress.safe_step or -1):
                return dataclasses.replace(progress, safe_step=manifest.step, safe_time=manifest.created)
    return progress


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())  # as in a pod, where users have no names
