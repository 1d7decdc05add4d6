"""The movers of the other nodes, as one of them sees them through the store (docs/adr/0008).

Movers never speak to each other. Each keeps to what it finds: a checkpoint that another one has begun comes first,
for without this node's part it would never be complete; and nobody begins the next one before the last is complete,
so that all turn to the same.
"""

from collections.abc import Callable
from pathlib import Path

from safepoint.checkpoint.format.catalog import step_of
from safepoint.checkpoint.format.node_part import NodePart
from safepoint.checkpoint.remote.publish import Published, Publisher
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.errors import SafepointError, TransientError
from safepoint.foundation import clock

_LOOK_EVERY_S = 1.0
_SHOW_LIFE_EVERY_S = 15.0


class NodeUploaders:
    """Keeps step with the movers of other nodes; does nothing where there are none.

    Args:
        remote: the claimed location.
        publisher: of this node.
        count: how many nodes there are, this one included.
    """

    def __init__(self, remote: RemoteFolder, publisher: Publisher, *, count: int) -> None:
        self._remote = remote
        self._publisher = publisher
        self._count = count
        self._awaited: dict[str, bytes] = {}
        self._look_again_s = 0.0
        self._shown_life_s = 0.0
        self._signs: dict[str, frozenset[tuple[str, str, float]]] = {}

    @property
    def exist(self) -> bool:
        """Whether there are any."""
        return self._count > 1

    @property
    def is_awaiting(self) -> bool:
        """Whether something that this node has sent still lacks their parts."""
        return bool(self._awaited)

    def begun(self, deadline_s: float | None) -> set[str]:
        """The names of what any node has begun to send, and is not superseded."""
        if not self.exist:
            return set()
        try:
            return self._publisher.begun_by_nodes(deadline_s=deadline_s)
        except SafepointError:  # what is sent next will say so
            return set()

    def may_begin(self, deadline_s: float | None) -> bool:
        """Whether the last checkpoint that this node has sent is complete, or superseded; asks once a second."""
        if not self._awaited:
            return True
        if clock.monotonic_s() < self._look_again_s:
            return False
        self._look_again_s = clock.monotonic_s() + _LOOK_EVERY_S
        try:
            newest = max(self._remote.steps(deadline_s=deadline_s), default=-1)
            for name, data in list(self._awaited.items()):
                is_superseded = (step_of(Path(name)) or 0) < newest
                if is_superseded or self._remote.bytes_of_manifest(name, deadline_s=deadline_s) == data:
                    del self._awaited[name]
        except SafepointError:
            return False
        return not self._awaited

    def note(self, name: str, data: bytes, published: Published) -> None:
        """Remember what became of a checkpoint that this node has sent."""
        self._awaited.pop(name, None)  # of the same step with another manifest
        if published is Published.IN_PART:
            self._awaited[name] = data

    def show_life(self, name: str, part: NodePart | None, deadline_s: float | None) -> None:
        """Let the others see that this node goes on sending; cheap to call often."""
        now_s = clock.monotonic_s()
        if part is not None and self.exist and now_s - self._shown_life_s > _SHOW_LIFE_EVERY_S:
            self._shown_life_s = now_s
            self._publisher.show_life(name, part, deadline_s=deadline_s)

    def check_arrived(self, newest: str, *, alive: Callable[[], None], deadline_s: float | None) -> None:
        """See that the newest checkpoint is complete in the store.

        Older ones whose other parts are lost are nobody's loss.

        Args:
            newest: its name.
            alive: called when another node has gone on sending what is awaited since the last look.
            deadline_s: when to give up asking.

        Raises:
            TransientError: it is not yet.
            StorageError: the store cannot be read.
        """
        signs = {name: self._publisher.signs_of_life(name, deadline_s=deadline_s) for name in self._awaited}
        if signs != self._signs:
            self._signs = signs
            alive()
        data = self._awaited.get(newest)
        if data is None:
            return
        if self._remote.bytes_of_manifest(newest, deadline_s=deadline_s) == data:
            del self._awaited[newest]
            return
        raise TransientError(f"{self._remote.store.location.child(newest)} still lacks the parts of other nodes")
