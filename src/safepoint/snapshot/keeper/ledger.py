"""The keeper's book: which snapshots there are, what is to be written next, and which memory may be overwritten.

It knows no sockets, files or threads. A snapshot is *complete* when every rank has staged its part. The newest
complete one is never given up before it is durable, unless writing it has failed.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.snapshot.images.zip_archive import Archive
from safepoint.snapshot.protocol.recent import Recent


class Progress(enum.Enum):
    """How far a snapshot is from being a checkpoint."""

    WAITING = "waiting"
    WRITING = "writing"
    DURABLE = "durable"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """A file of a snapshot: where in a rank's memory it is.

    Args:
        path: relative to the checkpoint.
        block: the rank's block.
        offset: in the block; a multiple of the page size for large files.
        size_bytes: of the file.
        archives: see `Image`.
    """

    path: str
    block: int
    offset: int
    size_bytes: int
    archives: tuple[Archive, ...] = ()

    @classmethod
    def of(cls, record: dict[str, Any]) -> "StagedFile":
        """From a message."""
        return cls(
            path=str(record["path"]),
            block=int(record["block"]),
            offset=int(record["offset"]),
            size_bytes=int(record["size_bytes"]),
            archives=tuple(Archive(*map(int, archive)) for archive in record["archives"]),
        )


@dataclass(slots=True, kw_only=True)
class Part:
    """One rank's part of a snapshot."""

    files: tuple[StagedFile, ...]
    is_staged: bool = False

    @property
    def blocks(self) -> set[int]:
        """The blocks that it lies in."""
        return {file.block for file in self.files}


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """One step's snapshot, over all ranks of the node."""

    step: int
    parts: dict[int, Part] = field(default_factory=dict[int, Part])
    trigger: Trigger = Trigger.PERIODIC
    is_wanted: bool = False
    """Whether it is to be made durable."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the first rank says of the checkpoint that it is to become."""
    progress: Progress = Progress.WAITING
    is_intact: bool = True
    """Whether no rank has begun to use its memory for another one."""
    num_ranks: int = 1
    number: int = 0
    """Which beginning of the step it is."""

    @property
    def has_begun(self) -> bool:
        """Whether every rank has said what it will stage."""
        return len(self.parts) == self.num_ranks

    @property
    def num_bytes(self) -> int:
        """Of all files that were begun."""
        return sum(file.size_bytes for part in self.parts.values() for file in part.files)

    @property
    def is_open(self) -> bool:
        """Whether it is neither durable nor failed."""
        return self.progress in {Progress.WAITING, Progress.WRITING}

    @property
    def is_complete(self) -> bool:
        """Whether every rank has staged its part, and none has overwritten it."""
        return self.has_begun and self.is_intact and all(part.is_staged for part in self.parts.values())


