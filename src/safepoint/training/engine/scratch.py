"""Where a rank's save routine runs: a folder for the small files it writes, while its tensors are captured."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.snapshot.images.capture import Capture
from safepoint.snapshot.images.image import Image
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.protocol.messages import SCRATCH_PREFIX
from safepoint.training.engine.loop import Write

_LEAST_BYTES = 16 << 20


class Scratch:
    """The folder, and the capture below it.

    Args:
        parent: where it is made; None for the system's folder.
    """

    def __init__(self, parent: str | None) -> None:
        self._parent = parent
        self._path: Path | None = None
        self._capture = Capture()

    def prepare_capture(self) -> None:
        """Do what takes time now, and not in the first save."""
        self._capture.prepare()

    def ensure(self, keeper: KeeperClient) -> None:
        """See that it is there, with room, and that the keeper removes it should this process be killed.

        Raises:
            OSError: there is no room for small files.
        """
        if self._path is None:
            self._path = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=self._parent))
            self.let_keeper_remove(keeper)
        if shutil.disk_usage(self._path).free < _LEAST_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def let_keeper_remove(self, keeper: KeeperClient) -> None:
        """Let the keeper remove the folder when this process has ended, if there is one."""
        if self._path is not None:
            keeper.remove_at_exit(str(self._path))

    def images(self, step: int, write: Write) -> list[Image]:
        """What a save routine would write, as images; `ensure` comes first.

        Args:
            step: of the checkpoint.
            write: the routine; it runs here.

        Raises:
            Exception: what the routine raises.
        """
        assert self._path is not None
        folder = self._path / checkpoint_name(step)
        folder.mkdir()
        try:
            with self._capture.below(folder) as captured:
                write(self._path, folder)
            return self._capture.collect(captured)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def forget(self, paths: Iterable[str]) -> None:
        """Let the capture forget these files; see `Capture.forget`."""
        self._capture.forget(paths)

    def remove(self) -> None:
        """Delete the folder."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None
