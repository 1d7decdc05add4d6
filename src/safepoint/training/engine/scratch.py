"""The folder in which a rank's save routine writes its small files.

The tensors that the routine would write there are captured instead: Safepoint copies them into memory, and another
process writes them to disk.
"""

import errno
import os
import shutil
import tempfile
from pathlib import Path

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.errors import StorageError
from safepoint.foundation.temporary_folders.places import private_parent
from safepoint.foundation.volumes import needed
from safepoint.snapshot.images.capture import Capture
from safepoint.snapshot.images.image import Image
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.protocol.messages import SCRATCH_PREFIX, RemoveAtExit
from safepoint.training.engine.loop import Write
from safepoint.training.outcome.launcher_folder import SMALL_FILES_BYTES


class Scratch:
    """The folder for small files, and the capture of the tensors that a save routine would write there.

    Args:
        parent: where the folder is created; None to choose a folder for temporary files.
    """

    def __init__(self, parent: str | None) -> None:
        self._parent = parent
        self._path: Path | None = None
        self.capture = Capture()
        """Turns the files that a save routine writes into images: the bytes of the files, in memory."""

    def ensure(self, keeper: KeeperClient) -> None:
        """Create the folder if needed, and check its free space.

        If this process is killed, the keeper (the process that writes snapshots to disk) removes the folder.

        Raises:
            OSError: the folder cannot be created, or has no room for small files.
        """
        if self._path is None:
            try:
                parent = self._parent or private_parent()
            except StorageError as error:
                raise OSError(errno.ENOENT, error.message) from error
            self._path = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=parent))
            self.let_keeper_remove(keeper)
        if needed.free_bytes(self._path) < SMALL_FILES_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def let_keeper_remove(self, keeper: KeeperClient) -> None:
        """Have the keeper remove the folder, if it exists, when this process has ended."""
        if self._path is not None:
            keeper.send(RemoveAtExit(folder=str(self._path)))

    def images(self, step: int, write: Write) -> list[Image]:
        """Run a save routine, and return the files that it would write, as images (bytes in memory).

        Call `ensure` first.

        Args:
            step: the step of the checkpoint.
            write: the save routine.

        Raises:
            Exception: any exception of the routine.
        """
        assert self._path is not None
        folder = self._path / checkpoint_name(step)
        folder.mkdir()
        try:
            with self.capture.below(folder) as captured:
                write(self._path, folder)
            return self.capture.collect(captured)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        """Delete the folder."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None
