"""What the keeper tells people and programs: its console, and the streams of events."""

import logging
from pathlib import Path

from safepoint.foundation import clock
from safepoint.foundation.events import console
from safepoint.foundation.events.stream import Event, EventLog

_TELL_EVERY_S = 60.0


class Reporting:
    """The keeper's voice.

    Args:
        verbosity: of the console.
        job_events: a stream of the job's, besides the one of the folder.
    """

    def __init__(self, verbosity: int, job_events: str | None) -> None:
        self.log: logging.Logger = console.set_up(verbosity)
        self._job_events = Path(job_events) if job_events else None
        self._told_superseded_s = float("-inf")
        self.write_to(None)

    def write_to(self, stream: Path | None) -> None:
        """From now on events go into this file too; None: into the job's stream only."""
        self._events = EventLog(stream, self._job_events, actor="keeper")

    def report(self, event: Event) -> None:
        """Into the streams and onto the console."""
        self._events.write(event)
        (self.log.warning if event.is_warning else self.log.info)("%s", event.line)

    def report_superseded(self, event: Event) -> None:
        """Into the streams each time; on the console at most once a minute."""
        self._events.write(event)
        now_s = clock.monotonic_s()
        is_due = now_s - self._told_superseded_s > _TELL_EVERY_S
        self.log.log(logging.WARNING if is_due else logging.DEBUG, "%s", event.line)
        if is_due:
            self._told_superseded_s = now_s
