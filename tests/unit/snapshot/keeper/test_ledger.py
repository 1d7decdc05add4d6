"""The keeper's book: what is written next, what is superseded, what may be overwritten."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.snapshot.keeper.ledger import Ledger, Progress, Snapshot, StagedFile

FACTS = {"folder": "out"}


def files(*blocks: int) -> tuple[StagedFile, ...]:
    return tuple(StagedFile(path=f"file-{block}", block=block, offset=0, size_bytes=10) for block in blocks)


def begin(ledger: Ledger, step: int, *blocks: int, rank: int = 0, **changed: Any) -> Snapshot:
    fields: dict[str, Any] = {"trigger": Trigger.PERIODIC, "is_wanted": True, "facts": FACTS}
    return ledger.begin(rank, step, files(*blocks), **{**fields, **changed})


def staged(ledger: Ledger, step: int, *blocks: int, **changed: Any) -> Snapshot:
    snapshot = begin(ledger, step, *blocks, **changed)
    ledger.staged(changed.get("rank", 0), step)
    return snapshot


def write(ledger: Ledger, *, is_durable: bool = True) -> int:
    """Write what is next."""
    snapshot = ledger.next_to_write()
    assert snapshot is not None
    snapshot.progress = Progress.WRITING
    ledger.written(snapshot, is_durable=is_durable)
    return snapshot.step


def test_a_snapshot_s_way() -> None:
    """Begun, complete, written: its memory is free at the end, and only then."""
    ledger = Ledger(1)
    ledger.lend(0, 1)
    snapshot = begin(ledger, 5, 1)
    assert ledger.next_to_write() is snapshot, "writing begins before copying ends"
    assert ledger.newest_complete is None
    assert ledger.newly_free(0, {1}) == []
    ledger.staged(0, 5)
    assert ledger.newest_complete is snapshot
    snapshot.progress = Progress.WRITING
    assert ledger.next_to_write() is None
    assert ledger.newly_free(0, {1}) == []
    assert ledger.written(snapshot, is_durable=True)
    assert ledger.newest_complete is snapshot, "it can still be loaded from memory"
    assert ledger.newly_free(0, {1}) == [1]
    assert ledger.newly_free(0, {1}) == [], "it is said once"


def test_a_new_block_is_not_said_to_be_free() -> None:
    """Its owner knows, and may be using it by the time it would hear."""
    ledger = Ledger(1)
    ledger.lend(0, 1)
    assert ledger.newly_free(0, {1}) == []


def test_all_ranks_make_it_complete() -> None:
    """Each stages its part; writing begins when all have begun."""
    ledger = Ledger(2)
    begin(ledger, 5, 1)
    assert ledger.next_to_write() is None
    begin(ledger, 5, 1, rank=1)
    ledger.staged(0, 5)
    assert ledger.newest_complete is None
    ledger.staged(1, 5)
    assert ledger.newest_complete is ledger.find(5) is ledger.next_to_write()


def test_the_newest_is_written_and_the_others_are_superseded() -> None:
    """By one that is complete and wanted; what is being written ends as it began."""
    ledger = Ledger(1)
    first = staged(ledger, 1, 1)
    first.progress = Progress.WRITING
    staged(ledger, 2, 2)
    begin(ledger, 3, 3)
    assert ledger.take_superseded() == []
    ledger.staged(0, 3)
    assert [snapshot.step for snapshot in ledger.take_superseded()] == [2]
    assert ledger.newly_free(0, {1, 2, 3}) == [2]
    ledger.written(first, is_durable=True)
    assert write(ledger) == 3


def test_one_that_nobody_wants_supersedes_nothing() -> None:
    """It is there for a failure."""
    ledger = Ledger(1)
    staged(ledger, 1, 1)
    staged(ledger, 2, 2, is_wanted=False)
    assert ledger.take_superseded() == []
    assert write(ledger) == 1
    assert ledger.next_to_write() is None
    assert ledger.want(2, Trigger.FAILURE)
    assert ledger.snapshots[0].trigger is Trigger.FAILURE
    assert write(ledger) == 2


def test_a_trigger_stays_with_who_wanted_first() -> None:
    """A failure later on does not change why it exists."""
    ledger = Ledger(1)
    snapshot = staged(ledger, 1, 1)
    assert ledger.want(1, Trigger.FAILURE)
    assert snapshot.trigger is Trigger.PERIODIC


def test_a_failed_one_is_tried_again_only_when_asked() -> None:
    """Its memory is free, until then or until it is overwritten."""
    ledger = Ledger(1)
    ledger.lend(0, 1)
    staged(ledger, 1, 1)
    write(ledger, is_durable=False)
    assert ledger.next_to_write() is None
    assert ledger.newly_free(0, {1}) == [1]
    assert ledger.want(1, Trigger.FAILURE)
    assert write(ledger) == 1
    ledger.use(0, {1})
    assert not ledger.want(1, Trigger.FAILURE)
    assert not ledger.want(7, Trigger.FAILURE)
    assert ledger.newest_complete is None


def test_memory_that_is_about_to_change_holds_nothing() -> None:
    """From the moment its owner says so, before it tells what comes instead; that it is free is not said again."""
    ledger = Ledger(1)
    ledger.lend(0, 1)
    staged(ledger, 1, 1, is_wanted=False)
    staged(ledger, 2, 2, is_wanted=False)
    assert ledger.newly_free(0, {1}) == [1]
    ledger.use(0, {1})
    assert ledger.find(1) is None
    assert ledger.newly_free(0, {1}) == []
    begin(ledger, 3, 1)
    assert ledger.newly_free(0, {1}) == []


def test_what_is_given_up_is_not_written() -> None:
    """Neither before nor while it is being written; its memory is free when no process reads it any more."""
    ledger = Ledger(1)
    begin(ledger, 1, 1)
    ledger.give_up(1)
    assert ledger.newly_free(0, {1}) == [1]
    second = begin(ledger, 2, 2)
    second.progress = Progress.WRITING
    ledger.give_up(2)
    assert ledger.newly_free(0, {2}) == []
    ledger.written(second, is_durable=False)
    assert ledger.find(2) is None
    assert ledger.newly_free(0, {2}) == [2]
    ledger.give_up(9)
    ledger.staged(0, 9)


def test_a_part_that_comes_after_its_step_was_given_up_is_free_at_once() -> None:
    """The slower rank's memory does not wait for a part that never comes; the step may be started again."""
    ledger = Ledger(2)
    begin(ledger, 1, 1, rank=1)
    ledger.give_up(1)
    late = begin(ledger, 1, 1, rank=0)
    assert not late.is_intact
    assert ledger.find(1) is None
    assert ledger.is_free(0, 1)
    for rank in (0, 1):
        staged(ledger, 1, 1, rank=rank, number=2)
    assert ledger.newest_complete is ledger.find(1)


