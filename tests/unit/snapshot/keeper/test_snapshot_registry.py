"""The keeper's book: what is written next, what is superseded, what may be overwritten."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.snapshot.keeper.snapshot_registry import Progress, Snapshot, SnapshotRegistry
from safepoint.snapshot.protocol.messages import StagedFile


def files(*blocks: int) -> tuple[StagedFile, ...]:
    return tuple(StagedFile(path=f"file-{block}", block=block, offset=0, size_bytes=10) for block in blocks)


def begin(registry: SnapshotRegistry, step: int, *blocks: int, rank: int = 0, **changed: Any) -> Snapshot:
    fields: dict[str, Any] = {"trigger": Trigger.PERIODIC, "is_requested": True}
    return registry.begin(rank, step, files(*blocks), **{**fields, **changed})


def staged(registry: SnapshotRegistry, step: int, *blocks: int, **changed: Any) -> Snapshot:
    snapshot = begin(registry, step, *blocks, **changed)
    registry.staged(changed.get("rank", 0), step)
    return snapshot


def write(registry: SnapshotRegistry, *, is_durable: bool = True) -> int:
    """Write what is next."""
    snapshot = registry.next_to_write()
    assert snapshot is not None
    registry.writing(snapshot)
    registry.written(snapshot, is_durable=is_durable)
    return snapshot.step


def test_a_snapshot_s_way() -> None:
    """Begun, complete, written: its memory is free at the end, and only then."""
    registry = SnapshotRegistry(1)
    registry.add_block(0, 1)
    snapshot = begin(registry, 5, 1)
    assert registry.next_to_write() is snapshot, "writing begins before copying ends"
    assert registry.newest_complete is None
    assert registry.newly_free(0, {1}) == []
    registry.staged(0, 5)
    assert registry.newest_complete is snapshot
    registry.writing(snapshot)
    assert registry.next_to_write() is None
    assert registry.newly_free(0, {1}) == []
    assert registry.written(snapshot, is_durable=True)
    assert registry.newest_complete is snapshot, "it can still be loaded from memory"
    assert registry.newly_free(0, {1}) == [1]
    assert registry.newly_free(0, {1}) == [], "it is said once"


def test_a_new_block_is_not_said_to_be_free() -> None:
    """Its owner knows, and may be using it by the time it would hear."""
    registry = SnapshotRegistry(1)
    registry.add_block(0, 1)
    assert registry.newly_free(0, {1}) == []


def test_all_ranks_make_it_complete() -> None:
    """Each stages its part; writing begins when all have begun."""
    registry = SnapshotRegistry(2)
    begin(registry, 5, 1)
    assert registry.next_to_write() is None
    begin(registry, 5, 1, rank=1)
    registry.staged(0, 5)
    assert registry.newest_complete is None
    registry.staged(1, 5)
    assert registry.newest_complete is registry.find(5) is registry.next_to_write()


def test_the_newest_is_written_and_the_others_are_superseded() -> None:
    """By one that is complete and wanted; what is being written ends as it began."""
    registry = SnapshotRegistry(1)
    first = staged(registry, 1, 1)
    registry.writing(first)
    staged(registry, 2, 2)
    begin(registry, 3, 3)
    assert registry.take_superseded() == []
    registry.staged(0, 3)
    assert [snapshot.step for snapshot in registry.take_superseded()] == [2]
    assert registry.newly_free(0, {1, 2, 3}) == [2]
    registry.written(first, is_durable=True)
    assert write(registry) == 3


def test_one_that_nobody_wants_supersedes_nothing() -> None:
    """It is there for a failure."""
    registry = SnapshotRegistry(1)
    staged(registry, 1, 1)
    staged(registry, 2, 2, is_requested=False)
    assert registry.take_superseded() == []
    assert write(registry) == 1
    assert registry.next_to_write() is None
    assert registry.request(2, Trigger.FAILURE)
    assert registry.snapshots[0].trigger is Trigger.FAILURE
    assert write(registry) == 2


def test_a_trigger_stays_with_who_wanted_first() -> None:
    """A failure later on does not change why it exists."""
    registry = SnapshotRegistry(1)
    snapshot = staged(registry, 1, 1)
    assert registry.request(1, Trigger.FAILURE)
    assert snapshot.trigger is Trigger.PERIODIC


def test_a_failed_one_is_tried_again_only_when_asked() -> None:
    """Its memory is free, until then or until it is overwritten."""
    registry = SnapshotRegistry(1)
    registry.add_block(0, 1)
    staged(registry, 1, 1)
    write(registry, is_durable=False)
    assert registry.next_to_write() is None
    assert registry.newly_free(0, {1}) == [1]
    assert registry.request(1, Trigger.FAILURE)
    assert write(registry) == 1
    registry.overwrite(0, {1})
    assert not registry.request(1, Trigger.FAILURE)
    assert not registry.request(7, Trigger.FAILURE)
    assert registry.newest_complete is None


def test_memory_that_is_about_to_change_holds_nothing() -> None:
    """From the moment its owner says so, before it tells what comes instead; that it is free is not said again."""
    registry = SnapshotRegistry(1)
    registry.add_block(0, 1)
    staged(registry, 1, 1, is_requested=False)
    staged(registry, 2, 2, is_requested=False)
    assert registry.newly_free(0, {1}) == [1]
    registry.overwrite(0, {1})
    assert registry.find(1) is None
    assert registry.newly_free(0, {1}) == []
    begin(registry, 3, 1)
    assert registry.newly_free(0, {1}) == []


def test_what_is_given_up_is_not_written() -> None:
    """Neither before nor while it is being written; its memory is free when no thread reads it any more."""
    registry = SnapshotRegistry(1)
    begin(registry, 1, 1)
    registry.cancel(1)
    assert registry.newly_free(0, {1}) == [1]
    second = begin(registry, 2, 2)
    registry.writing(second)
    registry.cancel(2)
    assert registry.newly_free(0, {2}) == []
    registry.written(second, is_durable=False)
    assert registry.find(2) is None
    assert registry.newly_free(0, {2}) == [2]
    registry.cancel(9)
    registry.staged(0, 9)


def test_a_part_that_comes_after_its_step_was_given_up_is_free_at_once() -> None:
    """The slower rank's memory does not wait for a part that never comes; the step may be begun again."""
    registry = SnapshotRegistry(2)
    begin(registry, 1, 1, rank=1)
    registry.cancel(1)
    late = begin(registry, 1, 1, rank=0)
    assert not late.is_intact
    assert registry.find(1) is None
    assert registry.is_free(0, 1)
    for rank in (0, 1):
        staged(registry, 1, 1, rank=rank, number=2)
    assert registry.newest_complete is registry.find(1)


