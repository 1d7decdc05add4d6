"""Reads batches and drops them, for data that has neither indices nor a state, and reports how long it takes."""

from collections.abc import Callable, Iterator
from typing import Any

from safepoint.foundation import clock
from safepoint.foundation.units import format_duration

_REPORT_EVERY_S = 5.0
_END = object()


def skip_batches(batches: Iterator[Any], count: int, report: Callable[[str], None]) -> Iterator[Any]:
    """The iterator after its first `count` batches.

    Args:
        batches: from the start of an epoch.
        count: batches to drop.
        report: receives a sentence every five seconds.
    """
    began_s = reported_s = clock.monotonic_s()
    for done in range(1, count + 1):
        if next(batches, _END) is _END:
            break
        now_s = clock.monotonic_s()
        if now_s - reported_s > _REPORT_EVERY_S:
            reported_s = now_s
            left = format_duration((now_s - began_s) / done * (count - done))
            report(f"skipping batches that were already trained on: {done} of {count}, {left} left")
    return batches
