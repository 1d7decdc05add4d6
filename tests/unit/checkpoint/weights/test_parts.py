"""Which parts make a whole tensor, compared with a count of each element."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.checkpoint.weights.parts import make_whole

_Box = tuple[tuple[int, ...], tuple[int, ...]]


def counted(sizes: Sequence[int], parts: Sequence[_Box]) -> bool:
    """Count in how many parts each element is."""
    found: Counter[tuple[int, ...]] = Counter()
    for offsets, counts in parts:
        spans = (range(begin, begin + count) for begin, count in zip(offsets, counts, strict=True))
        found.update(itertools.product(*spans))
    return found == Counter(itertools.product(*map(range, sizes)))


@given(data=st.data())
def test_any_boxes(data: st.DataObject) -> None:
    """Boxes of up to three dimensions, of which some make the tensor."""
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=3))
    place = st.tuples(*(st.integers(0, size + 1) for size in sizes))
    parts = data.draw(st.lists(st.tuples(place, place), max_size=5))
    assert make_whole(sizes, parts) == counted(sizes, parts)


@given(data=st.data())
def test_boxes_that_were_split(data: st.DataObject) -> None:
    """Each split leaves the whole tensor. If then one part is moved, left out or repeated, it no longer is."""
    sizes = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    parts: list[_Box] = [((0,) * len(sizes), sizes)]
    for _ in range(data.draw(st.integers(0, 8))):
        offsets, counts = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        axis = data.draw(st.integers(0, len(sizes) - 1))
        at = data.draw(st.integers(0, counts[axis]))
        for begin, count in ((0, at), (at, counts[axis] - at)):
            moved = tuple(one + begin if number == axis else one for number, one in enumerate(offsets))
            cut = tuple(count if number == axis else one for number, one in enumerate(counts))
            parts.append((moved, cut))
    assert make_whole(sizes, parts)
    full = [part for part in parts if math.prod(part[1])]
    offsets, counts = full[0]
    moved = tuple(one + 1 for one in offsets)
    for others in (full[1:], [*full, full[0]], [(moved, counts), *full[1:]]):
        assert not make_whole(sizes, others)


@pytest.mark.parametrize(
    ("sizes", "parts", "is_whole"),
    [
        ((4,), [((0,), (2,)), ((1,), (2,))], False),
        ((4,), [((0,), (2,)), ((9,), (2,))], False),
        ((4,), [((0,), (2,)), ((2,), (2,))], True),
        ((), [((), ())], True),
        ((), [((), ()), ((), ())], False),
        ((), [], False),
        ((0, 3), [], True),
        ((0, 3), [((0, 0), (0, 3))], True),
        ((0, 3), [((0, 0), (1, 3))], False),
        ((2, 2), [((0,), (4,))], False),
        ((2,), [((0,), (2,)), ((2,), (0,)), ((2,), (0,))], True),
        ((2,) * 64, [((0,) * 64, (2,) * 64)], True),
        ((2,) * 64, [((0,) * 64, (2,) * 63 + (1,))], False),
        ((1 << 62, 2), [((0, 0), (1 << 62, 1)), ((0, 1), (1 << 62, 1))], True),
    ],
)
def test_borders(sizes: tuple[int, ...], parts: list[_Box], is_whole: bool) -> None:
    assert make_whole(sizes, parts) is is_whole