def test_a_step_is_begun_anew_by_ranks_in_any_order() -> None:
    """The first to give it up is the last to begin again, or its word comes later than the other's new beginning."""
    registry = SnapshotRegistry(2)
    begin(registry, 5, 1, rank=0, number=1)
    registry.cancel(5, 1)
    staged(registry, 5, 1, rank=1, number=2)
    staged(registry, 5, 2, rank=0, number=2)
    assert registry.newest_complete is registry.find(5)
    registry = SnapshotRegistry(2)
    begin(registry, 5, 1, rank=0, number=1)
    staged(registry, 5, 1, rank=1, number=2)
    registry.cancel(5, 1)
    assert registry.newest_complete is None
    staged(registry, 5, 2, rank=0, number=2)
    assert registry.newest_complete is registry.find(5)
    assert not begin(registry, 5, 3, rank=1, number=1).is_intact, "what comes late changes nothing"
    assert registry.newest_complete is registry.find(5)


def test_ranks_that_are_gone_leave_only_what_is_complete() -> None:
    """The unfinished one does not stand in the way of the one before."""
    registry = SnapshotRegistry(1)
    staged(registry, 1, 1)
    begin(registry, 2, 2)
    assert registry.next_to_write() is registry.find(2)
    registry.cancel_incomplete()
    assert registry.next_to_write() is registry.find(1)


def test_a_part_that_fails_does_not_stand_in_the_way() -> None:
    """One that can never be complete, as one of its ranks is gone, lets the one before be written."""
    registry = SnapshotRegistry(2)
    for rank in (0, 1):
        staged(registry, 1, 1, rank=rank)
        second = begin(registry, 2, 2, rank=rank)
    registry.writing(second)
    registry.written(second, is_durable=False)
    assert write(registry) == 1


def test_the_same_step_once_more() -> None:
    """What is being written keeps its memory to the end, and the new content is written after it."""
    registry = SnapshotRegistry(1)
    for block in (1, 2, 3):
        registry.add_block(0, block)
    first = staged(registry, 1, 1)
    registry.writing(first)
    second = staged(registry, 1, 2)
    assert second is not first
    assert not registry.is_free(0, 1)
    assert not registry.is_free(0, 2)
    third = staged(registry, 1, 3)
    assert registry.newly_free(0, {1, 2, 3}) == [2]
    assert not registry.written(first, is_durable=True), "no rank waits for it any more"
    assert registry.newly_free(0, {1, 2, 3}) == [1]
    assert registry.next_to_write() is third
    assert write(registry) == 1
    assert third.progress is Progress.DURABLE


