"""What the threads of a keeper share. A keeper is the process of a node that writes snapshots to disk.

The threads share the ranks, the memory and the snapshots of the ranks, and the output folder. A thread that changes
this state holds the lock `KeeperState.changed`, and calls `notify` before it releases the lock. To read a single
flag, or to use `reporter` or `priority`, a thread does not need the lock.
"""

import ctypes
import threading

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.foundation import clock
from safepoint.foundation.channels.channel import Channel
from safepoint.foundation.channels.codec import encode
from safepoint.foundation.events.run_events import SaveSuperseded
from safepoint.foundation.priority import Priority
from safepoint.snapshot.keeper.held_folder import HeldFolder, Reporter
from safepoint.snapshot.keeper.persist.file_writer import STAGED, GivenUpError, Source
from safepoint.snapshot.keeper.persist.snapshot_commit import publish_no_part
from safepoint.snapshot.keeper.snapshot_registry import Snapshot, SnapshotRegistry
from safepoint.snapshot.memory.block import CONTROL_NUMBER, NUM_MARKS, Block
from safepoint.snapshot.protocol.bounded_dict import BoundedDict
from safepoint.snapshot.protocol.messages import (
    BlocksFree,
    CheckpointFacts,
    Hello,
    KeeperMessage,
    Outcome,
    SaveEnded,
    StagedFile,
)

URGENT = frozenset({Trigger.JIT, Trigger.FAILURE})
"""Triggers of saves that ranks wait for."""
_SLOW_BYTES_PER_S = 100e6
OTHER_NODES_S = 15.0
"""How long other nodes may take to notice a failure of this node's ranks."""


class Rank:
    """A rank that is connected to the keeper, or an ended rank whose memory the keeper still holds.

    Args:
        number: the number of the rank in the job.
        channel: the connection to the rank.
    """

    def __init__(self, number: int, channel: Channel) -> None:
        self.number = number
        self.channel = channel
        self.blocks: dict[int, Block] = {}
        self.is_connected = True
        self.has_said_goodbye = False
        self.requests: BoundedDict[int, int] = BoundedDict()
        """Step → the number of this rank's last request to save this step."""
        self.scratch: str | None = None
        """A temporary folder of the rank. The keeper removes it when the rank has ended."""

    def num_copied(self, block: int) -> int:
        """How many bytes of a block (a piece of the rank's shared memory) have been copied.

        Args:
            block: the number of the block.
        """
        control = self.blocks.get(CONTROL_NUMBER)
        if control is None:
            return 0
        return ctypes.c_uint64.from_address(control.address + 8 * (block % NUM_MARKS)).value

    def send(self, message: KeeperMessage) -> None:
        """Send a message, unless the rank has ended."""
        if self.is_connected:
            try:
                self.channel.send(encode(message))
            except OSError:
                return  # the thread that receives from this rank handles the end of the rank

    def send_outcome(self, outcome: Outcome) -> None:
        """Send how a save ended, with the number of the rank's request."""
        self.send(SaveEnded(request=self.requests.get(outcome.step, 0), outcome=outcome))

    def release_memory(self) -> None:
        """Unmap the blocks of this rank."""
        for block in self.blocks.values():
            block.close()
        self.blocks.clear()


