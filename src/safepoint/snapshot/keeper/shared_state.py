"""What the threads of a keeper share: the starts of the ranks, the folder they save into, and who waits for what.

It is changed with `Kept.changed` held, and whoever changes what others wait for calls `settle`. Single flags are read
without it too; `reporting` and `priority` may be used without it.
"""

import threading

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.foundation.events.run_events import SaveSuperseded
from safepoint.foundation.priority import Priority
from safepoint.snapshot.keeper.folder import HeldFolder
from safepoint.snapshot.keeper.ledger import Snapshot
from safepoint.snapshot.keeper.persist.snapshot_commit import excuse
from safepoint.snapshot.keeper.rank_starts import Rank, Start
from safepoint.snapshot.keeper.reporting import Reporting
from safepoint.snapshot.protocol.channel import Channel

URGENT = frozenset({Trigger.JIT, Trigger.FAILURE})
"""Triggers of saves that somebody waits for."""


class SharedState:
    """What is kept for the ranks.

    Args:
        reporting: told what is superseded.
    """

    def __init__(self, reporting: Reporting) -> None:
        self.changed = threading.Condition()
        self.reporting = reporting
        self.folder = HeldFolder(reporting)
        self.priority = Priority()
        self.current: Start | None = None
        """The ranks that are served."""
        self.earlier: Start | None = None
        """Those before them, while their memory is wanted."""
        self.is_writing = False
        self.is_closing = False
        """Whether a rank waits until all is written."""

    def admit(self, channel: Channel, number: int, num_ranks: int, restart: int) -> tuple[Start, Rank]:
        """Take a rank in; the first one of a new start waits until all that is wanted of the one before is written.

        Args:
            channel: to the rank.
            number: of the rank.
            num_ranks: of this node.
            restart: how often the ranks had been started anew.
        """
        with self.changed:
            while (start := self.current) is None or restart > start.restart or start.is_over:
                self.forget_earlier()
                if self.current is start:  # otherwise another rank was faster
                    self.earlier, self.current = start, Start(restart, num_ranks)
                    start = self.current
                    break
            assert start is not None
            before = start.ranks.get(number)
            if before is not None:  # it has lost its connection, and lends its memory anew
                start.ledger.disown(before.rank)
            rank = start.ranks[number] = Rank(number, channel)
            return start, rank

    def forget_earlier(self) -> None:
        """With `changed` held: wait until what is wanted of the earlier start is written, then free its memory."""
        while (earlier := self.earlier) is not None:
            self.changed.wait_for(lambda earlier=earlier: self.earlier is not earlier or self.is_done(earlier))
            if self.earlier is earlier:
                for rank in earlier.ranks.values():
                    rank.close()
                self.earlier = None

    def next_to_write(self) -> tuple[Start, Snapshot] | None:
        """What is to become a checkpoint next; what an earlier start has left comes first."""
        for start in (self.earlier, self.current):
            snapshot = start.ledger.next_to_write() if start is not None else None
            if start is not None and snapshot is not None and snapshot.facts:
                return start, snapshot
        return None

    def is_idle(self, start: Start) -> bool:
        """Whether nothing of a start is written, or is to be."""
        return not self.is_writing and start.ledger.next_to_write() is None

    def is_done(self, start: Start) -> bool:
        """Whether a start is over, and nothing of it is left to be written."""
        return start.is_over and not start.is_rescuing and self.is_idle(start)

    def may_end(self) -> bool:
        """Whether nobody would miss the keeper."""
        return not self.is_writing and all(
            self.is_done(start) for start in (self.current, self.earlier) if start is not None
        )

    def is_urgent(self, start: Start) -> bool:
        """Whether somebody waits for what is being written, or about to be."""
        return (
            self.is_closing
            or start.has_failed
            or start.is_hurried
            or any(one.is_wanted and one.trigger in URGENT and one.is_open for one in start.ledger.snapshots)
        )

    def settle(self, start: Start) -> None:
        """After every change, with `changed` held: say what is superseded and what is free, wake whoever waits."""
        for snapshot in start.ledger.take_superseded():
            newest = start.ledger.newest_complete
            by = newest.step if newest is not None else snapshot.step
            superseded = SaveSuperseded(step=snapshot.step, trigger=str(snapshot.trigger), by=by)
            self.reporting.report_superseded(superseded)
            error = f"superseded by step {by} before its writing began"
            excuse(snapshot, error)
            start.tell_outcome({"step": snapshot.step, "error": error})
        for rank in start.ranks.values():
            free = start.ledger.newly_free(rank.rank, rank.lent)
            if free:
                rank.tell({"type": "free", "blocks": free})
        if self.is_urgent(start):
            self.priority.restore()
        self.changed.notify_all()
