"""Publishes a committed checkpoint of a folder: uploads its files, and commits it in the object store.

Several nodes may each hold a part: some of the files, in an output folder of their own (docs/adr/0008). Then the node
that finds all parts in the store commits the whole checkpoint. After a failure the next try uploads only the missing
files.

Nodes communicate only through marks: small objects in the store, in `.safepoint/parts/<name>/<manifest's digest>/`. A
node writes the mark `begun-<node>` while it uploads its files. When all its files are uploaded, it writes the mark
`<node>-of-<nodes>`, which contains the manifest. A checkpoint that another node has begun is uploaded first, because
the checkpoint needs this node's part. A node begins the next checkpoint only when its last checkpoint is complete or
superseded. So all nodes upload the same checkpoint.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from pathlib import Path

from safepoint.checkpoint.commit import Record, commit, manifest_of
from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, NodePart
from safepoint.checkpoint.format.verify import compare_listing
from safepoint.checkpoint.local.retention import Policy
from safepoint.checkpoint.remote.fetch import check, windows_of
from safepoint.checkpoint.remote.marks import is_name
from safepoint.checkpoint.remote.refusals import Refusals
from safepoint.checkpoint.remote.remote_folder import PARTS, RemoteFolder
from safepoint.checkpoint.remote.store_destination import StoreDestination, added_to
from safepoint.checkpoint.remote.verified_upload import SourceFile, UploadRecord
from safepoint.errors import (
    ManifestError,
    ObjectNotFoundError,
    SafepointError,
    StorageError,
    TransientError,
    UnreadableError,
)
from safepoint.foundation import clock
from safepoint.storage.store import Progress, Store

_LOOK_EVERY_S = 1.0
_RENEW_EVERY_S = 15.0
_MARK = re.compile(r"([^/]+)/([0-9a-f]{32})/(0|[1-9][0-9]{0,6})-of-([1-9][0-9]{0,6})")


class Published(Enum):
    """The result of `publish`."""

    BEFORE = auto()
    """The checkpoint was in the store already, with all of its files."""
    NOW = auto()
    """This call has committed the checkpoint."""
    IN_PART = auto()
    """This node's files are in the store, and files of other nodes are missing."""


def publish(
    remote: RemoteFolder,
    folder: Path,
    record: Record,
    *,
    name: str,
    sent: UploadRecord,
    progress: Progress | None = None,
    deadline_s: float | None = None,
) -> Published:
    """Upload a committed checkpoint and commit it in the store; files that are there already are not sent again.

    Args:
        remote: the location in the store, which this attempt has claimed for itself.
        folder: the folder of the checkpoint. The caller must hold a lease on the checkpoint (a lock, see
            `shared_folders.leases.reading`), so that no run deletes it.
        record: the manifest of the checkpoint; or, if each node has an output folder of its own, the record of the
            files that this folder holds.
        name: its name in the store.
        sent: the files that earlier tries have uploaded. Each file that is uploaded now is added.
        progress: called when bytes have reached the store, and for files that were in the store already.
        deadline_s: when to give up, by the monotonic clock. If None, only each single request has a time limit.

    Raises:
        CheckpointError: a file has changed since the checkpoint was committed.
        ConflictError: another attempt has claimed the location.
        StorageError: the upload failed, a file cannot be read, or there are another tool's files under the name.
    """
    part = record if isinstance(record, NodePart) else None
    manifest = manifest_of(record)
    destination = StoreDestination(remote, name, sent=sent, deadline_s=deadline_s)
    if not destination.begin(manifest):
        sent.remove()
        return Published.BEFORE
    marks = NodeMarks(remote.store, name, manifest, deadline_s)
    if part is not None:
        marks.mark_begun(part.node)
    files = [SourceFile(entry.path, folder / entry.path, entry, below=folder.parent) for entry in record.files]
    destination.put_all(files, progress)
    if part is not None:
        destination.end_uploads(part.paths)
        marks.mark_uploaded(part.node, part.num_nodes)
        if not marks.are_complete():
            return Published.IN_PART
    commit(destination, manifest)
    sent.remove()
    return Published.NOW


