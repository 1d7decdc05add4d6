"""What the threads of a keeper share: the ranks, their snapshots, and the output folder.

A thread changes it while it holds `KeeperState.changed`, and calls `notify` afterwards. Single flags are read without
the lock too; `reporter` and `priority` may be used without it.
"""

import threading

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.foundation.events.run_events import SaveSuperseded
from safepoint.foundation.priority import Priority
from safepoint.snapshot.keeper.held_folder import HeldFolder
from safepoint.snapshot.keeper.persist.snapshot_commit import publish_no_part
from safepoint.snapshot.keeper.rank_group import Rank, RankGroup
from safepoint.snapshot.keeper.reporter import Reporter
from safepoint.snapshot.keeper.snapshot_registry import Snapshot
from safepoint.snapshot.protocol.channel import Channel
from safepoint.snapshot.protocol.messages import BlocksFree, Hello, Outcome

URGENT = frozenset({Trigger.JIT, Trigger.FAILURE})
"""Triggers of saves that ranks wait for."""


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
        """The ranks that are served."""
        self.earlier: RankGroup | None = None
        """The ranks before the last restart, while their memory may be needed."""
        self.is_writing = False
        self.is_closing = False
        """Whether a rank waits until everything is written."""

    def admit(self, channel: Channel, hello: Hello) -> tuple[RankGroup, Rank]:
        """Register a rank. The first one after a restart waits until the earlier ranks' requests are written."""
        with self.changed:
            while (group := self.current) is None or hello.restart > group.restart or group.is_over:
                self.forget_earlier()
                if self.current is group:  # otherwise the thread of another rank was faster
                    self.earlier, self.current = group, RankGroup(hello.restart, hello.num_ranks)
                    group = self.current
                    break
            if hello.rank in group.ranks:  # it connects again, and lends its memory again
                group.registry.remove_rank(hello.rank)
            rank = group.ranks[hello.rank] = Rank(hello.rank, channel)
            return group, rank

    def forget_earlier(self) -> None:
        """With `changed` held: wait until the earlier ranks' requests are written, then release their memory."""
        while (earlier := self.earlier) is not None:
            self.changed.wait_for(lambda earlier=earlier: self.earlier is not earlier or self.is_done(earlier))
            if self.earlier is earlier:
                for rank in earlier.ranks.values():
                    rank.release_memory()
                self.earlier = None

    def next_to_write(self) -> tuple[RankGroup, Snapshot] | None:
        """The next snapshot to write; those of earlier ranks come first."""
        for group in (self.earlier, self.current):
            snapshot = group.registry.next_to_write() if group is not None else None
            if group is not None and snapshot is not None and snapshot.facts is not None:
                return group, snapshot
        return None

    def is_idle(self, group: RankGroup) -> bool:
        """Whether nothing of these ranks is being written, or waits to be."""
        return not self.is_writing and group.registry.next_to_write() is None

    def is_done(self, group: RankGroup) -> bool:
        """Whether these ranks are gone, and nothing of theirs is left to write."""
        return group.is_over and not group.is_rescuing and self.is_idle(group)

    def may_end(self) -> bool:
        """Whether the keeper has no more work."""
        return not self.is_writing and all(
            self.is_done(group) for group in (self.current, self.earlier) if group is not None
        )

    def is_urgent(self, group: RankGroup) -> bool:
        """Whether ranks, or the end of the job, wait for what is being written or comes next."""
        return (
            self.is_closing
            or group.has_failed
            or group.waits_to_leave
            or any(one.is_requested and one.trigger in URGENT and one.is_open for one in group.registry.snapshots)
        )

    def notify(self, group: RankGroup) -> None:
        """After every change, with `changed` held: report superseded saves and free memory, wake waiting threads."""
        for snapshot in group.registry.take_superseded():
            newest = group.registry.newest_complete
            by = newest.step if newest is not None else snapshot.step
            superseded = SaveSuperseded(step=snapshot.step, trigger=str(snapshot.trigger), by=by)
            self.reporter.report_superseded(superseded)
            error = f"superseded by step {by} before its writing began"
            publish_no_part(snapshot, error)
            group.send_outcome(Outcome(step=snapshot.step, error=error))
        for rank in group.ranks.values():
            free = group.registry.newly_free(rank.number, rank.block_numbers)
            if free:
                rank.send(BlocksFree(numbers=tuple(free)))
        if self.is_urgent(group):
            self.priority.restore()
        self.changed.notify_all()