def test_a_step_is_begun_anew_by_ranks_in_any_order() -> None:
    """The first to give it up is the last to begin again, or its word comes later than the other's new beginning."""
    ledger = Ledger(2)
    begin(ledger, 5, 1, rank=0, number=1)
    ledger.give_up(5, 1)
    staged(ledger, 5, 1, rank=1, number=2)
    staged(ledger, 5, 2, rank=0, number=2)
    assert ledger.newest_complete is ledger.find(5)
    ledger = Ledger(2)
    begin(ledger, 5, 1, rank=0, number=1)
    staged(ledger, 5, 1, rank=1, number=2)
    ledger.give_up(5, 1)
    assert ledger.newest_complete is None
    staged(ledger, 5, 2, rank=0, number=2)
    assert ledger.newest_complete is ledger.find(5)
    assert not begin(ledger, 5, 3, rank=1, number=1).is_intact, "what comes late changes nothing"
    assert ledger.newest_complete is ledger.find(5)


def test_ranks_that_are_gone_leave_only_what_is_complete() -> None:
    """The unfinished one does not stand in the way of the one before."""
    ledger = Ledger(1)
    staged(ledger, 1, 1)
    begin(ledger, 2, 2)
    assert ledger.next_to_write() is ledger.find(2)
    ledger.give_up_unfinished()
    assert ledger.next_to_write() is ledger.find(1)


def test_a_part_that_fails_does_not_stand_in_the_way() -> None:
    """One that can never be complete, as one of its ranks is gone, lets the one before be written."""
    ledger = Ledger(2)
    for rank in (0, 1):
        staged(ledger, 1, 1, rank=rank)
        second = begin(ledger, 2, 2, rank=rank)
    second.progress = Progress.WRITING
    ledger.written(second, is_durable=False)
    assert write(ledger) == 1


def test_the_same_step_once_more() -> None:
    """What is being written keeps its memory to the end, and the new content is written after it."""
    ledger = Ledger(1)
    for block in (1, 2, 3):
        ledger.lend(0, block)
    first = staged(ledger, 1, 1)
    first.progress = Progress.WRITING
    second = staged(ledger, 1, 2)
    assert second is not first
    assert not ledger.is_free(0, 1)
    assert not ledger.is_free(0, 2)
    third = staged(ledger, 1, 3)
    assert ledger.newly_free(0, {1, 2, 3}) == [2]
    assert not ledger.written(first, is_durable=True), "no request waits for it any more"
    assert ledger.newly_free(0, {1, 2, 3}) == [1]
    assert ledger.next_to_write() is third
    assert write(ledger) == 1
    assert third.progress is Progress.DURABLE


