"""Which snapshots there are, which one is written next, and which memory may be overwritten.

This module uses no sockets, files or threads. The files of a snapshot lie in *blocks* of shared memory. The keeper is
the process of each node that writes snapshots to disk. Each rank allocates blocks and *lends* them to the keeper: it
sends their descriptors to the keeper, so that the keeper can read the blocks. A snapshot is *complete* when every
rank has staged its part, that is, has copied all its files into memory. The newest complete snapshot stays in memory
until it is durable, or until its write has failed.
"""

import enum
from dataclasses import dataclass, field

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.snapshot.protocol.bounded_dict import BoundedDict
from safepoint.snapshot.protocol.messages import CheckpointFacts, StagedFile


class Progress(enum.Enum):
    """How far a snapshot is from being a checkpoint."""

    WAITING = "waiting"
    WRITING = "writing"
    DURABLE = "durable"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class Part:
    """One rank's part of a snapshot."""

    files: tuple[StagedFile, ...]
    is_staged: bool = False

    @property
    def blocks(self) -> set[int]:
        """The numbers of the blocks that hold its files."""
        return {file.block for file in self.files}


@dataclass(slots=True, kw_only=True, eq=False)
class Snapshot:
    """The snapshot of one step: the parts of all ranks of the node.

    Two snapshots are equal only if they are the same object, because several snapshots may have the same step.
    """

    step: int
    parts: dict[int, Part] = field(default_factory=dict[int, Part])
    trigger: Trigger = Trigger.PERIODIC
    is_requested: bool = False
    """Whether to make a checkpoint of this snapshot."""
    facts: CheckpointFacts | None = None
    progress: Progress = Progress.WAITING
    is_intact: bool = True
    """False if a rank has begun to overwrite its part in memory, or if a rank will not stage its part."""
    num_ranks: int = 1
    number: int = 0
    """The number in `BeginSnapshot`. If the ranks begin the snapshot of this step again, the new number is higher."""

    @property
    def has_begun(self) -> bool:
        """Whether every rank has begun its part."""
        return len(self.parts) == self.num_ranks

    @property
    def num_bytes(self) -> int:
        """The size of the files of all parts that have begun."""
        return sum(file.size_bytes for part in self.parts.values() for file in part.files)

    @property
    def is_open(self) -> bool:
        """Whether the snapshot is neither durable nor failed."""
        return self.progress in {Progress.WAITING, Progress.WRITING}

    @property
    def is_complete(self) -> bool:
        """Whether every rank has staged its part, and no rank has overwritten its part since."""
        return self.has_begun and self.is_intact and all(part.is_staged for part in self.parts.values())


