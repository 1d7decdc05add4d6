"""Reads past what was seen already, where data has no index and no state, and says how long that takes."""

from collections.abc import Callable, Iterator
from typing import Any

from safepoint.foundation import clock
from safepoint.foundation.units import format_duration

_TELL_EVERY_S = 5.0
_END = object()


def read_past(batches: Iterator[Any], count: int, tell: Callable[[str], None]) -> Iterator[Any]:
    """What comes after the first `count` batches, which are read and thrown away.

    Args:
        batches: from the beginning of an epoch.
        count: how many were seen.
        tell: given a sentence every five seconds.
    """
    began_s = told_s = clock.monotonic_s()
    for done in range(1, count + 1):
        if next(batches, _END) is _END:
            break
        now_s = clock.monotonic_s()
        if now_s - told_s > _TELL_EVERY_S:
            told_s = now_s
            left = format_duration((now_s - began_s) / done * (count - done))
            tell(f"reading what was seen already: {done} of {count} batches, {left} left")
    return batches
