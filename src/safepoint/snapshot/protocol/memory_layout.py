"""How rank and keeper lay out the memory they share."""

from safepoint.snapshot.memory.block import PAGE_BYTES

CONTROL_NUMBER = 0
"""The number of the block that holds the watermarks: how many bytes of each other block have been copied."""
NUM_MARKS = PAGE_BYTES // 8
SMALL_BYTES = 1 << 20
"""Smaller files share one block and are written in one call; larger ones get aligned blocks of their own."""
