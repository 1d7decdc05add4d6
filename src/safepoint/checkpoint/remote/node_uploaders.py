"""What an uploader knows of the uploaders of other nodes, through the store (docs/adr/0008).

Uploaders never talk to each other. A checkpoint that another node has begun comes first, because without this node's
part it never becomes complete. No node begins the next checkpoint before the last one is complete, so that all upload
the same one.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

from safepoint.checkpoint.commit import Record
from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.format.manifest import Manifest
from safepoint.checkpoint.format.node_part import NodePart
from safepoint.checkpoint.remote.node_marks import NodeMarks, begun_by_nodes, signs_of_life
from safepoint.checkpoint.remote.publish import Published
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.errors import SafepointError, StorageError, TransientError
from safepoint.foundation import clock

_LOOK_EVERY_S = 1.0
_SHOW_LIFE_EVERY_S = 15.0


class NodeUploaders:
    """The uploaders of all nodes; with one node, nothing ever waits.

    Args:
        remote: the claimed location.
        count: how many nodes there are, this one included.
    """

    def __init__(self, remote: RemoteFolder, *, count: int) -> None:
        self._remote = remote
        self._count = count
        self._awaited: dict[str, Manifest] = {}
        self._look_again_s = 0.0
        self._shown_life_s = 0.0
        self._signs: dict[str, frozenset[tuple[str, str, float]]] = {}

    @property
    def exist(self) -> bool:
        """Whether there are other nodes."""
        return self._count > 1

    @property
    def is_awaiting(self) -> bool:
        """Whether a checkpoint that this node has sent still lacks their parts."""
        return bool(self._awaited)

    def begun(self, deadline_s: float | None) -> set[str]:
        """The names of what any node has begun to send, and is not superseded; none while the store fails."""
        with contextlib.suppress(SafepointError):
            if self.exist:
                return begun_by_nodes(self._remote, deadline_s)
        return set()

    def may_begin(self, deadline_s: float | None) -> bool:
        """Whether the last checkpoint that this node has sent is complete, or superseded; asks once a second."""
        if not self._awaited:
            return True
        if clock.monotonic_s() < self._look_again_s:
            return False
        self._look_again_s = clock.monotonic_s() + _LOOK_EVERY_S
        with contextlib.suppress(SafepointError):
            newest = max(self._remote.steps(deadline_s=deadline_s), default=-1)
            for name in list(self._awaited):
                if (step_of(Path(name)) or 0) < newest:
                    del self._awaited[name]
                else:
                    self._is_complete(name, deadline_s)
            return not self._awaited
        return False

    def _is_complete(self, name: str, deadline_s: float | None) -> bool:
        """Whether it is committed with this node's manifest, or was not awaited."""
        manifest = self._awaited.get(name)
        if manifest is None:
            return True
        is_complete = self._remote.bytes_of_manifest(name, deadline_s=deadline_s) == manifest.to_bytes()
        if is_complete:
            del self._awaited[name]
        return is_complete

    def note(self, name: str, manifest: Manifest, published: Published) -> None:
        """Remember what became of a checkpoint that this node has sent."""
        self._awaited.pop(name, None)  # of the same step with another manifest
        if published is Published.IN_PART:
            self._awaited[name] = manifest

    def show_life(self, name: str, record: Record, deadline_s: float | None) -> None:
        """Let the other nodes see that this one is still uploading; cheap to call often."""
        now_s = clock.monotonic_s()
        if isinstance(record, NodePart) and self.exist and now_s - self._shown_life_s > _SHOW_LIFE_EVERY_S:
            self._shown_life_s = now_s
            with contextlib.suppress(StorageError):
                NodeMarks(self._remote.store, name, record.manifest, deadline_s).show_life(record.node)

    def check_complete(self, newest: str, *, alive: Callable[[], None], deadline_s: float | None) -> None:
        """Check that the newest checkpoint is complete in the store; older ones do not matter any more.

        Args:
            newest: its name.
            alive: called when another node has gone on sending what is awaited since the last call.
            deadline_s: when to give up on the store.

        Raises:
            TransientError: it is not yet.
            StorageError: the store cannot be read.
        """
        signs = {name: signs_of_life(self._remote.store, name, deadline_s) for name in self._awaited}
        if signs != self._signs:
            self._signs = signs
            alive()
        if not self._is_complete(newest, deadline_s):
            raise TransientError(f"{self._remote.where(newest)} still lacks the parts of other nodes")
