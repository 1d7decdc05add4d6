"""Publishing: a committed checkpoint of a folder is uploaded and committed in the object store.

From one node, or from several that each hold a part (docs/adr/0008): the node that finds that all parts are there
commits the whole. After a failure the next try uploads only what is missing.
"""

from enum import Enum, auto
from pathlib import Path

from safepoint.checkpoint.commit import Record, commit, manifest_of
from safepoint.checkpoint.format.node_part import NodePart
from safepoint.checkpoint.format.verify import compare_listing
from safepoint.checkpoint.local.upload_record import UploadRecord
from safepoint.checkpoint.remote.node_marks import NodeMarks, complete_marks
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.remote.store_destination import StoreDestination
from safepoint.checkpoint.remote.verified_upload import SourceFile
from safepoint.storage.store import Progress


class Published(Enum):
    """What became of a checkpoint that was to be published."""

    BEFORE = auto()
    """It was there already."""
    NOW = auto()
    """It is committed now."""
    IN_PART = auto()
    """This node's files are in the store, and those of other nodes are not yet."""


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
    """Upload a committed checkpoint and commit it in the store; what is there already is not sent again.

    Args:
        remote: the claimed location.
        folder: the checkpoint; the caller keeps it from deletion.
        record: its manifest; or the record of the node's part that the folder holds.
        name: its name in the store.
        sent: remembers what was uploaded.
        progress: called as bytes reach the store, also for those that were there already.
        deadline_s: when to give up.

    Raises:
        CheckpointError: a file has changed since the checkpoint was committed.
        ConflictError: another attempt has claimed the location.
        StorageError: the upload failed, a file cannot be read, or another tool's files have this name.
    """
    part = record if isinstance(record, NodePart) else None
    manifest = manifest_of(record)
    destination = StoreDestination(remote, name, sent=sent, deadline_s=deadline_s)
    if not destination.begin(manifest):
        sent.remove()
        return Published.BEFORE
    marks = NodeMarks(remote.store, name, manifest, deadline_s)
    if part is not None:
        marks.show_life(part.node)
    destination.put_all([SourceFile(entry.path, folder / entry.path, entry) for entry in record.files], progress)
    if part is not None:
        destination.end_uploads(part.paths)
        marks.add(part.node, part.num_nodes)
        if not marks.are_complete():
            return Published.IN_PART
    commit(destination, manifest)
    sent.remove()
    return Published.NOW


def finish_parts(remote: RemoteFolder) -> list[str]:
    """Commit the checkpoints that all nodes of a dead attempt have uploaded and none has committed.

    Args:
        remote: claimed by this attempt.

    Returns:
        The names of the checkpoints that it has committed.
    """
    committed: list[str] = []
    for name, manifest in complete_marks(remote.store, None):
        is_there = remote.bytes_of_manifest(name) == manifest.to_bytes()
        if not is_there and not compare_listing(manifest.files, remote.files_of(name)):
            commit(StoreDestination(remote, name), manifest)
            committed.append(name)
    return committed