def finish_parts(remote: RemoteFolder) -> list[str]:
    """Commit the checkpoints that all nodes of an ended attempt have uploaded, but that no node has committed.

    A manifest replaces the manifest of a committed checkpoint only if it adds files, changes nothing else, and states
    the right digests of the added files. (A stranger may have written the marks.)

    Args:
        remote: the location in the store, which this attempt has claimed for itself.

    Returns:
        The names of the checkpoints that were committed.
    """
    committed: list[str] = []
    for name, manifest in complete_marks(remote.store, None):
        try:
            with remote.refusals.as_fault(f"{name}/{MANIFEST_NAME}"):
                present = remote.bytes_of_manifest(name)
        except UnreadableError:  # the manifest may belong to another checkpoint, which is not replaced
            continue
        added = added_to(present, manifest) if present is not None else []
        if present is not None and not added:
            continue
        if not compare_listing(manifest.files, remote.files_of(name)) and not check(
            remote.store, name, windows_of(added)
        ):
            commit(StoreDestination(remote, name), manifest)
            committed.append(name)
    return committed


class NodeMarks:
    """The marks for one manifest of a checkpoint.

    Args:
        store: the store that holds the marks.
        name: the name of the checkpoint.
        manifest: the manifest of the whole checkpoint.
        deadline_s: when to give up, by the monotonic clock. If None, only each single request has a time limit.
    """

    def __init__(self, store: Store, name: str, manifest: Manifest, deadline_s: float | None) -> None:
        self._store = store
        self._data = manifest.to_bytes()
        self._prefix = f"{PARTS}/{name}/{_hex_of(self._data)}"
        self._deadline_s = deadline_s

    def mark_begun(self, node: int) -> None:
        """Write the mark that says that `node` is uploading its files."""
        self._store.write(f"{self._prefix}/begun-{node}", clock.utc_now().encode(), deadline_s=self._deadline_s)

    def mark_uploaded(self, node: int, num_nodes: int) -> None:
        """Write the mark that says that the files of `node` are in the store."""
        self._store.write(f"{self._prefix}/{node}-of-{num_nodes}", self._data, deadline_s=self._deadline_s)

    def are_complete(self) -> bool:
        """Whether the files of all nodes are in the store."""
        return any(manifest.to_bytes() == self._data for _, manifest in complete_marks(self._store, self._deadline_s))


def complete_marks(store: Store, deadline_s: float | None) -> Iterator[tuple[str, Manifest]]:
    """The name and the manifest of every checkpoint whose files all nodes have marked as uploaded."""
    marked: dict[tuple[str, str, int], set[int]] = {}
    for item in store.list(PARTS, deadline_s=deadline_s):
        match = _MARK.fullmatch(item.key.removeprefix(f"{PARTS}/"))
        if match is not None and is_name(match[1]):
            marked.setdefault((match[1], match[2], int(match[4])), set()).add(int(match[3]))
    for (name, digest, num_nodes), nodes in marked.items():
        if len(nodes) != num_nodes or max(nodes) >= num_nodes:
            continue
        key = f"{PARTS}/{name}/{digest}/0-of-{num_nodes}"
        # The mark is missing if another node has just committed. It is invalid if a hostile writer has altered it.
        ignored = contextlib.suppress(ObjectNotFoundError, ManifestError, UnreadableError)
        with ignored, Refusals(store).as_fault(key, deadline_s=deadline_s):
            size_bytes = min(store.stat(key, deadline_s=deadline_s).size_bytes, MAX_MANIFEST_BYTES)
            data = bytes(store.read(key, length=size_bytes, deadline_s=deadline_s))
            manifest = Manifest.from_bytes(data)
            if _hex_of(data) == digest and step_of(Path(name)) in {None, manifest.step}:
                yield name, manifest


def _hex_of(data: bytes) -> str:
    return digest_bytes(data).rpartition(":")[2]


