"""Limits what the reading of one checkpoint may cost.

A pickle can refer to one object again and again. So a file of some kilobytes can describe a million weights, each in
a million pieces. Limits for one tensor or one file do not help: the cost is their product. All that is read from one
checkpoint therefore counts against one `Budget`.
Not promised: a limit of the memory in bytes. Each limit is a number of things, and a comment states what they take.
"""

import enum
import threading

from safepoint.errors import CheckpointError

_EXPANDED_RUNS = 1 << 20
_EXPANDED_BYTES = 1 << 30
_MOST_COPIES = 16
_STEPS = 100_000_000
_BYTES_PER_STEP = 1000


class Cost(enum.Enum):
    """What is counted. The value completes the message "it has more than 1000 …"."""

    RUNS = "contiguous pieces of weights"
    WEIGHTS = "weights"
    LETTERS = "letters in the names of weights"
    CHUNKS = "parts of tensors"
    PLACES = "places of parts of tensors"
    PATH_PARTS = "parts of names"
    STEPS = "instructions and records"
    BYTES = "bytes of weights"


_MOST = {
    Cost.RUNS: 1 << 23,  # 1.5 GB
    Cost.WEIGHTS: 1 << 20,  # 0.5 GB
    Cost.LETTERS: 1 << 26,  # the header of a safetensors file may have 100 MB
    # The metadata of one folder have about 700,000 parts at most: torch_file limits the instructions of a pickle. A
    # Trainer's checkpoint has two such folders.
    Cost.CHUNKS: 1 << 21,
    Cost.PLACES: 1 << 21,  # 0.8 GB
    Cost.PATH_PARTS: 1 << 22,  # 0.1 GB
    Cost.STEPS: _STEPS,  # 2 minutes
}


class Budget:
    """The costs that one checkpoint has left. Several threads may use it.

    Args:
        stored_bytes: the size of all files of the checkpoint. The weights may have no more runs than the files have
            bytes, and 2^20 runs in addition for expanded tensors. They may have at most 16 times the bytes of the
            files, or 1 GiB. A large checkpoint may take more steps: as many as take about as long as reading its
            bytes. None if the size is not known: then there are only the fixed limits.
    """

    def __init__(self, stored_bytes: int | None = None) -> None:
        self._most = dict(_MOST)
        if stored_bytes is not None:
            self._most[Cost.RUNS] = min(_MOST[Cost.RUNS], _EXPANDED_RUNS + stored_bytes)
            self._most[Cost.BYTES] = max(_EXPANDED_BYTES, _MOST_COPIES * stored_bytes)
            self._most[Cost.STEPS] += stored_bytes // _BYTES_PER_STEP
        self._spent = dict.fromkeys(Cost, 0)
        self._lock = threading.Lock()

    def spend(self, cost: Cost, count: int = 1) -> None:
        """Count `count` things. Call it before they are made.

        Raises:
            CheckpointError: there are more than the limit.
        """
        with self._lock:
            self._spent[cost] += count
            most = self._most.get(cost)
            if most is not None and self._spent[cost] > most:
                raise CheckpointError(
                    f"it has more than {most} {cost.value}, and Safepoint reads no more of one checkpoint"
                )

    def return_unused(self, cost: Cost, count: int) -> None:
        """Take back `count` things that `spend` has counted, and that were not made."""
        with self._lock:
            self._spent[cost] -= count
