"""The output folder that a keeper writes into, and the keeper's events and log lines.

A keeper is the process of a node that writes snapshots to disk.
"""

import contextlib
import logging
import os
import uuid
from pathlib import Path

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.foundation import clock, files
from safepoint.foundation.environment import host_name
from safepoint.foundation.events import console
from safepoint.foundation.events.stream import Event, EventLog
from safepoint.foundation.files import FolderLock

_WARN_EVERY_S = 60.0


class Reporter:
    """Writes events to the output folder's event file, to the job's event file, and to the console.

    Args:
        verbosity: the verbosity of the console.
        job_events: the file of the job's events; None if there is no such file.
    """

    def __init__(self, verbosity: int, job_events: str | None) -> None:
        self.log: logging.Logger = console.set_up(verbosity)
        self._job_events = Path(job_events) if job_events else None
        self._warned_s = float("-inf")
        self.write_to(None)

    def write_to(self, path: Path | None) -> None:
        """From now on write events to the file `path` and to the job's file; None for the job's file only."""
        self._events = EventLog(path, self._job_events, actor="keeper")

    def report(self, event: Event) -> None:
        """Write an event, and its line on the console."""
        self._events.write(event)
        (self.log.warning if event.is_warning else self.log.info)("%s", event.line)

    def report_superseded(self, event: Event) -> None:
        """Report that a newer snapshot has replaced a snapshot that waited to be written.

        This may happen at every step. So the console shows the event as a warning at most once a minute.
        """
        self._events.write(event)
        is_due = clock.monotonic_s() - self._warned_s > _WARN_EVERY_S
        self.log.log(logging.WARNING if is_due else logging.DEBUG, "%s", event.line)
        if is_due:
            self._warned_s = clock.monotonic_s()


class HeldFolder:
    """The output folder of a keeper.

    If the file system supports locks, only one keeper at a time commits into the folder.

    Args:
        reporter: writes the keeper's events into the folder while the folder is open.
    """

    def __init__(self, reporter: Reporter) -> None:
        self.path: Path | None = None
        self.identity = uuid.uuid4().hex
        """Identifies this keeper in the lock and to its ranks.

        A pid is not sufficient: a process in another container may have the same pid.
        """
        self._lock: FolderLock | None = None
        self._reporter = reporter

    def open(self, path: Path, *, is_committer: bool) -> None:
        """Close the previous folder, and open `path`. The keeper that commits locks the folder, and deletes the files
        that an earlier keeper has left unfinished there.

        Args:
            path: the output folder.
            is_committer: whether this keeper commits; with several nodes, only one keeper does.

        Raises:
            OSError: the folder cannot be locked, for example because another keeper holds it. Then no folder is
                open.
        """
        self.close()
        output = OutputFolder(path)
        if is_committer:
            process = {"pid": os.getpid(), "host": host_name(), "since": clock.utc_now()}
            owner = {**process, "keeper": self.identity}
            self._lock = FolderLock.acquire(output.keeper_lock, owner)
            try:
                for attempt in output.work.iterdir():
                    _delete_unfinished(attempt)
            except OSError:
                self.close()
                raise
        self.path = path
        self._reporter.write_to(output.events)

    def close(self) -> None:
        """Release the lock. Further events are written to the job's file only."""
        if self._lock is not None:
            self._lock.release()
        self._lock = self.path = None
        self._reporter.write_to(None)


def _delete_unfinished(attempt: Path) -> None:
    """Delete the unfinished saves in the working folder of an attempt.

    Files that cannot be deleted stay, and are not used.
    """
    with contextlib.suppress(OSError):
        is_folder = attempt.is_dir() and not attempt.is_symlink()
        for unfinished in attempt.iterdir() if is_folder else ():
            if unfinished.name.isdecimal():
                with contextlib.suppress(OSError):
                    files.delete_tree(unfinished)
