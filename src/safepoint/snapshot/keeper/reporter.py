"""The keeper's events and log lines."""

import logging
from pathlib import Path

from safepoint.foundation import clock
from safepoint.foundation.events import console
from safepoint.foundation.events.stream import Event, EventLog

_WARN_EVERY_S = 60.0


class Reporter:
    """Writes events into the folder's file and the job's, and onto the console.

    Args:
        verbosity: of the console.
        job_events: the file of the job's events; None for none.
    """

    def __init__(self, verbosity: int, job_events: str | None) -> None:
        self.log: logging.Logger = console.set_up(verbosity)
        self._job_events = Path(job_events) if job_events else None
        self._warned_s = float("-inf")
        self.write_to(None)

    def write_to(self, path: Path | None) -> None:
        """From now on write events into this file too; None for the job's file only."""
        self._events = EventLog(path, self._job_events, actor="keeper")

    def report(self, event: Event) -> None:
        """Write an event, and its line on the console."""
        self._events.write(event)
        (self.log.warning if event.is_warning else self.log.info)("%s", event.line)

    def report_superseded(self, event: Event) -> None:
        """Write an event each time, and its line once a minute: there may be one at every step."""
        self._events.write(event)
        is_due = clock.monotonic_s() - self._warned_s > _WARN_EVERY_S
        self.log.log(logging.WARNING if is_due else logging.DEBUG, "%s", event.line)
        if is_due:
            self._warned_s = clock.monotonic_s()
