"""The ranks that a keeper serves: their connections, their memory, and their snapshots."""

import ctypes

from safepoint.foundation import clock
from safepoint.snapshot.keeper.persist.file_writer import STAGED, GivenUpError, Source
from safepoint.snapshot.keeper.snapshot_registry import Snapshot, SnapshotRegistry, StagedFile
from safepoint.snapshot.memory.block import Block
from safepoint.snapshot.protocol.bounded_dict import BoundedDict
from safepoint.snapshot.protocol.channel import Channel
from safepoint.snapshot.protocol.memory_layout import CONTROL_NUMBER, NUM_MARKS
from safepoint.snapshot.protocol.messages import CheckpointFacts, KeeperMessage, Outcome, SaveEnded, encode

_SLOW_BYTES_PER_S = 100e6
OTHER_NODES_S = 15.0
"""How long after a failure other nodes may take to notice it too."""


class Rank:
    """One connected rank, or one that has gone and left its memory.

    Args:
        number: of the rank, in the job.
        channel: to it.
    """

    def __init__(self, number: int, channel: Channel) -> None:
        self.number = number
        self.channel = channel
        self.blocks: dict[int, Block] = {}
        self.is_connected = True
        self.has_said_goodbye = False
        self.requests: BoundedDict[int, int] = BoundedDict()
        """By step: the number of its last request about it."""
        self.scratch: str | None = None
        """A temporary folder of the rank, which is removed when it has ended."""

    @property
    def block_numbers(self) -> set[int]:
        """The numbers of the blocks that snapshots lie in."""
        return set(self.blocks) - {CONTROL_NUMBER}

    def num_copied(self, block: int) -> int:
        """How many bytes of a block have been copied."""
        control = self.blocks.get(CONTROL_NUMBER)
        if control is None:
            return 0
        return ctypes.c_uint64.from_address(control.address + 8 * (block % NUM_MARKS)).value

    def send(self, message: KeeperMessage) -> None:
        """Send a message; nothing is sent to a rank that has gone."""
        if self.is_connected:
            try:
                self.channel.send(encode(message))
            except OSError:
                return  # the thread that receives from this rank notices that it has gone

    def send_outcome(self, outcome: Outcome) -> None:
        """Send how a save ended, with the number of the rank's request."""
        self.send(SaveEnded(request=self.requests.get(outcome.step, 0), outcome=outcome))

    def release_memory(self) -> None:
        """Unmap its blocks."""
        for block in self.blocks.values():
            block.close()
        self.blocks.clear()


class RankGroup:
    """The ranks of one start.

    Args:
        restart: how often the ranks had been restarted.
        num_ranks: of this node.
    """

    def __init__(self, restart: int, num_ranks: int) -> None:
        self.restart = restart
        self.registry = SnapshotRegistry(num_ranks)
        self.ranks: dict[int, Rank] = {}
        self.has_failed = False
        """Whether a rank has gone without a goodbye."""
        self.waits_to_leave = False
        """Whether the ranks wait for a save before they end."""
        self.begun_s: BoundedDict[int, float] = BoundedDict()
        """By step: when its save began."""
        self.last_outcome: Outcome | None = None
        self.failed_s: float | None = None
        self.is_watching = False
        self.is_rescuing = False
        self.is_rescued = False
        self.rescued_step: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether all its ranks are gone."""
        return not any(rank.is_connected for rank in self.ranks.values())

    @property
    def facts(self) -> CheckpointFacts | None:
        """Of the newest snapshot that has them."""
        return next((one.facts for one in self.registry.snapshots if one.facts is not None), None)

    def has_waited_enough(self, num_bytes: int = 0) -> bool:
        """Whether it is too long after a failure to wait for other nodes, which write about `num_bytes`."""
        patience_s = OTHER_NODES_S + num_bytes / _SLOW_BYTES_PER_S
        return self.failed_s is not None and clock.monotonic_s() > self.failed_s + patience_s

    def send_outcome(self, outcome: Outcome) -> None:
        """Send every rank how a save ended."""
        for rank in self.ranks.values():
            rank.send_outcome(outcome)

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
                raise GivenUpError(f"rank {number} has not staged its part of step {snapshot.step}")
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