class NodeUploaders:
    """Coordinates this node's uploader with the uploaders of the other nodes. With one node, it waits for nothing.

    Args:
        remote: the location in the store, which this attempt has claimed for itself.
        count: the number of nodes, this one included.
        run_id: the run; None for all runs. Checkpoints of other runs do not count: if a newer checkpoint of another
            run counted, this node would not wait for the other nodes.
        policies: the policies of `RemoteFolder.superseded`, which uses the manifests that are read here.
    """

    def __init__(
        self, remote: RemoteFolder, *, count: int, run_id: str | None = None, policies: Sequence[Policy] = ()
    ) -> None:
        self._remote = remote
        self._run_id = run_id
        self._policies = policies
        self.exist = count > 1
        """Whether there are other nodes."""
        self.awaited: dict[str, Manifest] = {}
        """The checkpoints that this node has uploaded and that lack parts of other nodes, by name."""
        self._look_again_s = 0.0
        self._renewed_s = 0.0
        self._signs: set[tuple[str, str, float]] = set()

    def begun(self, deadline_s: float | None) -> set[str]:
        """Checkpoints that a node has begun to upload, and that are newer than the run's checkpoints in the store.

        Returns:
            Their names; empty if there is only one node, or if the store cannot be read.
        """
        with contextlib.suppress(SafepointError):
            names = self._remote.with_parts(deadline_s) if self.exist else set[str]()
            newest = self._newest_step(deadline_s) if names else -1
            return {name for name in names if (step_of(Path(name)) or 0) > newest}
        return set()

    def _newest_step(self, deadline_s: float | None) -> int:
        """The newest step that the run has in the store; -1 if there is none."""
        for step in self._remote.steps(deadline_s=deadline_s):
            found = self._remote.candidate(step, self._policies, deadline_s)
            if found is not None and self._run_id in {None, found.run_id}:
                return step
        return -1

    def may_begin(self, deadline_s: float | None) -> bool:
        """Whether this node may begin another checkpoint: its last checkpoint is complete in the store or superseded.

        The method reads the store at most once a second.
        """
        if not self.awaited or clock.monotonic_s() < self._look_again_s:
            return not self.awaited
        self._look_again_s = clock.monotonic_s() + _LOOK_EVERY_S
        with contextlib.suppress(SafepointError):
            newest = self._newest_step(deadline_s)
            for name in list(self.awaited):
                if (step_of(Path(name)) or 0) < newest:
                    del self.awaited[name]
                else:
                    self._look_for(name, deadline_s)
        return not self.awaited

    def _look_for(self, name: str, deadline_s: float | None) -> bool:
        """Stop waiting for the checkpoint `name` if it is committed with this node's manifest.

        Returns:
            Whether this node no longer waits for the checkpoint, or never did.
        """
        manifest = self.awaited.get(name)
        if manifest and self._remote.bytes_of_manifest(name, deadline_s=deadline_s) == manifest.to_bytes():
            del self.awaited[name]
            self._remote.note_commit(manifest.step)
        return name not in self.awaited

    def note(self, name: str, manifest: Manifest, published: Published) -> None:
        """Record the result of an upload."""
        self.awaited.pop(name, None)  # an entry of an earlier save of this step may have another manifest
        if published is Published.IN_PART:
            self.awaited[name] = manifest

    def renew_mark(self, name: str, record: Record, deadline_s: float | None) -> None:
        """Renew the mark `begun-<node>` of this node, if the last renewal is more than 15 s old."""
        now_s = clock.monotonic_s()
        if isinstance(record, NodePart) and self.exist and now_s - self._renewed_s > _RENEW_EVERY_S:
            self._renewed_s = now_s
            with contextlib.suppress(StorageError):
                NodeMarks(self._remote.store, name, record.manifest, deadline_s).mark_begun(record.node)

    def check_complete(self, newest: str, *, alive: Callable[[], None], deadline_s: float | None) -> None:
        """Check that the newest checkpoint is complete in the store. Older checkpoints are not checked.

        Args:
            newest: the name of the newest checkpoint.
            alive: called if a mark of an awaited checkpoint has changed since `check_complete` was last called. Such
                a change shows that a node is uploading.
            deadline_s: when to give up, by the monotonic clock. If None, only each single request has a time limit.

        Raises:
            TransientError: the checkpoint is not complete yet.
            StorageError: the store cannot be read.
        """
        prefixes = [f"{PARTS}/{name}" for name in self.awaited]
        found = [item for prefix in prefixes for item in self._remote.store.list(prefix, deadline_s=deadline_s)]
        signs = {(item.key, item.version, item.modified_s) for item in found}
        if signs != self._signs:
            self._signs = signs
            alive()
        if not self._look_for(newest, deadline_s):
            raise TransientError(f"{self._remote.where(newest)} still lacks the parts of other nodes")
