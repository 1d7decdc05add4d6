"""The uploader: chooses the next checkpoint of the folder to publish, and publishes it in the object store.

It uploads the checkpoints of the folder that are not in the store yet, newest first. When a newer checkpoint appears,
a periodic checkpoint that still waits is superseded: it is not uploaded. An upload that has begun is finished, unless
the upload fails, or a deadline leaves time for the newest checkpoint only.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from safepoint.checkpoint.commit import Record, manifest_of
from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, PART_NAME, Manifest, Trigger
from safepoint.checkpoint.format.verify import read_manifest, read_part
from safepoint.checkpoint.local.final_model import FINAL, final_folder
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import Policy, prune
from safepoint.checkpoint.remote.extra_files import ExtraFiles
from safepoint.checkpoint.remote.publish import NodeUploaders, Published, publish
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.remote.verified_upload import upload_record
from safepoint.errors import ConflictError, ManifestError, SafepointError, TransientError
from safepoint.foundation import clock, files
from safepoint.foundation.events.stream import Event
from safepoint.foundation.events.upload_events import Uploaded, UploadFailed, UploadSuperseded
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.leases import reading


class _SupersededError(Exception):
    """A newer checkpoint exists, and the remaining time suffices for the newer one only."""


class Uploader:
    """Publishes the checkpoints of one folder.

    Args:
        output: the local folder.
        remote: the location in the store, which this attempt has claimed for itself.
        policies: which checkpoints stay in the store; if there are no policies, all stay.
        report: receives the events.
        node: the number of the node that has this folder; node 0 prunes the store.
        num_nodes: how many nodes upload files of the same checkpoints; 1 if all ranks share one folder.
        extra_bytes: how many bytes of other files in the folder to upload at most; see `ExtraFiles`.
        run_id: the run whose checkpoints are uploaded, and pruned in the store; None for all runs.
    """

    def __init__(
        self,
        output: OutputFolder,
        remote: RemoteFolder,
        *,
        policies: Sequence[Policy],
        report: Callable[[Event], None],
        node: int = 0,
        num_nodes: int = 1,
        extra_bytes: int = 0,
        run_id: str | None = None,
    ) -> None:
        self._output = output
        self._run_id = run_id
        self.extra_files = ExtraFiles(output, remote, limit_bytes=extra_bytes, is_first_node=node == 0, report=report)
        self._remote = remote
        self._policies = policies
        self._report = report
        self._node = node
        self._num_nodes = num_nodes
        self._others = NodeUploaders(remote, count=num_nodes, run_id=run_id, policies=policies)
        self._done: dict[str, tuple[bool, Manifest]] = {}
        self._is_held_back = False
        self._waiting: set[str] = set()
        self._status: dict[str, object] = {}
        self._reported_failure: str | None = None
        self._records: dict[str, tuple[tuple[int, int, int], Record]] = {}
        self._in_store: set[int] | None = None
        self.last_progress_s = clock.monotonic_s()
        """The time, by the monotonic clock, at which the time limit of an upload starts.

        It is set when bytes reach the store, when a mark of another node changes, and when the request to finish
        arrives.
        """
        self.with_final = False
        """Whether to upload the final model. It is set when the training is complete: from then on, the model
        does not change any more."""
        self.newest_only = False
        """Whether the remaining time is for the newest checkpoint only."""
        self.takes_open = False
        """Whether to upload open parts too (`NodePart.is_open`). It is set at the end of the training or of its
        processes, when callbacks can no longer add files to the parts."""
        self.deadline_s: float | None = None
        """When to give up, by the monotonic clock; None for never."""

    def next(self) -> Path | None:
        """The folder to upload next; None if nothing is left, or if other nodes have to upload their parts first.

        First come checkpoints that another node has begun (see `NodeUploaders`), then the newest checkpoint, then
        older checkpoints that are not periodic, then the final model. Older periodic checkpoints are superseded.
        Checkpoints that retention has deleted before their upload are superseded, too.
        """
        committed = list(self._committed())
        present = {folder.name for folder, _ in committed}
        for name in self._waiting - present:
            self._supersede(Path(name))
        self._waiting = present - self._done.keys()
        self._is_held_back = False
        newest = committed[0][0] if committed else None
        undone = [(folder, record) for folder, record in committed if self._is_to_send(folder, record)]
        if self.newest_only:
            undone = [(folder, record) for folder, record in undone if folder == newest]
        begun = self._others.begun(self.deadline_s) if undone else set[str]()
        for folder, record in sorted(undone, key=lambda pair: pair[0].name not in begun):
            if folder.name in begun:
                return folder
            if folder != newest and manifest_of(record).trigger == Trigger.PERIODIC:
                self._done[folder.name] = _identity(record)
                if not self._was_uploaded_before(step_of(folder) or 0):
                    self._supersede(folder)
            elif self.newest_only or self._others.may_begin(self.deadline_s):
                return folder
            else:
                self._is_held_back = True
                return None
        final = final_folder(self._output)
        record = self._record_of(final) if self.with_final else None
        return None if record is None or self._done.get(FINAL) == _identity(record) else final

    def _is_to_send(self, folder: Path, record: Record) -> bool:
        if self._done.get(folder.name) == _identity(record):
            return False
        if isinstance(record, Manifest):
            # This folder has the whole checkpoint, and so has the folder of every other node. Only the first node
            # uploads it.
            return self._node == 0
        # A checkpoint from another number of nodes cannot be completed: this run does not have the folders of all
        # parts.
        return record.num_nodes == self._num_nodes

    def check_complete(self) -> None:
        """Check that the newest checkpoint is complete in the store, with the parts of all other nodes.

        Then prune the store.

        Raises:
            TransientError: the checkpoint is not complete yet.
            StorageError: the store cannot be read.
        """

        def alive() -> None:
            self.last_progress_s = clock.monotonic_s()

        newest = self._newest()
        self._others.check_complete(newest.name, alive=alive, deadline_s=self.deadline_s)
        if self._is_held_back:
            where = self._remote.where(newest.name)
            raise TransientError(
                f"{where} waits until the other nodes have uploaded their parts of an older checkpoint"
            )
        if self._others.exist:
            self._prune()  # prune here too, because another node may have committed the newest checkpoint

    def upload_extra_files(self) -> None:
        """Upload the other files of the folder. Call this when no process of the training writes there any more.

        Raises:
            ConflictError: another attempt has claimed the location.
            StorageError: an upload failed.
        """

        def progress(num_bytes: int) -> None:
            self.last_progress_s = clock.monotonic_s()

        self.extra_files.upload(progress=progress, deadline_s=self.deadline_s)

    @property
    def is_waiting(self) -> bool:
        """Whether this node has uploaded everything, and parts of other nodes are missing."""
        return bool(self._others.awaited) and self.next() is None

    def _was_uploaded_before(self, step: int) -> bool:
        """Whether an earlier uploader has published this step; False while the store cannot be reached."""
        if self._in_store is None:
            with contextlib.suppress(SafepointError):
                self._in_store = set(self._remote.steps(deadline_s=self.deadline_s))
        return self._in_store is not None and step in self._in_store

    def _supersede(self, folder: Path) -> None:
        self._waiting = self._waiting - {folder.name}
        self._report(UploadSuperseded(step=step_of(folder) or 0))

    def upload_next(self) -> bool:
        """Upload one checkpoint or the final model. After a checkpoint, prune the store.

        Returns:
            Whether there was a checkpoint or a final model to upload.

        Raises:
            ConflictError: another attempt has claimed the location: nothing more is uploaded.
            StorageError: the upload failed.
        """
        folder = self.next()
        if folder is None:
            self._remove_old_records()
            self._write_status("idle")
            return False
        record = self._record_of(folder)
        with contextlib.ExitStack() as lease:
            try:
                if record is not None:
                    lease.enter_context(reading(folder / record.file_name))
            except OSError:
                return True
            if record is None or self._record_of(folder) is not record:
                # The checkpoint was pruned or replaced since `next` was called; the next call reads the folder again.
                return True
            self._upload(folder, record)
            self._done[folder.name] = _identity(record)
            self._waiting -= {folder.name}
        if folder.name != FINAL:
            self._prune()
        return True

    def _upload(self, folder: Path, record: Record) -> None:
        manifest, name = manifest_of(record), folder.name
        size_bytes = sum(entry.size_bytes for entry in record.files)
        started_s, done_bytes, lock = clock.monotonic_s(), 0, threading.Lock()

        def progress(num_bytes: int) -> None:
            nonlocal done_bytes
            with lock:
                done_bytes += num_bytes
                self.last_progress_s = clock.monotonic_s()
                self._write_status("uploading", name=name, done_bytes=done_bytes, total_bytes=size_bytes)
                self._others.renew_mark(folder.name, record, self.deadline_s)
            if self.newest_only and folder.name != FINAL and folder != self._newest():
                raise _SupersededError

        self._write_status("uploading", name=name, done_bytes=0, total_bytes=size_bytes)
        try:
            published = publish(
                self._remote,
                folder,
                record,
                name=folder.name,
                sent=upload_record(self._output, folder.name),
                progress=progress,
                deadline_s=self.deadline_s,
            )
        except _SupersededError:
            self._report(UploadSuperseded(step=manifest.step))
            return
        except ConflictError:
            raise
        except SafepointError as error:
            self._write_status("failing", name=name, done_bytes=done_bytes, total_bytes=size_bytes, error=str(error))
            if self._reported_failure != folder.name:  # report a failure once for each checkpoint, not for each try
                self._reported_failure = folder.name
                self._report(UploadFailed(step=manifest.step, name_in_store=folder.name, reason=str(error)))
            raise
        self._others.note(folder.name, manifest, published)
        if published is Published.NOW:
            self._report(
                Uploaded(
                    step=manifest.step,
                    location=self._remote.where(folder.name),
                    size_bytes=manifest.size_bytes,
                    duration_s=round(clock.monotonic_s() - started_s, 3),
                )
            )

    def _remove_old_records(self) -> None:
        """Delete the records of uploads whose checkpoints were pruned."""
        for path in self._output.control.glob("upload-*.json"):
            name = path.stem.removeprefix("upload-")
            if step_of(Path(name)) is not None and not (self._output.root / name).exists():
                with contextlib.suppress(OSError):  # a record that cannot be deleted stays, and is not used
                    no_links.unlink(path)

    def _prune(self) -> None:
        if self._policies and self._node == 0 and not self.newest_only:
            prune(self._remote, self._policies, self._report, run_id=self._run_id, deadline_s=self.deadline_s)

    def _committed(self) -> Iterator[tuple[Path, Record]]:
        """The committed checkpoints of the run in the folder, newest first.

        Those of other runs do not count: with a higher step, one of them would supersede all checkpoints of the run.
        """
        for folder in self._output.checkpoints():
            record = self._record_of(folder)
            if record is not None and self._run_id in {None, manifest_of(record).run_id}:
                yield folder, record

    def _newest(self) -> Path:
        return next(self._committed(), (Path(), None))[0]

    def _record_of(self, folder: Path) -> Record | None:
        """The record in `folder`; None when it cannot be read or may still change. Cached until the file changes."""
        try:
            path = folder / MANIFEST_NAME
            if not path.exists():
                path = folder / PART_NAME
            status = path.stat(follow_symlinks=False)
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            known = self._records.get(folder.name)
            if known is None or known[0] != stamp:
                known = stamp, read_part(folder) if path.name == PART_NAME else read_manifest(folder)
                self._records[folder.name] = known
        except (OSError, ManifestError):
            self._records.pop(folder.name, None)
            return None
        record = known[1]
        return None if not isinstance(record, Manifest) and record.is_open and not self.takes_open else record

    def _write_status(self, state: str, **details: object) -> None:
        status = {"state": state, **details}
        if status == self._status:
            return
        self._status = status
        with contextlib.suppress(OSError):
            data = json.dumps({"time": clock.utc_now(), **status}).encode()
            files.write_atomic(self._output.control / "upload.json", data, durable=False)


def _identity(record: Record) -> tuple[bool, Manifest]:
    """A pair: whether the record is a manifest, and the manifest of the checkpoint. Records with equal pairs need
    only one upload."""
    return isinstance(record, Manifest), manifest_of(record)