class SnapshotRegistry:
    """The snapshots that the ranks take between one start and the next restart.

    A snapshot is *registered* until it is superseded, cancelled or overwritten, or until a new snapshot of its step
    replaces it. The registry also knows the snapshot that is being written, until `written` is called, even if this
    snapshot is no longer registered.

    Args:
        num_ranks: how many ranks this node has.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._snapshots: dict[int, Snapshot] = {}
        self._cancelled: BoundedDict[tuple[int, int], bool] = BoundedDict()
        """Snapshots, by step and number, that a rank will not complete."""
        self._writing: Snapshot | None = None
        """The snapshot that is being written. It may be registered or not."""
        self._reported_free: set[tuple[int, int]] = set()
        """(rank, block) of each block that its rank knows to be free: the block was reported as free, or the rank has
        just lent it."""
        self._in_use: set[tuple[int, int]] = set()
        """(rank, block) of each block that its rank is about to overwrite for a snapshot that has not begun."""

    @property
    def snapshots(self) -> list[Snapshot]:
        """The registered snapshots, newest first."""
        return [self._snapshots[step] for step in sorted(self._snapshots, reverse=True)]

    @property
    def _in_memory(self) -> list[Snapshot]:
        """The registered snapshots, newest first; then the one that is being written, if it is not registered."""
        writing = self._writing
        is_separate = writing is not None and self._snapshots.get(writing.step) is not writing
        return [*self.snapshots, writing] if writing is not None and is_separate else self.snapshots

    @property
    def newest_complete(self) -> Snapshot | None:
        """The newest complete snapshot; None if no snapshot is complete."""
        return next((snapshot for snapshot in self.snapshots if snapshot.is_complete), None)

    def find(self, step: int) -> Snapshot | None:
        """The snapshot of `step`; None if there is none."""
        return self._snapshots.get(step)

    def add_block(self, rank: int, block: int) -> None:
        """Register a new block of memory that a rank has lent to the keeper.

        The block is free; the rank needs no message `BlocksFree` about it.
        """
        self._reported_free.add((rank, block))

    def clear(self) -> None:
        """Remove all snapshots from the register. A write in progress goes on, and its memory is free at its end."""
        self._snapshots.clear()
        self._cancelled.clear()

    def begin(
        self,
        rank: int,
        step: int,
        files: tuple[StagedFile, ...],
        *,
        trigger: Trigger,
        is_requested: bool,
        facts: CheckpointFacts | None = None,
        number: int = 0,
    ) -> Snapshot:
        """Register that a rank begins its part of a snapshot. `BeginSnapshot` describes the arguments.

        Returns:
            The snapshot. If a rank has cancelled the snapshot, or has begun a later snapshot of the step, the result
            is a new object that is neither registered nor intact.
        """
        part = Part(files=files)
        self._overwrite(rank, part.blocks)
        self._in_use -= {(rank, block) for block in part.blocks}
        snapshot = self._snapshots.get(step)
        if (step, number) in self._cancelled or (snapshot is not None and number < snapshot.number):
            return Snapshot(step=step, num_ranks=self.num_ranks, is_intact=False)
        if snapshot is not None and (number > snapshot.number or rank in snapshot.parts):
            snapshot = None  # this rank begins the snapshot of the step again; the other ranks will do so too
        if snapshot is None:
            snapshot = self._snapshots[step] = Snapshot(step=step, num_ranks=self.num_ranks, number=number)
        snapshot.parts[rank] = part
        snapshot.trigger = trigger
        snapshot.is_requested = snapshot.is_requested or is_requested
        snapshot.facts = facts or snapshot.facts
        return snapshot

    def overwrite(self, rank: int, blocks: set[int]) -> None:
        """Register that a rank is about to overwrite these blocks; they are not free until `begin` is called."""
        self._in_use |= {(rank, block) for block in blocks}
        self._overwrite(rank, blocks)

    def _overwrite(self, rank: int, blocks: set[int]) -> None:
        self._reported_free -= {(rank, block) for block in blocks}
        for snapshot in self._in_memory:
            part = snapshot.parts.get(rank)
            if part is not None and part.blocks & blocks:
                self._spoil(snapshot)

    def _spoil(self, snapshot: Snapshot) -> None:
        snapshot.is_intact = False
        if snapshot is not self._writing:
            del self._snapshots[snapshot.step]

    def staged(self, rank: int, step: int) -> None:
        """Register that a rank has staged its part of the snapshot of `step` that it has begun last."""
        # The registered snapshot comes first. If a rank has a part of this snapshot, it has begun this part last.
        for snapshot in self._in_memory:
            if snapshot.step == step and rank in snapshot.parts:
                snapshot.parts[rank].is_staged = True
                return

    def cancel(self, step: int, number: int = 0) -> None:
        """Register that a rank will not stage its part. Other ranks may still begin their parts.

        Args:
            step: the step of the snapshot.
            number: the number of the snapshot.
        """
        self._cancelled[step, number] = True
        for snapshot in self._in_memory:
            if (snapshot.step, snapshot.number) == (step, number):
                self._spoil(snapshot)

    def remove_rank(self, rank: int) -> None:
        """Cancel the snapshots of a rank whose memory the keeper can no longer read."""
        for snapshot in self._in_memory:
            if rank in snapshot.parts:
                self._cancelled[snapshot.step, snapshot.number] = True
                self._spoil(snapshot)
        self._reported_free = {one for one in self._reported_free if one[0] != rank}
        self._in_use = {one for one in self._in_use if one[0] != rank}

    def cancel_incomplete(self) -> None:
        """Cancel the snapshots that are not complete, because the ranks have ended."""
        for snapshot in self._in_memory:
            if not snapshot.is_complete:
                self._cancelled[snapshot.step, snapshot.number] = True
                self._spoil(snapshot)

    def request(self, step: int, trigger: Trigger) -> bool:
        """Request a checkpoint of the snapshot of `step`; False if there is no intact snapshot."""
        snapshot = self._snapshots.get(step)
        if snapshot is None or not snapshot.is_intact:
            return False
        if snapshot.progress == Progress.FAILED:
            snapshot.progress = Progress.WAITING
        if not snapshot.is_requested:
            snapshot.trigger = trigger
        snapshot.is_requested = True
        return True

    def next_to_write(self) -> Snapshot | None:
        """The newest requested snapshot that all ranks have begun, that is intact, and whose write has not failed.

        None if there is no such snapshot, or if it is durable or being written already.
        """
        for snapshot in self.snapshots:
            is_open = snapshot.is_requested and snapshot.has_begun and snapshot.is_intact
            if is_open and snapshot.progress != Progress.FAILED:
                return snapshot if snapshot.progress == Progress.WAITING else None
        return None

    def take_superseded(self) -> list[Snapshot]:
        """Remove and return the requested snapshots that a newer complete snapshot, also requested, has replaced."""
        newest = self.newest_complete
        if newest is None or not newest.is_requested:
            return []
        found = [
            snapshot
            for snapshot in self.snapshots
            if snapshot.step < newest.step and snapshot.is_requested and snapshot.progress == Progress.WAITING
        ]
        for snapshot in found:
            del self._snapshots[snapshot.step]
        return found

    def writing(self, snapshot: Snapshot) -> None:
        """Register that the write of a snapshot begins. Only one snapshot is written at a time."""
        assert self._writing is None
        snapshot.progress = Progress.WRITING
        self._writing = snapshot

    def written(self, snapshot: Snapshot, *, is_durable: bool) -> bool:
        """Register that the write of a snapshot has ended.

        Return False if the snapshot is no longer registered: `clear` was called meanwhile, or a rank has begun a new
        snapshot of this step. Then no rank waits for the outcome of the write.
        """
        assert self._writing is snapshot
        self._writing = None
        snapshot.progress = Progress.DURABLE if is_durable else Progress.FAILED
        if self._snapshots.get(snapshot.step) is not snapshot:
            return False
        if not snapshot.is_intact:
            del self._snapshots[snapshot.step]
        return True

    def is_free(self, rank: int, block: int) -> bool:
        """Whether a rank may overwrite its block."""
        if (rank, block) in self._in_use:
            return False
        newest = self.newest_complete
        for snapshot in self._in_memory:
            part = snapshot.parts.get(rank)
            if part is None or block not in part.blocks:
                continue
            if snapshot is self._writing or not snapshot.is_complete:
                return False
            if snapshot.progress == Progress.WAITING and (snapshot is newest or snapshot.is_requested):
                return False
        return True

    def newly_free(self, rank: int, blocks: set[int]) -> list[int]:
        """The numbers in `blocks` whose blocks have become free since the last call."""
        free = [b for b in sorted(blocks) if (rank, b) not in self._reported_free and self.is_free(rank, b)]
        self._reported_free |= {(rank, block) for block in free}
        return free