@settings(max_examples=25, stateful_step_count=30, deadline=None)
class Book(RuleBasedStateMachine):
    """Ranks that behave, a writer that may fail, in any order."""

    NUM_RANKS, NUM_BLOCKS = 2, 3

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(self.NUM_RANKS)
        self.ranks = range(self.NUM_RANKS)
        self.free = {rank: set(range(1, self.NUM_BLOCKS + 1)) for rank in self.ranks}
        for rank in self.ranks:
            for block in self.free[rank]:
                self.ledger.lend(rank, block)
        self.step = dict.fromkeys(self.ranks, 0)
        self.filling: dict[int, tuple[int, int]] = {}
        self.writing: Snapshot | None = None
        self.memory: dict[tuple[int, int], int] = {}
        """(rank, block) → the step whose part is there, whole."""
        self.retried: set[int] = set()
        """Wanted again after their memory was given back: it may be taken any time."""
        self.wanted: set[int] = set()
        self.ended: set[int] = set()

    def complete(self) -> None:
        superseded = {snapshot.step for snapshot in self.ledger.take_superseded()}
        assert not superseded - self.wanted
        self.ended |= superseded
        for rank in self.ranks:
            released = self.ledger.newly_free(rank, set(range(1, self.NUM_BLOCKS + 1)))
            assert not self.free[rank] & set(released), "said twice"
            self.free[rank] |= set(released)

    @rule(rank=st.sampled_from([0, 1]), is_wanted=st.booleans(), data=st.data())
    def begin(self, rank: int, is_wanted: bool, data: st.DataObject) -> None:
        # Both ranks decide alike, and the slower one takes the same steps later.
        if rank in self.filling or not self.free[rank] or self.step[rank] > min(self.step.values()):
            return
        block = data.draw(st.sampled_from(sorted(self.free[rank])))
        self.free[rank].remove(block)
        self.ledger.use(rank, {block})
        held = self.memory.pop((rank, block), 0)
        if held in self.retried:
            self.ended.add(held)
        self.complete()
        self.step[rank] += 1
        step = self.step[rank]
        existing = self.ledger.find(step)
        is_wanted = existing.is_wanted if existing is not None else is_wanted
        begin(self.ledger, step, block, rank=rank, is_wanted=is_wanted)
        self.filling[rank] = (block, step)
        if is_wanted and step not in self.ended:
            self.wanted.add(step)
        self.complete()

    @rule(rank=st.sampled_from([0, 1]), is_whole=st.integers(0, 4))
    def end(self, rank: int, is_whole: int) -> None:
        if rank in self.filling:
            block, step = self.filling.pop(rank)
            if is_whole:
                self.memory[rank, block] = step
                self.ledger.staged(rank, step)
            else:
                self.ledger.give_up(step)
                self.ended.add(step)
            self.complete()

    @rule(data=st.data())
    def want(self, data: st.DataObject) -> None:
        newest = self.ledger.newest_complete
        if newest is not None:
            if newest.progress is Progress.FAILED:
                self.retried.add(newest.step)
            assert self.ledger.want(newest.step, Trigger.FAILURE)
            self.wanted.add(newest.step)
            if newest.progress is not Progress.DURABLE:
                self.ended.discard(newest.step)
            self.complete()

    @precondition(lambda self: self.writing is None)
    @rule()
    def write(self) -> None:
        self.writing = self.ledger.next_to_write()
        if self.writing is not None:
            self.writing.progress = Progress.WRITING

    @precondition(lambda self: self.writing is not None)
    @rule(is_durable=st.booleans())
    def written(self, is_durable: bool) -> None:
        snapshot = self.writing
        assert snapshot is not None
        if not all(part.is_staged for part in snapshot.parts.values()) and snapshot.is_intact:
            return  # the writer waits for the rest
        self.writing = None
        self.ledger.written(snapshot, is_durable=is_durable and snapshot.is_intact)
        self.ended.add(snapshot.step)
        self.complete()

    @invariant()
    def what_is_being_written_is_not_free(self) -> None:
        if self.writing is None or not self.writing.is_intact:
            return
        for rank, part in self.writing.parts.items():
            assert self.writing.step in self.retried or not part.blocks & self.free[rank]
            assert not part.is_staged or {self.memory.get((rank, b)) for b in part.blocks} == {self.writing.step}

    @invariant()
    def what_is_complete_is_there(self) -> None:
        for snapshot in self.ledger.snapshots:
            if snapshot.is_complete:
                for rank, part in snapshot.parts.items():
                    assert {self.memory.get((rank, block)) for block in part.blocks} == {snapshot.step}

    @invariant()
    def the_newest_complete_one_is_kept(self) -> None:
        newest = self.ledger.newest_complete
        is_open = newest is not None and newest.progress in {Progress.WAITING, Progress.WRITING}
        if newest is not None and is_open and newest.step not in self.retried:
            for rank, part in newest.parts.items():
                assert not part.blocks & self.free[rank]

    @invariant()
    def whatever_is_wanted_ends(self) -> None:
        for step in self.wanted - self.ended:
            assert self.ledger.find(step) is not None, f"the outcome of step {step} is never reported"

    def teardown(self) -> None:
        """When the ranks are gone, the writing comes to its end."""
        self.ledger.give_up_unfinished()
        if self.writing is not None:
            self.ledger.written(self.writing, is_durable=self.writing.is_complete)
        self.ledger.take_superseded()
        for _ in range(10):
            if self.ledger.next_to_write() is None:
                return
            write(self.ledger)
        raise AssertionError("writing never ends")


TestBook = Book.TestCase
