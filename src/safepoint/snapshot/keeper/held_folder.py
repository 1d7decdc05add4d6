"""The output folder that a keeper writes into."""

import os
from pathlib import Path

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.foundation import clock, files
from safepoint.foundation.environment import host_name
from safepoint.foundation.files import FolderLock
from safepoint.snapshot.keeper.reporter import Reporter


class HeldFolder:
    """The folder, locked: of several keepers only this one commits into it.

    Args:
        reporter: writes its events into the folder.
    """

    def __init__(self, reporter: Reporter) -> None:
        self.path: Path | None = None
        self._lock: FolderLock | None = None
        self._reporter = reporter

    def open(self, path: Path, *, is_committer: bool) -> None:
        """Close the previous folder, lock this one, and delete the unfinished files of a keeper that died.

        Args:
            path: of the output folder.
            is_committer: whether checkpoints are committed here; of several nodes one does.

        Raises:
            OSError: the folder cannot be locked, for example because another keeper holds it; no folder is open then.
        """
        self.close()
        output = OutputFolder(path)
        if is_committer:
            owner = {"pid": os.getpid(), "host": host_name(), "since": clock.utc_now()}
            self._lock = FolderLock.acquire(output.keeper_lock, owner)
            try:
                for unfinished in output.work.glob("*/*"):
                    if unfinished.name.isdecimal():
                        files.delete_tree(unfinished)
            except OSError:
                self.close()
                raise
        self.path = path
        self._reporter.write_to(output.events)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
        self._lock = self.path = None
        self._reporter.write_to(None)
