"""How rank and keeper lay out the memory they share."""

from safepoint.snapshot.memory.block import PAGE_BYTES

CONTROL_NUMBER = 0
"""The number of the block that holds the watermarks: how much of each other block has been copied."""
NUM_MARKS = PAGE_BYTES // 8
SMALL_BYTES = 1 << 20
"""Files below it share one block and are written in one call; only larger ones are worth alignment."""