@pytest.mark.parametrize("is_begun_again", [False, True])
@pytest.mark.parametrize("ends", ["staged", "cancelled", "overwritten", "rank gone", "ranks ended"])
def test_a_write_in_progress_outlives_a_clear(ends: str, is_begun_again: bool) -> None:
    """The registry knows the snapshot that is being written until `written`, whatever its rank does meanwhile."""
    registry = SnapshotRegistry(1)
    first = begin(registry, 5, 1, number=1)
    registry.writing(first)
    registry.clear()
    assert not registry.is_free(0, 1)
    if ends == "staged":
        registry.staged(0, 5)
    elif ends == "cancelled":
        registry.cancel(5, 1)
    elif ends == "overwritten":
        registry.overwrite(0, {1})
    elif ends == "rank gone":
        registry.remove_rank(0)
    else:
        registry.cancel_incomplete()
    assert first.is_complete is first.is_intact is (ends == "staged")
    second = staged(registry, 5, 2, number=2) if is_begun_again else None
    assert registry.newly_free(0, {1}) == []
    assert not registry.written(first, is_durable=first.is_complete), "no rank waits for its outcome"
    assert registry.find(5) is second
    assert registry.is_free(0, 1) is (ends != "overwritten"), "a rank that overwrites a block uses it"
    if second is not None:
        assert write(registry) == 5
        assert second.progress is Progress.DURABLE


def test_a_snapshot_that_is_spoilt_and_cleared_ends_its_write() -> None:
    """The writing thread, which calls `written`, must not end with an error."""
    registry = SnapshotRegistry(1)
    first = begin(registry, 5, 1)
    registry.writing(first)
    registry.cancel(5)
    registry.clear()
    second = staged(registry, 5, 2, number=1)
    assert not registry.written(first, is_durable=False)
    assert registry.find(5) is second


def test_a_write_that_a_new_snapshot_of_its_step_replaced_learns_how_its_ranks_end() -> None:
    """One rank begins the step again, the other still copies its part of the first snapshot."""
    for ends in ("staged", "cancelled", "overwritten"):
        registry = SnapshotRegistry(2)
        first = begin(registry, 5, 1, rank=0, number=1)
        begin(registry, 5, 1, rank=1, number=1)
        registry.writing(first)
        registry.staged(0, 5)
        second = begin(registry, 5, 2, rank=0, number=2)
        if ends == "staged":
            registry.staged(1, 5)
            assert first.is_complete
            assert not second.parts[0].is_staged
        elif ends == "cancelled":
            registry.cancel(5, 1)
            assert not first.is_intact
        else:
            registry.overwrite(1, {1})
            assert not first.is_intact
        assert second.is_intact
        assert not registry.written(first, is_durable=first.is_complete)
        assert registry.find(5) is second


def test_snapshots_with_equal_fields_are_different() -> None:
    """The end of one write must not count as the end of another one."""
    one, other = Snapshot(step=5), Snapshot(step=5)
    assert one != other


