"""What the last start of the ranks has left in memory, as a folder of links for the ranks that begin anew."""

import os
import shutil
import tempfile
from pathlib import Path

from safepoint.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from safepoint.errors import SafepointError
from safepoint.foundation import files
from safepoint.snapshot.keeper.ledger import Progress, Snapshot
from safepoint.snapshot.keeper.persist.snapshot_commit import link_files, merge
from safepoint.snapshot.keeper.shared_state import SharedState
from safepoint.snapshot.protocol.channel import Message


class Recall:
    """Hands out the newest snapshot of the earlier start.

    Args:
        kept: what is kept.
        scratch: where the folder of links is made; None for the system's.
    """

    def __init__(self, kept: SharedState, scratch: str | None) -> None:
        self._kept = kept
        self._scratch = scratch
        self._links: Path | None = None

    def answer(self) -> Message:
        """The answer to a rank that asks; its `folder` is empty where nothing is left.

        With `Kept.changed` held; it waits until what is wanted of the earlier start is written.
        """
        nothing: Message = {"type": "answer", "folder": "", "manifest": ""}
        earlier = self._kept.earlier
        if earlier is None:
            return nothing
        # Also where nothing is recalled: whoever asks is going to clean the folder that is being written to.
        self._kept.changed.wait_for(lambda: self._kept.is_done(earlier))
        if earlier.facts is None or earlier.facts.num_nodes > 1:
            return nothing  # on several nodes, each has only its own ranks' files in memory
        newest = earlier.ledger.newest_complete
        if newest is None or not newest.facts:
            return nothing
        try:
            sources = merge(earlier.sources(newest))
            self._links = self._links or Path(tempfile.mkdtemp(prefix="safepoint-recalled-", dir=self._scratch))
            folder = self._links / f"checkpoint-{newest.step}"
            manifest = link_files(newest, sources, folder, pid=os.getpid(), known=_manifest_of(newest))
            files.write_atomic(folder / MANIFEST_NAME, manifest.to_bytes(), durable=False)
        except (OSError, SafepointError, ValueError) as error:
            self._kept.reporting.log.warning(
                "the snapshot of step %s in memory cannot be used: %s", newest.step, error
            )
            return nothing
        is_durable = newest.progress == Progress.DURABLE
        text = manifest.to_bytes().decode()
        return {"type": "answer", "folder": str(folder), "manifest": text, "is_durable": is_durable}

    def remove(self) -> None:
        """Remove the links."""
        if self._links is not None:
            shutil.rmtree(self._links, ignore_errors=True)


def _manifest_of(snapshot: Snapshot) -> Manifest | None:
    """The manifest of the checkpoint that it has become."""
    if snapshot.progress != Progress.DURABLE:
        return None
    path = Path(snapshot.facts["folder"]) / f"checkpoint-{snapshot.step}" / MANIFEST_NAME
    try:
        return Manifest.from_bytes(path.read_bytes())
    except (OSError, ValueError, SafepointError):
        return None