class RankGroup:
    """The ranks of this node that were started together.

    Args:
        restart: how many times the ranks have been restarted; 0 for the first start.
        num_ranks: how many ranks this node has.
    """

    def __init__(self, restart: int, num_ranks: int) -> None:
        self.restart = restart
        self.registry = SnapshotRegistry(num_ranks)
        self.ranks: dict[int, Rank] = {}
        self.has_failed = False
        """Whether a rank has ended without `Goodbye`."""
        self.waits_to_leave = False
        """Whether the ranks wait for a save before they end."""
        self.begun_s: BoundedDict[int, float] = BoundedDict()
        """Step → when the save of this step began."""
        self.last_outcome: Outcome | None = None
        self.failed_s: float | None = None
        """When the first rank failed, on this node or another one; None as long as no rank has failed."""
        self.left_s: float | None = None
        """When the ranks left the output folder without `CloseFolder`; None once its last write has ended."""
        self.is_watching = False
        """Whether a thread watches for failures of the ranks of other nodes (`rescue.watch_others`)."""
        self.is_rescuing = False
        """Whether a thread agrees with the keepers of other nodes on the snapshot to write (`rescue.rescue`)."""
        self.is_rescued = False
        """Whether the rescue has ended. After that, `rescued_step` does not change any more."""
        self.rescued_step: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether all ranks of the group have ended."""
        return not any(rank.is_connected for rank in self.ranks.values())

    def has_waited_enough(self, num_bytes: int = 0) -> bool:
        """Whether ranks have failed or have left the folder, and the other nodes had time to notice it and to write
        `num_bytes` each."""
        since_s = self.left_s if self.failed_s is None else self.failed_s
        patience_s = OTHER_NODES_S + num_bytes / _SLOW_BYTES_PER_S
        return since_s is not None and clock.monotonic_s() > since_s + patience_s

    def send_outcome(self, outcome: Outcome) -> None:
        """Send every rank how a save ended."""
        for rank in self.ranks.values():
            rank.send_outcome(outcome)

    def give_up(self, snapshot: Snapshot, error: str) -> None:
        """Report to all nodes and ranks that a requested snapshot will not be written, and why."""
        publish_no_part(snapshot.facts, error)
        self.send_outcome(Outcome(step=snapshot.step, error=error))

    def sources(self, snapshot: Snapshot) -> dict[int, list[Source]]:
        """The files of a snapshot, by rank."""
        return {
            rank: [self._source(snapshot, rank, file, part.files) for file in part.files]
            for rank, part in snapshot.parts.items()
        }

    def _source(self, snapshot: Snapshot, number: int, file: StagedFile, others: tuple[StagedFile, ...]) -> Source:
        rank, part = self.ranks[number], snapshot.parts[number]

        def available() -> int:
            if part.is_staged and snapshot.is_intact:
                return STAGED
            if not snapshot.is_intact or not rank.is_connected or snapshot.parts.get(number) is not part:
                raise GivenUpError(
                    f"the part of rank {number} of the snapshot of step {snapshot.step} was not copied to memory "
                    "completely"
                )
            return rank.num_copied(file.block)

        return Source(
            path=file.path,
            block=rank.blocks[file.block],
            offset=file.offset,
            size_bytes=file.size_bytes,
            archives=file.archives,
            has_block_alone=file.offset == 0 and sum(other.block == file.block for other in others) == 1,
            available=available,
        )


class KeeperState:
    """The state of one keeper.

    Args:
        reporter: writes events and log lines.
    """

    def __init__(self, reporter: Reporter) -> None:
        self.changed = threading.Condition()
        self.reporter = reporter
        self.folder = HeldFolder(reporter)
        self.priority = Priority()
        self.current: RankGroup | None = None
        """The ranks of the newest start or restart."""
        self.earlier: RankGroup | None = None
        """The ranks before the last restart, while their memory may be needed."""
        self.is_writing = False
        self.is_closing = False
        """Whether a rank waits until everything is written."""

    def admit(self, channel: Channel, hello: Hello) -> tuple[RankGroup, Rank]:
        """Register a rank, and return its group and the rank. The first rank that connects after a restart makes the
        previous ranks `earlier`. If there are `earlier` ranks already, this call first waits until their saves are
        written."""
        with self.changed:
            while (group := self.current) is None or hello.restart > group.restart or group.is_over:
                self.forget_earlier()
                if self.current is group:  # if False, the thread of another rank has replaced `current` already
                    self.earlier, self.current = group, RankGroup(hello.restart, hello.num_ranks)
                    group = self.current
                    break
            if hello.rank in group.ranks:  # the rank connects again, and will send its blocks again
                group.registry.remove_rank(hello.rank)
            rank = group.ranks[hello.rank] = Rank(hello.rank, channel)
            return group, rank

    def forget_earlier(self) -> None:
        """Wait until the earlier ranks' requested snapshots are written. Free their memory. The caller holds
        `changed`."""
        while (earlier := self.earlier) is not None:
            self.changed.wait_for(lambda earlier=earlier: self.earlier is not earlier or self.is_done(earlier))
            if self.earlier is earlier:
                for rank in earlier.ranks.values():
                    rank.release_memory()
                self.earlier = None

    def next_to_write(self) -> tuple[RankGroup, Snapshot, CheckpointFacts] | None:
        """The next snapshot to write, with its ranks and facts; None if there is none. Snapshots of earlier ranks
        come first."""
        for group in (self.earlier, self.current):
            snapshot = group.registry.next_to_write() if group is not None else None
            if group is not None and snapshot is not None and snapshot.facts is not None:
                return group, snapshot, snapshot.facts
        return None

    def is_idle(self, group: RankGroup) -> bool:
        """Whether nothing is being written, and no snapshot of these ranks waits to be written."""
        return not self.is_writing and group.registry.next_to_write() is None

    def is_done(self, group: RankGroup) -> bool:
        """Whether these ranks have ended, and all their requested snapshots are written."""
        return group.is_over and not group.is_rescuing and self.is_idle(group)

    def may_end(self) -> bool:
        """Whether the keeper has no more work."""
        return not self.is_writing and all(
            self.is_done(group) for group in (self.current, self.earlier) if group is not None
        )

    def is_urgent(self, group: RankGroup) -> bool:
        """Whether a process waits until a snapshot is written. If so, the keeper writes at normal priority."""
        return (
            self.is_closing
            or group.has_failed
            or group.waits_to_leave
            or any(one.is_requested and one.trigger in URGENT and one.is_open for one in group.registry.snapshots)
        )

    def notify(self, group: RankGroup) -> None:
        """Report superseded saves and blocks that are free now, and wake waiting threads.

        Call it after every change of the state, with `changed` held.
        """
        for snapshot in group.registry.take_superseded():
            newest = group.registry.newest_complete
            by = newest.step if newest is not None else snapshot.step
            superseded = SaveSuperseded(step=snapshot.step, trigger=str(snapshot.trigger), by=by)
            self.reporter.report_superseded(superseded)
            group.give_up(snapshot, f"superseded by step {by} before its writing began")
        for rank in group.ranks.values():
            free = group.registry.newly_free(rank.number, set(rank.blocks) - {CONTROL_NUMBER})
            if free:
                rank.send(BlocksFree(numbers=tuple(free)))
        if self.is_urgent(group):
            self.priority.restore()
        self.changed.notify_all()
