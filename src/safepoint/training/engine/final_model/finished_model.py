"""Saves the finished model, in the layout that `from_pretrained` reads, in the object store.

Weights that the ranks hold are uploaded directly, without a disk in between (docs/adr/0015). Files that the framework
writes itself stay in the output folder, and the uploader publishes them. A failure is reported, and the process exits
with a code other than 0.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TypeVar

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, Describe, Manifest
from safepoint.checkpoint.local.final_model import FINAL, final_folder, note_end
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.working_checkpoint import RankPart, WorkingCheckpoint
from safepoint.checkpoint.remote.patience import LONGEST_PATIENCE_S
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.errors import PeerError, SafepointError, SaveError, StorageError
from safepoint.foundation import clock
from safepoint.foundation.events.store_events import FinalMissing, Uploaded, UploadFailed
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.training.collective.peers import Peers
from safepoint.training.context.rank_context import RankContext
from safepoint.training.engine.final_model.final_upload import FinalUpload
from safepoint.training.engine.loop import TrainingLoop
from safepoint.training.engine.streams import Leader, Streams, follow
from safepoint.training.start.folders import Folders

_LOOK_EVERY_S = 0.25
_T = TypeVar("_T")


class Finishing:
    """The save of one training's finished model.

    Args:
        context: reports what happened.
        peers: all ranks.
        framework: the training loop that has the model.
        output: the local output folder of the store.
        folders: whether all ranks share the output folder.
        attempt_id: the attempt that has claimed the store.
        describe: makes the manifest.
    """

    def __init__(
        self,
        context: RankContext,
        peers: Peers,
        framework: TrainingLoop,
        output: OutputFolder,
        folders: Folders,
        *,
        attempt_id: str,
        describe: Describe,
    ) -> None:
        self._context = context
        self._peers = peers
        self._framework = framework
        self._output = output
        self._folders = folders
        self._attempt_id = attempt_id
        self._describe = describe
        self._step = framework.step

    def finish(self, location: Location) -> None:
        """Save the model in the store at `location`; a collective call.

        Raises:
            PeerError: a rank is gone.
        """
        rank = self._context.place.rank
        working = WorkingCheckpoint(
            self._output, attempt_id=self._attempt_id, step=self._step, target=final_folder(self._output)
        )
        # Create the folder first: a rank where this fails must not be missing in the collective calls that follow.
        streams, root, problem = None, *self._agreed(lambda: working.rank_root(rank))
        if root is not None and not problem:
            folder = root / working.name
            streams, problem = self._agreed(lambda: self._framework.write_final(folder))
        if problem:
            self._report_missing(location, problem)
        elif streams is None:
            self._leave_to_uploader(working, location)
        elif self._context.place.is_first:
            self._send(working, streams, location)
        else:
            follow(self._peers, streams)
        if self._folders.is_owner:
            working.discard()
        if self._context.place.is_first:
            with contextlib.suppress(OSError):  # then no process looks for a model that the script wrote
                self._context.uploads.training_ended(note_end(self._output, self._describe))

    def _agreed(self, work: Callable[[], _T]) -> tuple[_T | None, str]:
        """Call `work` on all ranks.

        Returns:
            Its result on this rank, and the errors of all ranks, empty if there is none; the errors are the same on
            all ranks.

        Raises:
            PeerError: a rank is gone.
        """
        result, problem = None, ""
        try:
            result = work()
        except PeerError:
            raise
        except Exception as error:  # noqa: BLE001  gathered, so that no other rank waits forever
            problem = f"rank {self._context.place.rank}: {type(error).__name__}: {error}"
        return result, "; ".join(text for text in self._peers.gather(problem) if text)

    def _report_missing(self, location: Location, reason: str, checkpoint: str | None = None) -> None:
        """Report that the training succeeded, but the final model could not be saved."""
        missing = FinalMissing(
            step=self._step, location=str(location.child(FINAL)), reason=reason, checkpoint=checkpoint
        )
        if self._context.place.is_first:
            self._context.uploads.final_model_missing(missing.line)
        self._context.reporter.report(missing)

    def _leave_to_uploader(self, working: WorkingCheckpoint, location: Location) -> None:
        """Commit the files that the ranks have written; the uploader publishes them."""
        rank = self._context.place.rank
        try:
            part = dataclasses.replace(working.seal(rank), node=self._folders.index)
        except Exception as error:  # noqa: BLE001  gathered, so that no other rank waits forever
            part = RankPart(rank=rank, error=f"{type(error).__name__}: {error}")
        parts = self._peers.gather(part)
        if self._context.place.is_first:
            try:
                working.commit(_of_first_node(parts), self._describe)
            except (SafepointError, OSError) as error:
                self._report_missing(location, str(error))

    def _send(self, working: WorkingCheckpoint, streams: Streams, location: Location) -> None:
        """Upload the bytes that the ranks hold; the first rank calls this."""
        started_s, context, where = clock.monotonic_s(), self._context, str(location.child(FINAL))
        leader = Leader(self._peers, streams, patience_s=context.settings.peer_timeout_s)

        def failed(error: StorageError) -> None:
            context.reporter.report(UploadFailed(step=self._step, name_in_store=FINAL, reason=str(error)))

        def send() -> Manifest:
            remote = RemoteFolder(open_store(location), attempt_id=self._attempt_id)
            self._wait_for_checkpoint(remote)
            small = working.rank_root(0) / working.name
            upload = FinalUpload(remote, self._output, leader, large=streams.files, small=small, failed=failed)
            return upload.run(self._describe)

        context.log.info("writing the final model to %s", where)
        try:
            manifest = leader.lead(send)
        except PeerError:
            raise
        except Exception as error:  # noqa: BLE001  the training itself has succeeded
            reason = str(error) if isinstance(error, SafepointError) else f"{type(error).__name__}: {error}"
            self._report_missing(location, reason, self._source(streams.step, location))
            return
        duration_s = round(clock.monotonic_s() - started_s, 3)
        context.reporter.report(
            Uploaded(step=self._step, location=where, size_bytes=manifest.size_bytes, duration_s=duration_s)
        )

    def _wait_for_checkpoint(self, remote: RemoteFolder) -> None:
        """Wait until the newest checkpoint is in the store: it is more important than the final model."""
        newest = max((manifest.step for _, manifest in self._output.manifests()), default=None)
        uploader = self._context.uploads.uploader
        if newest is None or uploader is None:
            return
        last, last_s = uploader.status(), clock.monotonic_s()
        while uploader.failure() is None and clock.monotonic_s() - last_s < LONGEST_PATIENCE_S:
            status = uploader.status()
            if status != last:
                last, last_s = status, clock.monotonic_s()
            with contextlib.suppress(StorageError):  # the uploader reports it if it persists
                if uploader.is_idle and newest in remote.steps():
                    return
            clock.sleep(_LOOK_EVERY_S)

    def _source(self, step: int | None, location: Location) -> str | None:
        """The path of the checkpoint with the same weights: in the folder, or else in the store."""
        if step is None:
            return None
        name = checkpoint_name(step)
        here = self._output.root / name
        return str(here if (here / MANIFEST_NAME).is_file() else location.child(name))


def _of_first_node(parts: list[RankPart]) -> list[RankPart]:
    """The parts of the first node, where the final model is stored; other nodes may have written the same files.

    Raises:
        SaveError: another node has written a file that the first node lacks.
    """
    here = [part for part in parts if part.node == 0 or part.error is not None]
    files = {entry for part in here for entry in part.files}
    for part in parts:
        for entry in part.files:
            if entry not in files:
                raise SaveError(f"{entry.path} lies on another node than the rest of the model")
    return here
