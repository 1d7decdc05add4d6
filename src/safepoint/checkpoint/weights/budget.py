"""Limits what the reading of one checkpoint may cost.

A pickle can refer to one object again and again. So a file of some kilobytes can describe a million weights, each in
a million pieces. Separate limits for a tensor and for a file do not help: a checkpoint may reach both, and its cost
is then one limit times the other. So everything that is read from one checkpoint counts against one `Budget`.

Not promised: a limit of the memory in bytes. Each limit is a number of objects. The comment beside a limit states how
much memory or time the objects take.
"""

import enum
import threading

from safepoint.errors import CheckpointError

_EXPANDED_RUNS = 1 << 20
_EXPANDED_BYTES = 1 << 30
_MOST_COPIES = 16
_STEPS = 100_000_000
_BYTES_PER_STEP = 1000
_BYTES_PER_PART = 1000
"""A distributed checkpoint stores each part of a tensor in an archive of at least this size."""


class Cost(enum.Enum):
    """The things that are counted. The value completes the message "it has more than 1000 …"."""

    RUNS = "contiguous pieces of weights"
    WEIGHTS = "weights"
    LETTERS = "letters in the names of weights"
    CHUNKS = "parts of tensors"
    PLACES = "entries about where tensors are stored"
    PATH_PARTS = "parts of the names of tensors"
    STEPS = "instructions of pickles and records of archives"
    BYTES = "bytes of weights"


_MOST = {
    Cost.RUNS: 1 << 23,  # 1.5 GB
    Cost.WEIGHTS: 1 << 20,  # 0.5 GB
    # 64 MiB. An export writes the names to the header of a safetensors file, which has 100 MB at most.
    Cost.LETTERS: 1 << 26,
    Cost.CHUNKS: 1 << 21,
    Cost.PLACES: 1 << 21,  # 0.8 GB
    Cost.PATH_PARTS: 1 << 22,  # 0.1 GB
    Cost.STEPS: _STEPS,  # 2 minutes
}


class Budget:
    """Counts what is read from one checkpoint, and refuses more than the limits allow. Several threads may use one
    budget.

    Args:
        stored_bytes: the size of all files of the checkpoint. The weights may have no more runs (contiguous pieces)
            than the files have bytes, and 2^20 runs in addition for expanded tensors. The weights may have at most 16
            times the bytes of the files, or 1 GiB if that is more. The limit of steps (instructions and records) is
            higher for a large checkpoint: one more step for each 1000 bytes. (A step takes about as long as reading
            1000 bytes.) The limits of the parts of tensors and of the entries about them rise in the same way. None
            if the size is not known: then there are only the fixed limits.
    """

    def __init__(self, stored_bytes: int | None = None) -> None:
        self._most = dict(_MOST)
        if stored_bytes is not None:
            self._most[Cost.RUNS] = min(_MOST[Cost.RUNS], _EXPANDED_RUNS + stored_bytes)
            self._most[Cost.BYTES] = max(_EXPANDED_BYTES, _MOST_COPIES * stored_bytes)
            self._most[Cost.STEPS] += stored_bytes // _BYTES_PER_STEP
            for cost in (Cost.CHUNKS, Cost.PLACES):
                self._most[cost] += stored_bytes // _BYTES_PER_PART
        self._spent = dict.fromkeys(Cost, 0)
        self._lock = threading.Lock()

    def spend(self, cost: Cost, count: int = 1) -> None:
        """Count `count` objects. Call this before they are created.

        Raises:
            CheckpointError: the count is now above the limit.
        """
        with self._lock:
            self._spent[cost] += count
            most = self._most.get(cost)
            if most is not None and self._spent[cost] > most:
                raise CheckpointError(
                    f"it has more than {most} {cost.value}, the most that Safepoint reads from one checkpoint"
                )

    def return_unused(self, cost: Cost, count: int) -> None:
        """Subtract `count` objects that `spend` has counted, but that were not created."""
        with self._lock:
            self._spent[cost] -= count
