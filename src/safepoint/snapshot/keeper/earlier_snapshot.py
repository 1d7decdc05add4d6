"""The newest snapshot of the ranks before a restart, as a folder of links that the restarted ranks load."""

import os
import shutil
import tempfile
from pathlib import Path

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from safepoint.errors import SafepointError
from safepoint.foundation import files
from safepoint.snapshot.keeper.keeper_state import KeeperState
from safepoint.snapshot.keeper.persist.snapshot_commit import link_files, merge
from safepoint.snapshot.keeper.snapshot_registry import Progress
from safepoint.snapshot.protocol.messages import CheckpointFacts, EarlierSnapshot


class EarlierSnapshotLinks:
    """Makes the links.

    Args:
        state: of the keeper.
        scratch: where the folder of links is made; None for the system's folder.
    """

    def __init__(self, state: KeeperState, scratch: str | None) -> None:
        self._state = state
        self._scratch = scratch
        self._links: Path | None = None

    def find(self) -> EarlierSnapshot | None:
        """Wait until the requested snapshots of the earlier ranks are written; the newest complete one, or None.

        With `KeeperState.changed` held.
        """
        earlier = self._state.earlier
        if earlier is None:
            return None
        # Even if no snapshot is complete: the rank that asks is about to clean the folder that is written to.
        self._state.changed.wait_for(lambda: self._state.is_done(earlier))
        newest = earlier.registry.newest_complete
        if newest is None or newest.facts is None or newest.facts.num_nodes > 1:
            return None  # of several nodes, each has only its own ranks' files in memory
        is_durable = newest.progress == Progress.DURABLE
        try:
            sources = merge(earlier.sources(newest))
            self._links = self._links or Path(tempfile.mkdtemp(prefix="safepoint-recalled-", dir=self._scratch))
            folder = self._links / checkpoint_name(newest.step)
            known = _manifest_of(newest.facts) if is_durable else None
            manifest = link_files(newest, sources, folder, pid=os.getpid(), known=known)
            files.write_atomic(folder / MANIFEST_NAME, manifest.to_bytes(), durable=False)
        except (OSError, SafepointError, ValueError) as error:
            self._state.reporter.log.warning(
                "the snapshot of step %s in memory cannot be used: %s", newest.step, error
            )
            return None
        return EarlierSnapshot(folder=str(folder), manifest=manifest.to_bytes().decode(), is_durable=is_durable)

    def remove(self) -> None:
        """Remove the links."""
        if self._links is not None:
            shutil.rmtree(self._links, ignore_errors=True)


def _manifest_of(facts: CheckpointFacts) -> Manifest | None:
    """The manifest of the checkpoint, if it can be read."""
    path = facts.output.root / checkpoint_name(facts.manifest.step) / MANIFEST_NAME
    try:
        return Manifest.from_bytes(path.read_bytes())
    except (OSError, ValueError, SafepointError):
        return None