class Ledger:
    """The snapshots of one start of the ranks.

    Args:
        num_ranks: of this node.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._snapshots: dict[int, Snapshot] = {}
        self._given_up: Recent[tuple[int, int], bool] = Recent()
        """Snapshots, by step and number, of which a part will not come."""
        self._replaced: list[Snapshot] = []
        """Being written while the same step was started again."""
        self._reported_free: set[tuple[int, int]] = set()
        self._in_use: set[tuple[int, int]] = set()

    @property
    def snapshots(self) -> list[Snapshot]:
        """All that are in the book, newest first."""
        return [self._snapshots[step] for step in sorted(self._snapshots, reverse=True)]

    @property
    def newest_complete(self) -> Snapshot | None:
        """The newest one that can be made durable or loaded."""
        return next((snapshot for snapshot in self.snapshots if snapshot.is_complete), None)

    def find(self, step: int) -> Snapshot | None:
        """The snapshot of `step`."""
        return self._snapshots.get(step)

    def lend(self, rank: int, block: int) -> None:
        """Rank `rank` has a new block: free, as it knows; by the time it would hear so it may be using it."""
        self._reported_free.add((rank, block))

    def forget(self) -> None:
        """Nothing of what is in the book is needed any more."""
        self._snapshots.clear()
        self._given_up.clear()

    def begin(
        self,
        rank: int,
        step: int,
        files: tuple[StagedFile, ...],
        *,
        trigger: Trigger,
        is_wanted: bool,
        facts: Mapping[str, Any] | None = None,
        number: int = 0,
    ) -> Snapshot:
        """Rank `rank` begins to fill its memory with its part of `step`.

        Args:
            rank: whose part.
            step: of the snapshot.
            files: of this part.
            trigger: why.
            is_wanted: whether it is to be made durable.
            facts: see `Snapshot`.
            number: of this beginning, the same on all ranks, rising: a step may be begun several times.

        Returns:
            The snapshot; one that is not in the book, and not intact, when another rank has given the step up.
        """
        part = Part(files=files)
        self._overwrite(rank, part.blocks)
        self._in_use -= {(rank, block) for block in part.blocks}
        snapshot = self._snapshots.get(step)
        if (step, number) in self._given_up or (snapshot is not None and number < snapshot.number):
            return Snapshot(step=step, num_ranks=self.num_ranks, is_intact=False)
        if snapshot is not None and (number > snapshot.number or rank in snapshot.parts):
            # The step is started again, by the other ranks next.
            if snapshot.progress == Progress.WRITING:
                self._replaced.append(snapshot)
            snapshot = None
        if snapshot is None:
            snapshot = self._snapshots[step] = Snapshot(step=step, num_ranks=self.num_ranks, number=number)
        if snapshot.progress != Progress.WRITING:
            snapshot.progress = Progress.WAITING
        snapshot.is_intact = True
        snapshot.parts[rank] = part
        snapshot.trigger = trigger
        snapshot.is_wanted = snapshot.is_wanted or is_wanted
        snapshot.facts = facts or snapshot.facts
        return snapshot

    def use(self, rank: int, blocks: set[int]) -> None:
        """Rank `rank` is about to overwrite these blocks, and will say with what."""
        self._in_use |= {(rank, block) for block in blocks}
        self._overwrite(rank, blocks)

    def _overwrite(self, rank: int, blocks: set[int]) -> None:
        self._reported_free -= {(rank, block) for block in blocks}
        for snapshot in list(self._snapshots.values()):
            part = snapshot.parts.get(rank)
            if part is not None and part.blocks & blocks:
                snapshot.is_intact = False
                if snapshot.progress != Progress.WRITING:
                    del self._snapshots[snapshot.step]

    def staged(self, rank: int, step: int) -> None:
        """Rank `rank` has filled its memory."""
        snapshot = self._snapshots.get(step)
        if snapshot is not None and rank in snapshot.parts:
            snapshot.parts[rank].is_staged = True

    def give_up(self, step: int, number: int | None = None) -> None:
        """A part of the snapshot will not come; ranks that have not begun with theirs may still be about to.

        Args:
            step: of the snapshot.
            number: which beginning of it; None for the one that is in the book.
        """
        snapshot = self._snapshots.get(step)
        if number is not None:
            self._given_up[step, number] = True
        if snapshot is not None and number in {None, snapshot.number}:
            self._given_up[step, snapshot.number] = True
            snapshot.is_intact = False
            if snapshot.progress != Progress.WRITING:
                del self._snapshots[step]

    def disown(self, rank: int) -> None:
        """The memory of `rank` is not known here any more, nor what lies in it."""
        for snapshot in self.snapshots:
            if rank in snapshot.parts:
                self.give_up(snapshot.step)
        self._reported_free = {released for released in self._reported_free if released[0] != rank}
        self._in_use = {used for used in self._in_use if used[0] != rank}

    def give_up_unfinished(self) -> None:
        """No rank stages any more: what is not complete never will be."""
        for snapshot in self.snapshots:
            if not snapshot.is_complete:
                self.give_up(snapshot.step)

    def want(self, step: int, trigger: Trigger) -> bool:
        """Make the snapshot of `step` durable; False when there is none."""
        snapshot = self._snapshots.get(step)
        if snapshot is None or not snapshot.is_intact:
            return False
        if snapshot.progress == Progress.FAILED:
            snapshot.progress = Progress.WAITING
        if not snapshot.is_wanted:
            snapshot.trigger = trigger
        snapshot.is_wanted = True
        return True

    def next_to_write(self) -> Snapshot | None:
        """The newest one that is wanted and neither written nor failed; all ranks have at least begun with it."""
        for snapshot in self.snapshots:
            is_open = snapshot.is_wanted and snapshot.has_begun and snapshot.is_intact
            if is_open and snapshot.progress != Progress.FAILED:
                return snapshot if snapshot.progress == Progress.WAITING else None
        return None

    def take_superseded(self) -> list[Snapshot]:
        """Remove those that were wanted, wait, and will not be written because a newer one is complete."""
        newest = self.newest_complete
        found: list[Snapshot] = []
        for snapshot in self.snapshots:
            is_older = newest is not None and snapshot.step < newest.step and newest.is_wanted
            if is_older and snapshot.is_wanted and snapshot.progress == Progress.WAITING:
                del self._snapshots[snapshot.step]
                found.append(snapshot)
        return found

    def written(self, snapshot: Snapshot, *, is_durable: bool) -> bool:
        """Writing `snapshot` has ended; False when it has been replaced by another one of its step meanwhile."""
        snapshot.progress = Progress.DURABLE if is_durable else Progress.FAILED
        if snapshot in self._replaced:
            self._replaced.remove(snapshot)
            return False
        if not snapshot.is_intact:
            del self._snapshots[snapshot.step]
        return True

    def is_free(self, rank: int, block: int) -> bool:
        """Whether `rank` may overwrite its `block`."""
        if (rank, block) in self._in_use:
            return False
        newest = self.newest_complete
        for snapshot in (*self._snapshots.values(), *self._replaced):
            part = snapshot.parts.get(rank)
            if part is None or block not in part.blocks:
                continue
            if snapshot.progress == Progress.WRITING or not snapshot.is_complete:
                return False
            if snapshot is newest and snapshot.progress == Progress.WAITING:
                return False
            if snapshot.is_wanted and snapshot.progress == Progress.WAITING:
                return False
        return True

    def newly_free(self, rank: int, blocks: set[int]) -> list[int]:
        """Those of `blocks` that have become free since the last call."""
        free = [block for block in sorted(blocks) if self.is_free(rank, block)]
        released = [block for block in free if (rank, block) not in self._reported_free]
        self._reported_free |= {(rank, block) for block in released}
        return released
