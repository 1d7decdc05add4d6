"""Writes this rank's events: to the log, to the job's stream and to the stream of the output folder.

A stream is a file with one event per line.
"""

import logging
import signal
from pathlib import Path

from safepoint.foundation.bounded import do_within
from safepoint.foundation.environment import Place
from safepoint.foundation.events import run_events
from safepoint.foundation.events.stream import Event, EventLog
from safepoint.settings.run_settings import RunSettings
from safepoint.training.outcome.launcher_folder import deliver_pending_events, forwarded_mark, share_event_stream

_log = logging.getLogger("safepoint")
_LIMIT_S = 0.2
"""How long an event may block the thread that watches the deadline."""


class Reporter:
    """Writes the events of one rank. The first rank reports for the whole job.

    Args:
        settings: has the paths of the job's stream and of the launcher's folder.
        place: the position of this rank among the ranks.
    """

    def __init__(self, settings: RunSettings, place: Place) -> None:
        self._settings = settings
        self._place = place
        self._folder = None if settings.record_folder is None else Path(settings.record_folder)
        self._shared_stream: Path | None = None
        self._events = self._log_to(None)
        self.warns_for_node = False
        """Whether to report this rank's warnings even if the rank is not the first.

        If there are several output folders, this is True on the owner of each folder: the rank that manages the
        folder (see `safepoint.training.start.folders`).
        """

    def write_to(self, stream: Path) -> None:
        """From now on, also write events to `stream`, the stream of the output folder."""
        self._events = self._log_to(stream)
        if self._place.is_first and self._folder is not None:
            deliver_pending_events(self._folder, stream)  # the launcher has already written these events to the log

    def share_stream(self, stream: Path) -> None:
        """From now on, also write the launcher's events, and the signals that this rank receives, to `stream`.

        Every rank calls this method when the start has succeeded.
        """
        self._shared_stream = stream
        if self._place.local_rank == 0:
            share_event_stream(self._settings.record_folder, stream)

    def report(self, event: Event) -> None:
        """Write and log an event. Ranks other than the first write only warnings, and only if `warns_for_node`."""
        if self._place.is_first or (self.warns_for_node and event.is_warning):
            self._events.write(event)
            level = logging.WARNING if event.is_warning else logging.DEBUG if event.is_quiet else logging.INFO
            _log.log(level, "%s", event.line)

    def report_in_time(self, event: Event) -> None:
        """Like `report`, but wait 0.2 s at most: a folder that hangs must not delay the check of the deadline."""
        do_within(lambda: self.report(event), _LIMIT_S)

    def report_signal(self, number: int) -> None:
        """Write which signal this process received, unless the launcher has sent that signal and reports it.

        Without a launcher, only the first rank writes the signal.
        """
        name = signal.Signals(number).name
        is_ours = self._place.is_first if self._folder is None else not (self._folder / forwarded_mark(name)).exists()
        if is_ours:
            log = self._log_to(self._shared_stream)
            do_within(lambda: log.write(run_events.SignalReceived(signal=name, rank=self._place.rank)), _LIMIT_S)

    def _log_to(self, stream: Path | None) -> EventLog:
        return EventLog(stream, self._settings.job_events, actor=f"rank {self._place.rank}")
