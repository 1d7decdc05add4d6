"""Uploads the finished model: the first rank sends the bytes that the ranks hold into the object store.

Only the small files are written to a disk. Failed uploads are repeated, as for checkpoints.
"""

from collections.abc import Callable
from pathlib import Path

from safepoint.checkpoint.commit import commit
from safepoint.checkpoint.format.manifest import Describe, Manifest
from safepoint.checkpoint.local.final_model import FINAL, sent_record
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote.patience import FIRST_PAUSE_S, LONGEST_PAUSE_S, patience_s
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.remote.store_destination import StoreDestination
from safepoint.checkpoint.remote.verified_upload import SourceFile
from safepoint.errors import StorageError
from safepoint.foundation import clock, files
from safepoint.training.engine.streams import Leader, StreamedFile


class FinalUpload:
    """The upload of one final model.

    Args:
        remote: the claimed location.
        output: the local output folder of the location.
        leader: reads the large files' bytes from the ranks.
        large: the files whose bytes the ranks hold.
        small: the folder with all other files.
        failed: called with the first failure; the upload is then repeated.
    """

    def __init__(
        self,
        remote: RemoteFolder,
        output: OutputFolder,
        leader: Leader,
        *,
        large: tuple[StreamedFile, ...],
        small: Path,
        failed: Callable[[StorageError], None],
    ) -> None:
        self._destination = StoreDestination(remote, FINAL, sent=sent_record(output))
        self._leader = leader
        self._large = large
        self._small = small
        self._failed = failed
        self._sent_bytes = 0
        self._most_bytes = 0
        self._last_progress_s = clock.monotonic_s()

    def run(self, describe: Describe) -> Manifest:
        """Upload all files and commit them; repeat this on failures until patience is over.

        Args:
            describe: makes the manifest.

        Raises:
            ConflictError: another attempt has claimed the location.
            StorageError: uploads failed without progress for longer than `patience_s`.
            SaveError: a rank cannot read its bytes.
        """
        pause_s, is_reported = FIRST_PAUSE_S, False
        while True:
            try:
                return self._send(describe)
            except StorageError as error:
                if clock.monotonic_s() - self._last_progress_s > patience_s(error):
                    raise
                if not is_reported:
                    is_reported = True
                    self._failed(error)
            clock.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _send(self, describe: Describe) -> Manifest:
        self._sent_bytes = 0
        self._destination.begin()
        for file in self._large:
            self._destination.put(SourceFile(file.path, self._leader.content_of(file)), self._progress)
        for path, _ in files.regular_files(self._small):
            self._destination.put(SourceFile(path, self._small / path), self._progress)
        self._leader.check()
        manifest = describe(self._destination.entries)
        commit(self._destination, manifest)
        return manifest

    def _progress(self, num_bytes: int) -> None:
        """Bytes that an earlier attempt had sent are no progress."""
        self._sent_bytes += num_bytes
        if self._sent_bytes > self._most_bytes:
            self._most_bytes = self._sent_bytes
            self._last_progress_s = clock.monotonic_s()
