"""The ranks that a keeper serves, and what each of their starts has left in memory."""

import ctypes
from typing import Any

from safepoint.foundation import clock
from safepoint.snapshot.keeper.ledger import Ledger, Snapshot, StagedFile
from safepoint.snapshot.keeper.persist.file_writer import STAGED, GivenUpError, Source
from safepoint.snapshot.keeper.persist.snapshot_commit import Facts
from safepoint.snapshot.memory.block import Block
from safepoint.snapshot.protocol.channel import Channel, Message
from safepoint.snapshot.protocol.layout import CONTROL_NUMBER, NUM_MARKS
from safepoint.snapshot.protocol.recent import Recent

_SLOW_BYTES_PER_S = 100e6
OTHERS_S = 15.0
"""How long after a failure other nodes may take to notice it too."""


class Rank:
    """One connected rank, or one that has gone and left its memory.

    Args:
        rank: of the job.
        channel: to it.
    """

    def __init__(self, rank: int, channel: Channel) -> None:
        self.rank = rank
        self.channel = channel
        self.blocks: dict[int, Block] = {}
        self.is_connected = True
        self.has_said_bye = False
        self.asked: Recent[int, int] = Recent()
        """By step: the number of its last request about it, which outcomes are reported with."""
        self.scratch: str | None = None
        """A folder of its own, to be removed when it is gone."""

    @property
    def lent(self) -> set[int]:
        """The numbers of its blocks."""
        return set(self.blocks) - {CONTROL_NUMBER}

    def mark(self, number: int) -> int:
        """How many bytes of a block are there."""
        control = self.blocks.get(CONTROL_NUMBER)
        if control is None:
            return 0
        return ctypes.c_uint64.from_address(control.address + 8 * (number % NUM_MARKS)).value

    def tell(self, message: Message) -> None:
        """Send it a message; one that has gone hears nothing."""
        if self.is_connected:
            try:
                self.channel.send(message)
            except OSError:
                return  # its own thread notices

    def tell_outcome(self, outcome: dict[str, Any]) -> None:
        """Tell it what has become of a save.

        Args:
            outcome: its `step`, its `error`, which is empty for a durable one, and what else is known of that one.
        """
        self.tell({"type": "outcome", "outcome": outcome, "asked": self.asked.get(outcome["step"], 0)})

    def close(self) -> None:
        """Give its memory back."""
        for block in self.blocks.values():
            block.close()
        self.blocks.clear()


class Start:
    """One start of the ranks: their memory and the book of their snapshots.

    Args:
        restart: how often the ranks had been restarted.
        num_ranks: of this node.
    """

    def __init__(self, restart: int, num_ranks: int) -> None:
        self.restart = restart
        self.ledger = Ledger(num_ranks)
        self.ranks: dict[int, Rank] = {}
        self.has_failed = False
        self.is_hurried = False
        """Whether ranks wait to leave, whatever for."""
        self.begun_s: Recent[int, float] = Recent()
        self.outcomes: dict[int, dict[str, Any]] = {}
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
    def facts(self) -> Facts | None:
        """What the newest snapshot says of where it belongs."""
        return next((Facts(**one.facts) for one in self.ledger.snapshots if one.facts), None)

    def is_hopeless(self, num_bytes: int = 0) -> bool:
        """Whether waiting for other nodes, which have about `num_bytes` to write, makes no sense any more."""
        patience_s = OTHERS_S + num_bytes / _SLOW_BYTES_PER_S
        return self.failed_s is not None and clock.monotonic_s() > self.failed_s + patience_s

    def tell_outcome(self, outcome: dict[str, Any]) -> None:
        """Tell every rank what has become of a save; see `Rank.tell_outcome`."""
        for rank in self.ranks.values():
            rank.tell_outcome(outcome)

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
            return rank.mark(file.block)

        return Source(
            path=file.path,
            block=rank.blocks[file.block],
            offset=file.offset,
            size_bytes=file.size_bytes,
            archives=file.archives,
            has_block_alone=file.offset == 0 and sum(other.block == file.block for other in others) == 1,
            available=available,
        )