@settings(max_examples=25, stateful_step_count=30, deadline=None)
class Book(RuleBasedStateMachine):
    """Ranks that behave, a writer that may fail, in any order."""

    NUM_RANKS, NUM_BLOCKS = 2, 3

    def __init__(self) -> None:
        super().__init__()
        self.registry = SnapshotRegistry(self.NUM_RANKS)
        self.ranks = range(self.NUM_RANKS)
        self.free = {rank: set(range(1, self.NUM_BLOCKS + 1)) for rank in self.ranks}
        for rank in self.ranks:
            for block in self.free[rank]:
                self.registry.add_block(rank, block)
        self.step = dict.fromkeys(self.ranks, 0)
        self.filling: dict[int, tuple[int, int]] = {}
        self.writing: Snapshot | None = None
        self.memory: dict[tuple[int, int], int] = {}
        """(rank, block) → the step whose part is there, whole."""
        self.retried: set[int] = set()
        """Wanted again after their memory was given back: it may be taken any time."""
        self.wanted: set[int] = set()
        self.ended: set[int] = set()

    def notify(self) -> None:
        superseded = {snapshot.step for snapshot in self.registry.take_superseded()}
        assert not superseded - self.wanted
        self.ended |= superseded
        for rank in self.ranks:
            newly = self.registry.newly_free(rank, set(range(1, self.NUM_BLOCKS + 1)))
            assert not self.free[rank] & set(newly), "said twice"
            self.free[rank] |= set(newly)

    @rule(rank=st.sampled_from([0, 1]), is_requested=st.booleans(), data=st.data())
    def begin(self, rank: int, is_requested: bool, data: st.DataObject) -> None:
        # Both ranks decide alike, and the slower one takes the same steps later.
        if rank in self.filling or not self.free[rank] or self.step[rank] > min(self.step.values()):
            return
        block = data.draw(st.sampled_from(sorted(self.free[rank])))
        self.free[rank].remove(block)
        self.registry.overwrite(rank, {block})
        held = self.memory.pop((rank, block), 0)
        if held in self.retried:
            self.ended.add(held)
        self.notify()
        self.step[rank] += 1
        step = self.step[rank]
        existing = self.registry.find(step)
        is_requested = existing.is_requested if existing is not None else is_requested
        begin(self.registry, step, block, rank=rank, is_requested=is_requested)
        self.filling[rank] = (block, step)
        if is_requested and step not in self.ended:
            self.wanted.add(step)
        self.notify()

    @rule(rank=st.sampled_from([0, 1]), is_whole=st.integers(0, 4))
    def end(self, rank: int, is_whole: int) -> None:
        if rank in self.filling:
            block, step = self.filling.pop(rank)
            if is_whole:
                self.memory[rank, block] = step
                self.registry.staged(rank, step)
            else:
                self.registry.cancel(step)
                self.ended.add(step)
            self.notify()

    @rule(data=st.data())
    def want(self, data: st.DataObject) -> None:
        newest = self.registry.newest_complete
        if newest is not None:
            if newest.progress is Progress.FAILED:
                self.retried.add(newest.step)
            assert self.registry.request(newest.step, Trigger.FAILURE)
            self.wanted.add(newest.step)
            if newest.progress is not Progress.DURABLE:
                self.ended.discard(newest.step)
            self.notify()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """The ranks leave the folder with an error, and end their copies after that."""
        self.registry.clear()
        self.ended |= self.wanted
        for rank in sorted(self.filling):
            self.end(rank, data.draw(st.integers(0, 4)))
        self.step = dict.fromkeys(self.ranks, max(self.step.values()))

    @precondition(lambda self: self.writing is None)
    @rule()
    def write(self) -> None:
        self.writing = self.registry.next_to_write()
        if self.writing is not None:
            self.registry.writing(self.writing)

    @precondition(lambda self: self.writing is not None)
    @rule(is_durable=st.booleans())
    def written(self, is_durable: bool) -> None:
        snapshot = self.writing
        assert snapshot is not None
        if not all(part.is_staged for part in snapshot.parts.values()) and snapshot.is_intact:
            return  # the writer waits for the rest
        self.writing = None
        self.registry.written(snapshot, is_durable=is_durable and snapshot.is_intact)
        self.ended.add(snapshot.step)
        self.notify()

    @invariant()
    def what_is_being_written_is_not_free(self) -> None:
        if self.writing is None or not self.writing.is_intact:
            return
        for rank, part in self.writing.parts.items():
            assert self.writing.step in self.retried or not part.blocks & self.free[rank]
            assert not part.is_staged or {self.memory.get((rank, b)) for b in part.blocks} == {self.writing.step}

    @invariant()
    def what_is_complete_is_there(self) -> None:
        for snapshot in self.registry.snapshots:
            if snapshot.is_complete:
                for rank, part in snapshot.parts.items():
                    assert {self.memory.get((rank, block)) for block in part.blocks} == {snapshot.step}

    @invariant()
    def the_newest_complete_one_is_kept(self) -> None:
        newest = self.registry.newest_complete
        is_open = newest is not None and newest.progress in {Progress.WAITING, Progress.WRITING}
        if newest is not None and is_open and newest.step not in self.retried:
            for rank, part in newest.parts.items():
                assert not part.blocks & self.free[rank]

    @invariant()
    def whatever_is_requested_ends(self) -> None:
        for step in self.wanted - self.ended:
            assert self.registry.find(step) is not None, f"no rank ever receives the outcome of step {step}"

    def teardown(self) -> None:
        """When the ranks are gone, the writing comes to its end."""
        self.registry.cancel_incomplete()
        if self.writing is not None:
            self.registry.written(self.writing, is_durable=self.writing.is_complete)
        self.registry.take_superseded()
        for _ in range(10):
            if self.registry.next_to_write() is None:
                return
            write(self.registry)
        raise AssertionError("writing never ends")


TestBook = Book.TestCase
