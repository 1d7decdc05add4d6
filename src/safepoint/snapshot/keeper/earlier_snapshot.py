"""The newest snapshot from before a restart of the ranks, as a folder of links that the restarted ranks load.

The keeper, the process of each node that writes snapshots to disk, makes this folder.
"""

import os
import shutil
import tempfile
from operator import attrgetter
from pathlib import Path

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.digest import FileDigester
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, FileEntry
from safepoint.checkpoint.format.verify import read_manifest
from safepoint.errors import ManifestError, SafepointError, SaveError
from safepoint.foundation import files
from safepoint.foundation.temporary_folders.places import private_parent
from safepoint.snapshot.keeper.keeper_state import KeeperState
from safepoint.snapshot.keeper.persist.file_writer import Source, digest_source
from safepoint.snapshot.keeper.persist.snapshot_commit import describe, merge
from safepoint.snapshot.keeper.snapshot_registry import Progress
from safepoint.snapshot.protocol.messages import CheckpointFacts, EarlierSnapshot


class EarlierSnapshotLinks:
    """Finds the newest snapshot of the earlier ranks (those before the restart), and makes the links to its files.

    Args:
        state: the state of the keeper.
        scratch: where the folder of links is made; None for the system's temporary folder.
    """

    def __init__(self, state: KeeperState, scratch: str | None) -> None:
        self._state = state
        self._scratch = scratch
        self._links: Path | None = None

    def find(self) -> EarlierSnapshot | None:
        """Wait until the requested snapshots of the earlier ranks are written. Return the newest complete snapshot.

        The caller holds `KeeperState.changed`. The result is None if no snapshot is complete, if the snapshot cannot
        be used, or if the job has several nodes.
        """
        earlier = self._state.earlier
        if earlier is None:
            return None
        # Wait for the writes even if no snapshot is complete. The rank that asks for the snapshot cleans the output
        # folder after the answer, so the keeper must not write there any more.
        self._state.changed.wait_for(lambda: self._state.is_done(earlier))
        newest = earlier.registry.newest_complete
        if newest is None or newest.facts is None or newest.facts.num_nodes > 1:
            return None  # the memory of this node has only the files of this node's ranks
        is_durable = newest.progress == Progress.DURABLE
        try:
            sources = sorted(merge(earlier.sources(newest)), key=attrgetter("path"))
            parent = self._scratch or private_parent()
            self._links = self._links or Path(tempfile.mkdtemp(prefix="safepoint-recalled-", dir=parent))
            folder = self._links / checkpoint_name(newest.step)
            known = _saved_files(newest.facts) if is_durable else {}
            entries = tuple(_link(source, folder, known.get(source.path)) for source in sources)
            manifest = describe(newest, entries).to_bytes()
            files.write_atomic(folder / MANIFEST_NAME, manifest, durable=False)
        except (OSError, SafepointError, ValueError) as error:
            self._state.reporter.log.warning(
                "the snapshot of step %s in memory cannot be used: %s", newest.step, error
            )
            return None
        return EarlierSnapshot(folder=str(folder), manifest=manifest.decode(), is_durable=is_durable)

    def remove(self) -> None:
        """Remove the links."""
        if self._links is not None:
            shutil.rmtree(self._links, ignore_errors=True)


def _saved_files(facts: CheckpointFacts) -> dict[str, FileEntry]:
    """The files of the checkpoint that a snapshot has become, by path; empty if its manifest cannot be read."""
    try:
        manifest = read_manifest(facts.output.root / checkpoint_name(facts.manifest.step))
    except ManifestError:
        return {}
    return {entry.path: entry for entry in manifest.files}


def _link(source: Source, folder: Path, saved: FileEntry | None) -> FileEntry:
    """Make one file of a complete snapshot in `folder`.

    If the file has a block of shared memory to itself, make a link to this block, through `/proc/<pid>/fd` of this
    process. If the block also holds other files, make a copy.

    Args:
        source: the file.
        folder: where the file is made.
        saved: the file's entry in the manifest of the checkpoint, if the snapshot has become a checkpoint; otherwise
            None.

    Returns:
        The file's entry in the manifest.

    Raises:
        SaveError: the file in memory differs from the file in the checkpoint.
        OSError: the folder cannot be written.
    """
    content = source.view(0, source.size_bytes)
    if saved is not None:
        digester = FileDigester()
        digester.update(content)
        if digester.result().digest != saved.digest:
            raise SaveError(f"{source.path} in memory has another digest than in the checkpoint")
    entry = saved or digest_source(source)
    place = folder / source.path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    if source.has_block_alone:
        place.symlink_to(f"/proc/{os.getpid()}/fd/{source.block.descriptor}")
    else:
        place.write_bytes(content)
    return entry
