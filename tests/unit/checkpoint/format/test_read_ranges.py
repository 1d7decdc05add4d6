"""Ranges that were read are compared with what was digested."""

import pytest

from safepoint.checkpoint.format.digest import PART_BYTES
from safepoint.checkpoint.format.read_ranges import ReadRanges
from safepoint.errors import CheckpointError


def test_ranges_across_parts() -> None:
    """A range may begin and end anywhere; ranges may overlap; parts may be compared in any order."""
    data = bytes(range(256)) * ((PART_BYTES >> 8) + 1000)
    ranges = [(0, 10), (5, 100), (0, len(data)), (PART_BYTES - 3, 7), (PART_BYTES, 1), (len(data) - 1, 1)]

    def compared(changed: int | None) -> ReadRanges:
        read = ReadRanges()
        for start, length in ranges:
            read.note("a", start, data[start:][:length])
        assert set(read.parts()) == {("a", 0), ("a", 1)}
        right = bytearray(data)
        if changed is not None:
            right[changed] ^= 1
        for start in (PART_BYTES, 0):
            comparison = read.comparing("a", start)
            for begin in range(start, min(len(data), start + PART_BYTES), 3 << 20):
                end = min(begin + (3 << 20), start + PART_BYTES, len(data))
                comparison.take(memoryview(right)[begin:end])
            comparison.finish()
        return read

    read = compared(None)
    taken = bytearray()
    sink = read.checked([("a", start, length) for start, length in ranges], taken.extend)
    for start, length in ranges:
        sink(memoryview(data)[start:][:length])
    assert bytes(taken) == b"".join(data[start:][:length] for start, length in ranges)
    for changed in (0, PART_BYTES - 1, PART_BYTES, len(data) - 1):
        with pytest.raises(CheckpointError, match="changed while it was read"):
            compared(changed)


def test_after_a_difference_nothing_is_right() -> None:
    """Not even if the difference was overlooked, and the later reads agree."""
    read = ReadRanges()
    read.note("a", 0, b"one")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="changed while it was read"):
            read.note("a", 0, b"two")
