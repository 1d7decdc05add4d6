"""CRIU's pagemaps: what is read from them, and what is refused."""

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.errors import ImageError
from safepoint.transparent.pages.pagemap import LAZY, MAGIC, PARENT, PRESENT, read_pagemap
from tests.support.criu_images import message, pagemap, varint

_PAGE = 4096


@given(
    st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(1, 1 << 16)), max_size=20), st.integers(0, (1 << 32) - 1)
)
def test_what_criu_writes_is_read(steps: list[tuple[int, int]], pages_id: int) -> None:
    """Each range has its address and its number of pages."""
    ranges: list[tuple[int, int]] = []
    address = 0
    for gap, num_pages in steps:
        address += gap * _PAGE
        ranges.append((address, num_pages))
        address += num_pages * _PAGE
    found = read_pagemap(pagemap(pages_id, ranges), "pagemap-1.img")
    assert found.pages_id == pages_id
    assert [(one.address, one.num_pages) for one in found.ranges] == ranges
    assert found.num_pages == sum(num for _, num in ranges)


def test_older_entries_are_read() -> None:
    """CRIU before 4.0 had no flags at first, and another field for the number of pages."""
    data = MAGIC + message([(1, 7)]) + message([(1, _PAGE), (2, 3)]) + message([(1, 9 * _PAGE), (2, 1), (3, 0)])
    assert read_pagemap(data, "pagemap-1.img").num_pages == 4


_HEAD = MAGIC + message([(1, 1)])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "magic"),
        (MAGIC[:4] + b"\0\0\0\0" + message([(1, 1)]), "magic"),
        (MAGIC, "pages file"),
        (MAGIC + message([(2, 1)]), "pages file"),
        (_HEAD + b"\1\0", "cut off"),
        (_HEAD + struct.pack("<I", 1 << 31), "longer"),
        (_HEAD + struct.pack("<I", 65) + bytes(65), "longer"),
        (_HEAD + struct.pack("<I", 3) + b"\x0a\x01x", "not a number"),
        (_HEAD + struct.pack("<I", 1) + b"\x08", "cut off"),
        (_HEAD + struct.pack("<I", 12) + b"\x08" + b"\xff" * 11, "too large"),
        (_HEAD + message([(1, 0), (1, 0), (4, PRESENT), (5, 1)]), "twice"),
        (pagemap(1, [(0, 1)], flags=PARENT), "not in its pages file"),
        (pagemap(1, [(0, 1)], flags=PARENT | PRESENT), "not in its pages file"),
        (pagemap(1, [(0, 1)], flags=LAZY), "not in its pages file"),
        (pagemap(1, [(0, 1)], flags=PRESENT | 8), "not in its pages file"),
        (_HEAD + message([(1, 0), (2, 1), (3, 1)]), "not in its pages file"),
        (pagemap(1, [(_PAGE, 2), (2 * _PAGE, 1)]), "ascend"),
        (pagemap(1, [(2 * _PAGE, 1), (0, 1)]), "ascend"),
        (pagemap(1, [(1, 1)]), "ascend"),
        (pagemap(1, [(0, 0)]), "ascend"),
        (_HEAD + message([(4, PRESENT), (5, 1)]), "ascend"),
        (pagemap(1, [(0, 1 << 60)]), "no process has"),
        (pagemap(1, [(1 << 60, 1)]), "no process has"),
        (pagemap(1, [(0, 1 << 31), (1 << 50, 1)]), "no process has"),
    ],
)
def test_a_hostile_pagemap_is_refused(data: bytes, words: str) -> None:
    """The message says what is wrong, and names the file."""
    with pytest.raises(ImageError, match=words) as caught:
        read_pagemap(data, "pagemap-1.img")
    assert "pagemap-1.img" in str(caught.value)


def test_mutations_are_refused_or_sound() -> None:
    """After any change of bytes, ranges ascend and do not overlap, or there is an error."""
    chance = random.Random(21)
    whole = pagemap(3, [(index * 64 * _PAGE, 1 + index % 60) for index in range(1, 200)])
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        end = 0
        try:
            found = read_pagemap(bytes(data[: chance.choice([len(data), chance.randrange(len(data))])]), "x")
        except ImageError:
            continue
        for one in found.ranges:
            assert one.address >= end
            end = one.address + one.num_pages * _PAGE


def test_numbers_take_the_bytes_that_protobuf_gives_them() -> None:
    """The writer of these tests writes as protobuf does."""
    assert [varint(value) for value in (0, 127, 128, 300)] == [b"\x00", b"\x7f", b"\x80\x01", b"\xac\x02"]
