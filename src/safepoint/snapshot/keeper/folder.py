"""The output folder that a keeper writes into."""

import os
from pathlib import Path

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.foundation import clock, files
from safepoint.foundation.environment import host_name
from safepoint.foundation.files import FolderLock
from safepoint.snapshot.keeper.reporting import Reporting


class HeldFolder:
    """The folder; where this keeper commits, no other one does.

    Args:
        reporting: its events go into the folder's stream.
    """

    def __init__(self, reporting: Reporting) -> None:
        self.path: Path | None = None
        self._lock: FolderLock | None = None
        self._reporting = reporting

    def open(self, path: Path, *, is_committer: bool) -> None:
        """Leave the one before, take this one, and delete what a keeper that died was writing.

        Args:
            path: of the output folder.
            is_committer: whether checkpoints are committed here; of several nodes one does.

        Raises:
            OSError: it cannot be held, because another keeper holds it for instance; no folder is open then.
        """
        self.close()
        output = OutputFolder(path)
        if is_committer:
            owner = {"pid": os.getpid(), "host": host_name(), "since": clock.utc_now()}
            self._lock = FolderLock.acquire(output.keeper_lock, owner)
            try:
                for left in output.work.glob("*/*"):
                    if left.name.isdecimal():
                        files.delete_tree(left)
            except OSError:
                self.close()
                raise
        self.path = path
        self._reporting.write_to(output.events)

    def close(self) -> None:
        """Give it back."""
        if self._lock is not None:
            self._lock.release()
        self._lock = self.path = None
        self._reporting.write_to(None)
