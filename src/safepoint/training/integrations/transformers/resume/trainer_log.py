"""Which entries of the Trainer's log (`log_history`) a resume keeps.

Another person may have written the checkpoint. The log stays in the Trainer's state, and each save writes it again.
So two kinds of entries could do harm. If an entry belongs to a later step, it would become a metric of the checkpoint
that the run writes at this step. The run would then keep the wrong checkpoint as the best checkpoint. If an entry has
many nested lists, it grows a hundredfold when the Trainer writes it with indentation. After the next save, the
Trainer's state would be too large to be read.
"""

import json
from typing import Any

_MOST_BYTES = 24 << 20
"""How many bytes the log may have when it is written. A state of more than 64 MiB is refused when it is read, and the
run still adds entries of its own."""
_INDENT = 2
"""The indentation with which the Trainer writes its state."""


def trusted_history(history: list[dict[str, Any]], *, step: int) -> list[dict[str, Any]]:
    """Return the entries, without entries of later steps. If the log is too large, the oldest are left out, too.

    Args:
        history: the log in the checkpoint.
        step: the step of the checkpoint.
    """
    past = [entry for entry in history if not _is_later(entry.get("step"), step)]
    left = _MOST_BYTES
    for number in reversed(range(len(past))):
        left -= _written_bytes(past[number], left)
        if left < 0:
            return past[number + 1 :]
    return past


def _is_later(of_entry: Any, step: int) -> bool:
    return isinstance(of_entry, int | float) and of_entry > step


def _is_short(value: Any) -> bool:
    return type(value) in {bool, float, type(None)} or (type(value) is int and abs(value) < 1 << 63)


def _written_bytes(entry: dict[str, Any], most: int) -> int:
    """How many bytes an entry has when the Trainer writes it. The count ends as soon as it is above `most`."""
    if all(name.isascii() and _is_short(value) for name, value in entry.items()):
        return 32 + sum(len(name) + 32 for name in entry)  # an upper bound, which is found quickly
    size = 0
    for text in json.JSONEncoder(indent=_INDENT).iterencode([[entry]]):
        size += len(text)
        if size > most:
            break
    return size
