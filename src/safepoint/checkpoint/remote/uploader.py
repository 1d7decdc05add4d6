"""The mover: which of the local folder's checkpoints goes to the object store next, and taking it there.

It needs nothing but the folder: what is there and not yet in the store is to be moved, newest first. A periodic
checkpoint whose turn had not come when a newer one appeared is superseded; one in flight is finished, unless a
deadline leaves time for the newest only.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.format.catalog import checkpoint_name, list_checkpoints, step_of
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, PART_NAME, Manifest, Trigger
from safepoint.checkpoint.format.node_part import NodePart, read_part
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.checkpoint.local.final_record import FINAL, final_folder
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.local.retention import Policy
from safepoint.checkpoint.remote.node_uploaders import NodeUploaders
from safepoint.checkpoint.remote.publish import Published, Publisher
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.errors import ConflictError, ManifestError, SafepointError, StorageError, TransientError
from safepoint.foundation import clock, files
from safepoint.foundation.events.run_events import Pruned
from safepoint.foundation.events.store_events import Uploaded, UploadFailed, UploadSuperseded
from safepoint.foundation.events.stream import Event


class _GivesWayError(Exception):
    """An upload in flight is no longer the one that the remaining time is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """What a checkpoint's folder holds: the manifest, and of which part of it the files are there."""

    data: bytes
    is_periodic: bool
    part: NodePart | None


