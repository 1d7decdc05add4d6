"""Saves the finished model in the object store, in the layout that `from_pretrained` reads.

Weights that the ranks hold in memory are uploaded from memory, and not written to a disk first (docs/adr/0015). If
the framework itself writes all files, the files are committed in the output folder. The uploader (the process that
sends committed files to the object store) then publishes them. A failure is reported, and the process exits with a
code other than 0.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from safepoint.checkpoint.commit import commit
from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, Describe, Manifest, Trigger
from safepoint.checkpoint.local.final_model import FINAL, final_folder, note_end
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.working_checkpoint import RankPart, WorkingCheckpoint
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.remote.store_destination import StoreDestination
from safepoint.checkpoint.remote.verified_upload import (
    FIRST_PAUSE_S,
    LONGEST_PATIENCE_S,
    LONGEST_PAUSE_S,
    SourceFile,
    patience_s,
    upload_record,
)
from safepoint.errors import PeerError, SafepointError, SaveError, StorageError
from safepoint.foundation import clock, files
from safepoint.foundation.events.run_events import FinalMissing
from safepoint.foundation.events.upload_events import Uploaded, UploadFailed
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.training.engine.setup import TrainingSetup
from safepoint.training.engine.streams import Leader, StreamedFile, Streams, follow

_LOOK_EVERY_S = 0.25
_T = TypeVar("_T")


class FinalModelSave:
    """The save of one training's finished model.

    Args:
        setup: the facts of the training; the training loop has the model.
        location: the object store.
    """

    def __init__(self, setup: TrainingSetup, location: Location) -> None:
        self._setup = setup
        self._location = location
        self._is_first = setup.context.place.is_first
        self._step = setup.loop.step
        self._describe = setup.describe(Trigger.FINAL)

    def save(self) -> None:
        """Save the model in the store; a collective call.

        Raises:
            PeerError: a rank is gone.
        """
        output = self._setup.output
        working = self._setup.working_checkpoint(final_folder(output))
        try:
            self._save(working)
        except PeerError:
            raise
        except (SafepointError, OSError) as error:
            self._report_missing(str(error))
        if self._setup.start.folders.is_owner:
            working.discard()
        if self._is_first:
            with contextlib.suppress(OSError):  # if this fails, a model that the script saves later is not uploaded
                self._setup.context.uploads.training_ended(note_end(output, self._describe))

    def _save(self, working: WorkingCheckpoint) -> None:
        rank, peers = self._setup.context.place.rank, self._setup.peers
        # Create the folder on all ranks first. If this fails on one rank, no rank calls the framework: its collective
        # calls would wait for the failed rank.
        folder = self._on_all_ranks(lambda: working.rank_root(rank)) / working.name
        streams = self._on_all_ranks(lambda: self._setup.loop.write_final(folder))
        if streams is None:
            part = self._on_all_ranks(lambda: working.seal(rank, node=self._setup.start.folders.index))
            parts = peers.gather(part)
            if self._is_first:  # the uploader publishes the committed model
                working.commit(_of_first_node(parts), self._describe)
        elif self._is_first:
            self._upload(streams, working.rank_root(rank) / working.name)
        else:
            follow(peers, streams)

    def _on_all_ranks(self, work: Callable[[], _T]) -> _T:
        """Call `work` on all ranks, and return its result on this rank.

        Raises:
            PeerError: a rank is gone.
            SaveError: the errors of all ranks in one message, the same on every rank.
        """
        result: _T | SaveError
        try:
            result = work()
        except PeerError:
            raise
        except Exception as error:  # noqa: BLE001  gathered, so that no other rank waits forever
            result = SaveError(f"rank {self._setup.context.place.rank}: {type(error).__name__}: {error}")
        errors = self._setup.peers.gather(str(result) if isinstance(result, SaveError) else "")
        if isinstance(result, SaveError) or any(errors):
            raise SaveError("; ".join(filter(None, errors)))
        return result

    def _report_missing(self, reason: str, checkpoint: str | None = None) -> None:
        """Report that the training succeeded, but the final model could not be saved."""
        missing = FinalMissing(
            step=self._step, location=str(self._location.child(FINAL)), reason=reason, checkpoint=checkpoint
        )
        if self._is_first:
            self._setup.context.uploads.final_model_missing(missing.line)
        self._setup.context.reporter.report(missing)

    def _upload(self, streams: Streams, small: Path) -> None:
        """Upload the bytes that the ranks hold, and the files in `small`; only the first rank calls this method."""
        started_s, context, where = clock.monotonic_s(), self._setup.context, str(self._location.child(FINAL))
        leader = Leader(self._setup.peers, streams, patience_s=context.settings.peer_timeout_s)

        def failed(error: StorageError) -> None:
            context.reporter.report(UploadFailed(step=self._step, name_in_store=FINAL, reason=str(error)))

        def send() -> Manifest:
            remote = RemoteFolder(open_store(self._location), attempt_id=self._setup.start.attempt.attempt_id)
            self._wait_for_checkpoint(remote)
            upload = FinalUpload(remote, self._setup.output, leader, large=streams.files, small=small, failed=failed)
            return upload.run(self._describe)

        context.log.info("writing the final model to %s", where)
        try:
            manifest = leader.lead(send)
        except PeerError:
            raise
        except Exception as error:  # noqa: BLE001  the training itself has succeeded
            reason = str(error) if isinstance(error, SafepointError) else f"{type(error).__name__}: {error}"
            self._report_missing(reason, self._source(streams.step))
            return
        duration_s = round(clock.monotonic_s() - started_s, 3)
        context.reporter.report(
            Uploaded(step=self._step, location=where, size_bytes=manifest.size_bytes, duration_s=duration_s)
        )

    def _wait_for_checkpoint(self, remote: RemoteFolder) -> None:
        """Wait until the newest checkpoint is in the store, because it is more important than the final model.

        The wait also ends if the uploader has failed, or has made no progress for `LONGEST_PATIENCE_S`.
        """
        newest = max((manifest.step for _, manifest in self._setup.output.manifests()), default=None)
        uploader = self._setup.context.uploads.uploader
        if newest is None or uploader is None:
            return
        last, last_s = uploader.status(), clock.monotonic_s()
        while uploader.failure() is None and clock.monotonic_s() - last_s < LONGEST_PATIENCE_S:
            status = uploader.status()
            if status != last:
                last, last_s = status, clock.monotonic_s()
            with contextlib.suppress(StorageError):  # if the error persists, the uploader reports it
                if status.get("state") == "idle" and newest in remote.steps():
                    return
            clock.sleep(_LOOK_EVERY_S)

    def _source(self, step: int | None) -> str | None:
        """The path or URI of the checkpoint of `step`. Its weights are the same as the final model's weights.

        Return the path if the checkpoint is in the output folder. If not, return its URI in the store. Return None if
        `step` is None.
        """
        if step is None:
            return None
        name = checkpoint_name(step)
        here = self._setup.output.root / name
        return str(here if (here / MANIFEST_NAME).is_file() else self._location.child(name))


def _of_first_node(parts: list[RankPart]) -> list[RankPart]:
    """Return the parts (the lists of written files) of the ranks on the first node.

    Only the first node's files are stored as the final model. Other nodes may have the same files.

    Raises:
        SaveError: another node has a file that the first node does not have, or has with other content.
    """
    here = [part for part in parts if part.node == 0]
    known = {entry for part in here for entry in part.files}
    for part in parts:
        for entry in part.files:
            if entry not in known:
                raise SaveError(
                    "the final model was not saved: Safepoint stores only the files of node 0, but node "
                    f"{part.node} has {entry.path}, which node 0 does not have, or has with other content"
                )
    return here


class FinalUpload:
    """The upload of a final model: large files, whose bytes the ranks hold, and small files in a folder.

    Failed uploads are repeated, as uploads of checkpoints are.

    Args:
        remote: the location in the object store, which this run has claimed.
        output: the local output folder that belongs to the location.
        leader: reads the large files' bytes from the ranks.
        large: the files whose bytes the ranks hold.
        small: the folder with all other files.
        failed: called with the first failure. The upload is repeated after this call.
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
        self._destination = StoreDestination(remote, FINAL, sent=upload_record(output, FINAL))
        self._leader = leader
        self._large = large
        self._small = small
        self._failed = failed
        self._sent_bytes = 0
        self._most_bytes = 0
        self._last_progress_s = clock.monotonic_s()

    def run(self, describe: Describe) -> Manifest:
        """Upload all files and commit them. After a failure, try again, for as long as `patience_s` allows.

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
        small = list(files.walk_files(self._small))
        sizes = {path: status.st_size for path, status in small}
        self._destination.begin(files=sizes | {file.path: file.size_bytes for file in self._large})
        for file in self._large:
            self._destination.put(SourceFile(file.path, self._leader.content_of(file)), self._progress)
        for path, _ in small:
            self._destination.put(SourceFile(path, self._small / path, below=self._small), self._progress)
        self._leader.check()
        manifest = describe(self._destination.entries)
        commit(self._destination, manifest)
        return manifest

    def _progress(self, num_bytes: int) -> None:
        """Record the time if there is progress. Bytes that an earlier try has already sent are not progress."""
        self._sent_bytes += num_bytes
        if self._sent_bytes > self._most_bytes:
            self._most_bytes = self._sent_bytes
            self._last_progress_s = clock.monotonic_s()
