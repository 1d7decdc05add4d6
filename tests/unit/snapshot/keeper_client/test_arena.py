"""Blocks are made once, used again, and given back; where they do not fit, the figures are said."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.snapshot.keeper_client.arena import Arena, NoRoomError
from safepoint.snapshot.memory.block import PAGE_BYTES, Block
from safepoint.snapshot.memory.host_memory import Room
from safepoint.snapshot.protocol.messages import BlockPopulated, ReturnBlock

MB = 1 << 20
SLACK = 16 * MB


class Book:
    """What the arena tells its keeper, and which blocks are free by it."""

    def __init__(self) -> None:
        self.free: set[int] = set()
        self.lent: list[int] = []
        self.taken_back: list[int] = []
        self.newest = 0

    def new_block_number(self) -> int:
        self.newest += 1
        return self.newest

    def lend(self, block: Block) -> None:
        self.lent.append(block.number)

    def send(self, message: BlockPopulated | ReturnBlock) -> None:
        assert message.number in self.lent
        if isinstance(message, ReturnBlock):
            self.taken_back.append(message.number)

    def is_free(self, block: Block) -> bool:
        return block.number in self.free

    def overwrite(self, blocks: Sequence[Block]) -> None:
        self.free -= {block.number for block in blocks}

    def mark_free(self, blocks: Sequence[Block]) -> None:
        self.free |= {block.number for block in blocks}


def arena_with(slots: int | None = None, available: int | None = None, limit: int = 1 << 34) -> tuple[Arena, Book]:
    book = Book()
    room = None if available is None else Room(available_bytes=available, limit_bytes=limit, limited_by="the machine")
    return Arena(book, slots=slots, look=lambda: room), book  # type: ignore[arg-type]


def test_the_same_blocks_again_and_again() -> None:
    """In the order of the sizes asked for, as soon as they are free."""
    arena, book = arena_with(slots=1)
    sizes = [3 * MB, 40 * MB, 1000]
    blocks = arena.take(sizes)
    assert blocks is not None
    assert [block.capacity_bytes for block in blocks] == [3 * MB, 40 * MB, PAGE_BYTES]
    assert not book.free
    book.mark_free(blocks)
    again = arena.take(sizes)
    assert again is not None
    assert {block.number for block in again} == {block.number for block in blocks}
    assert all(block.capacity_bytes >= size for block, size in zip(again, sizes, strict=True))
    assert book.lent == [1, 2, 3]
    assert not book.taken_back


def test_none_while_they_are_busy() -> None:
    """One slot for large states, three for small ones, more when asked; what is said counts."""
    for slots, size, count in ((None, 100 * MB, 1), (None, 80 * MB, 3), (2, 100 * MB, 2), (1, 80 * MB, 1)):
        arena, book = arena_with(slots=slots)
        assert arena.slots_for(size) == count
        taken = [arena.take([size]) for _ in range(count)]
        assert None not in taken
        assert arena.take([size]) is None
        more = arena.take([size], more_slots=1)
        assert more is not None
        book.mark_free(more)
        assert arena.take([size]) is not None


def test_what_does_not_fit_any_more_is_given_back() -> None:
    """A state that has grown gets new blocks, and the old ones go."""
    arena, book = arena_with(slots=1)
    small = arena.take([30 * MB, 30 * MB])
    assert small is not None
    assert arena.take([200 * MB]) is None, "not while they are busy"
    book.mark_free(small)
    large = arena.take([200 * MB])
    assert large is not None
    assert sorted(book.taken_back) == [1, 2]
    assert not book.free
    assert arena.num_bytes == 200 * MB


def test_a_block_that_is_too_large_does_not_stand_in_the_way() -> None:
    """It fits one image, and would leave no room for the other: it is returned, and no rank waits in vain."""
    arena, book = arena_with(slots=1)
    blocks = arena.take([200 * MB])
    assert blocks is not None
    book.mark_free(blocks)
    blocks = arena.take([100 * MB, 90 * MB])
    assert blocks is not None
    assert arena.num_bytes == 190 * MB


def test_a_bound_is_never_passed() -> None:
    """Fewer slots than usual fit below it, and a state that does not is refused with the figures, not waited for."""
    arena, book = arena_with(slots=2)
    arena.most_bytes = 150 * MB
    blocks = arena.take([100 * MB])
    assert blocks is not None
    assert not arena.could_take([100 * MB])
    assert arena.take([100 * MB], more_slots=1) is None
    assert arena.num_bytes <= arena.most_bytes
    book.mark_free(blocks)
    assert arena.could_take([151 * MB]), "or a save would be postponed for ever"
    with pytest.raises(NoRoomError, match=r"158 MB of host memory, and this rank's share of .* is 157 MB"):
        arena.take([151 * MB])
    with pytest.raises(NoRoomError):
        arena.prepare([80 * MB, 80 * MB])
    assert arena.num_bytes <= arena.most_bytes


SIZES = st.lists(st.integers(1, 300 * MB), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(
    states=st.lists(st.tuples(SIZES, st.booleans()), max_size=8),
    slots=st.none() | st.integers(1, 3),
    most_bytes=st.none() | st.integers(1201 * MB, 2000 * MB),
)
def test_whatever_is_saved_finds_its_place(
    states: list[tuple[list[int], bool]], slots: int | None, most_bytes: int | None
) -> None:
    """At once when all is free; blocks are large enough, each is used once, and never more than allowed."""
    arena, book = arena_with(slots=slots)
    arena.most_bytes = most_bytes
    busy: list[list[Block]] = []
    for sizes, is_kept_busy in states:
        blocks = arena.take(sizes)
        if blocks is None:
            assert busy, "there is nothing to wait for"
            for one in busy:
                book.mark_free(one)
            busy.clear()
            blocks = arena.take(sizes)
        assert blocks is not None
        assert len({block.number for block in blocks}) == len(sizes)
        assert all(block.capacity_bytes >= size for block, size in zip(blocks, sizes, strict=True))
        assert not book.free & {block.number for block in blocks}
        busy.append(blocks)
        if not is_kept_busy:
            book.mark_free(busy.pop())
        largest = max(sum(one) for one, _ in states)
        assert arena.num_bytes <= 3 * (largest + 4 * PAGE_BYTES) + 2 * SLACK
        assert most_bytes is None or arena.num_bytes <= most_bytes


def test_no_room_is_said_with_the_figures() -> None:
    """What is needed, what is there, what sets the limit, what stays free; nothing is taken."""
    arena, book = arena_with(available=150 * MB, limit=4000 * MB)
    with pytest.raises(NoRoomError) as error:
        arena.take([100 * MB])
    assert str(error.value) == (
        "a snapshot needs 105 MB of host memory; 157 MB of 4.2 GB are available (the machine), and "
        "Safepoint must leave 210 MB free"
    )
    with pytest.raises(NoRoomError, match="needs 105 MB"):
        arena.prepare([60 * MB], still_to_come=40 * MB)
    assert not book.lent
    with pytest.raises(NoRoomError, match="of shared memory cannot be allocated"):
        arena_with()[0].take([1 << 62])


def test_prepared_blocks_are_used() -> None:
    """Faulted in as far as there is room, whatever the exact size."""
    for available in (None, 1 << 33):
        arena, book = arena_with(available=available)
        arena.prepare([5 * MB, 0, 2 * MB])
        arena.wait_prepared()
        blocks = arena.take([1 * MB, 5 * MB - 100])
        assert blocks is not None
        assert sorted(block.number for block in blocks) == [1, 2]
        assert book.lent == [1, 2]
        arena.close()
        assert arena.num_bytes == 0