class Uploader:
    """Moves what a folder holds.

    Args:
        output: the local folder.
        remote: the claimed location.
        policies: which checkpoints stay in the store; none keeps all.
        report: told what happened.
        node: which node's folder it is, of `num_nodes` that upload parts of the same checkpoints; the first one
            prunes the store.
        num_nodes: how many; 1 where all ranks share one folder.
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
    ) -> None:
        self._output = output
        self._remote = remote
        self._publisher = Publisher(remote)
        self._policies = policies
        self._report = report
        self._node = node
        self._num_nodes = num_nodes
        self._siblings = NodeUploaders(remote, self._publisher, count=num_nodes)
        self._done: dict[str, tuple[bool, bytes]] = {}
        self._is_held_back = False
        self._seen: set[str] = set()
        self._present: set[str] = set()
        self._status: dict[str, object] = {}
        self._told_failure: str | None = None
        self._contents: dict[str, tuple[tuple[int, int, int], _Content]] = {}
        self._in_store: set[int] | None = None
        self.last_progress_s = clock.monotonic_s()
        """When bytes last arrived, by the monotonic clock."""
        self.with_final = False
        """Set when the training has come to its own end, and the final model will not change any more."""
        self.newest_only = False
        """Set when the remaining time is for the newest checkpoint alone."""
        self.takes_open = False
        """Set when nobody is left who could add files to a checkpoint."""
        self.deadline_s: float | None = None
        """Set when there is a last moment; by the monotonic clock."""

    def next(self) -> Path | None:
        """What is to be moved next: the newest checkpoint, then older ones that somebody asked for, then the final.

        Older periodic ones are superseded by now, and those that retention took away are too; unless another node
        has begun one (see `Siblings`).
        """
        folders = list(self._committed())
        present = {path.name for path in folders}
        if present != self._present:
            self._present = present
            self._forget_pruned(present)
        for name in self._seen - present:
            self._supersede(Path(name))
        self._seen = present - self._done.keys()
        self._is_held_back = False
        undone = [folder for folder in folders if self._is_to_send(folder)]
        if self.newest_only:
            undone = [folder for folder in undone if folder == folders[0]]
        begun = self._siblings.begun(self.deadline_s) if undone else set[str]()
        for folder in sorted(undone, key=lambda folder: folder.name not in begun):
            if folder.name not in begun:
                if folder != folders[0] and self._is_periodic(folder):
                    self._done[folder.name] = self._key_of(folder)
                    if not self._was_uploaded_before(step_of(folder) or 0):
                        self._supersede(folder)
                    continue
                if not self.newest_only and not self._siblings.may_begin(self.deadline_s):
                    self._is_held_back = True
                    return None
            return folder
        final = final_folder(self._output)
        is_due = self.with_final and self._content_of(final) and self._done.get(FINAL) != self._key_of(final)
        return final if is_due else None

    def _is_to_send(self, folder: Path) -> bool:
        if self._done.get(folder.name) == self._key_of(folder):
            return False
        content = self._content_of(folder)
        if content is None or content.part is None:
            # What all nodes hold in full, because they resumed from it, is for the first of them to send.
            return self._node == 0
        return content.part.num_nodes == self._num_nodes  # or its other parts are lost

    def check_arrived(self) -> None:
        """See that the newest checkpoint is complete in the store, with the parts of all other nodes; then prune.

        Raises:
            TransientError: it is not yet.
            StorageError: the store cannot be read.
        """

        def alive() -> None:
            self.last_progress_s = clock.monotonic_s()

        newest = next(self._committed(), Path())
        self._siblings.check_arrived(newest.name, alive=alive, deadline_s=self.deadline_s)
        if self._is_held_back:
            where = self._remote.store.location.child(newest.name)
            raise TransientError(f"{where} is not sent before other nodes have sent their parts of an older one")
        if self._siblings.exist:
            self._prune()  # another node may have committed the newest

    @property
    def is_waiting(self) -> bool:
        """Whether nothing is left to send, and other nodes' parts have not arrived."""
        return self._siblings.is_awaiting and self.next() is None

    def _was_uploaded_before(self, step: int) -> bool:
        """Whether an earlier mover has taken it to the store; unknown while the store cannot be reached."""
        if self._in_store is None:
            try:
                self._in_store = set(self._remote.steps(deadline_s=self.deadline_s))
            except SafepointError:
                return False
        return step in self._in_store

    def _supersede(self, folder: Path) -> None:
        self._seen = self._seen - {folder.name}
        self._report(UploadSuperseded(step=step_of(folder) or 0))

    def move_next(self) -> bool:
        """Move one checkpoint, and prune the store when it arrived.

        Returns:
            Whether there was one.

        Raises:
            ConflictError: another attempt has claimed the location: nothing more is to be moved.
            StorageError: it did not arrive.
        """
        folder = self.next()
        if folder is None:
            self._tell("idle")
            return False
        content = self._content_of(folder)
        if content is None:
            return True  # pruned or replaced at this moment; the next look shows what is there
        with contextlib.ExitStack() as lease:
            try:
                lease.enter_context(files.reading(folder / (MANIFEST_NAME if content.part is None else PART_NAME)))
            except OSError:
                return True
            if self._content_of(folder) is not content:
                return True
            self._move(folder, content)
            self._done[folder.name] = (content.part is None, content.data)
            self._seen -= {folder.name}
        if folder.name != FINAL:
            self._prune()
        return True

    def _move(self, folder: Path, content: "_Content") -> None:
        part, manifest = content.part, Manifest.from_bytes(content.data)
        size_bytes = sum(entry.size_bytes for entry in (manifest.files if part is None else part.files))
        started_s, done_bytes, lock = clock.monotonic_s(), 0, threading.Lock()

        def progress(num_bytes: int) -> None:
            nonlocal done_bytes
            with lock:
                done_bytes += num_bytes
                self.last_progress_s = clock.monotonic_s()
                self._tell("uploading", folder, done_bytes, size_bytes)
                self._siblings.show_life(folder.name, part, self.deadline_s)
            if self.newest_only and folder.name != FINAL and folder != next(self._committed(), folder):
                raise _GivesWayError

        self._tell("uploading", folder, 0, size_bytes)
        try:
            published = self._publisher.publish(
                folder,
                name=folder.name,
                record=self._record_of(folder.name),
                part=part,
                progress=progress,
                deadline_s=self.deadline_s,
            )
        except _GivesWayError:
            self._report(UploadSuperseded(step=manifest.step))
            return
        except ConflictError:
            raise
        except (SafepointError, OSError) as reason:
            error = reason
            if isinstance(reason, OSError):  # the folder is the user's too
                error = StorageError(f"{folder} cannot be read: {reason}")
            self._tell("failing", folder, done_bytes, size_bytes, error=str(error))
            if self._told_failure != folder.name:  # once for each checkpoint, not for each try
                self._told_failure = folder.name
                self._report(UploadFailed(step=manifest.step, name_in_store=folder.name, reason=str(error)))
            if error is reason:
                raise
            raise error from reason
        self._siblings.note(folder.name, content.data, published)
        if published is Published.NOW:
            self._report(
                Uploaded(
                    step=manifest.step,
                    location=str(self._remote.store.location.child(folder.name)),
                    size_bytes=manifest.size_bytes,
                    duration_s=round(clock.monotonic_s() - started_s, 3),
                )
            )

    def _record_of(self, name: str) -> Path:
        return self._output.control / f"upload-{name}.json"

    def _forget_pruned(self, present: set[str]) -> None:
        for path in self._output.control.glob(self._record_of("*").name):
            name = path.stem.removeprefix("upload-")
            if name != FINAL and name not in present:
                path.unlink(missing_ok=True)

    def _prune(self) -> None:
        if self._policies and self._node == 0 and not self.newest_only:
            for step in self._remote.superseded(self._policies, deadline_s=self.deadline_s):
                self._remote.take_down(checkpoint_name(step), deadline_s=self.deadline_s)
                where = self._remote.store.location.child(checkpoint_name(step))
                self._report(Pruned(step=step, path=str(where)))

    def _committed(self) -> Iterator[Path]:
        """Newest first."""
        return (folder for folder in list_checkpoints(self._output.root) if self._content_of(folder))

    def _content_of(self, folder: Path) -> "_Content | None":
        """What is in `folder`, None when that cannot be read or may still change; parsed once, looked at often."""
        try:
            path = folder / MANIFEST_NAME
            if not path.exists():
                path = folder / PART_NAME
            status = path.stat(follow_symlinks=False)
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            known = self._contents.get(folder.name)
            if known is None or known[0] != stamp:
                part = read_part(folder) if path.name == PART_NAME else None
                manifest = read_manifest(folder) if part is None else part.manifest
                is_periodic = manifest.trigger == Trigger.PERIODIC
                known = stamp, _Content(data=manifest.to_bytes(), is_periodic=is_periodic, part=part)
                self._contents[folder.name] = known
        except (OSError, ManifestError):
            self._contents.pop(folder.name, None)
            return None
        content = known[1]
        is_open = content.part is not None and content.part.is_open
        return None if is_open and not self.takes_open else content

    def _key_of(self, folder: Path) -> tuple[bool, bytes]:
        """What tells whether the same was done before."""
        content = self._content_of(folder)
        return (content is None or content.part is None, content.data if content else b"")

    def _is_periodic(self, folder: Path) -> bool:
        content = self._content_of(folder)
        return content is None or content.is_periodic

    def _tell(
        self, state: str, folder: Path | None = None, done_bytes: int = 0, total_bytes: int = 0, error: str = ""
    ) -> None:
        status: dict[str, object] = {"state": state}
        if folder is not None:
            status |= {"name": folder.name, "done_bytes": done_bytes, "total_bytes": total_bytes}
        if error:
            status["error"] = error
        if status == self._status:
            return
        self._status = status
        with contextlib.suppress(OSError):
            data = json.dumps({"time": clock.utc_now(), **status}).encode()
            files.write_atomic(self._output.control / "upload.json", data, durable=False)
