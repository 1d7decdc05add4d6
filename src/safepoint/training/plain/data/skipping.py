"""Leaves out the batches of an epoch that were already trained on: skips their indices, or reads and drops them."""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from safepoint.foundation import clock
from safepoint.foundation.units import format_duration
from safepoint.training.state.rng import capture_rng, restore_generators, restore_rng

_REPORT_EVERY_S = 5.0
_END = object()


def skip_batches(batches: Iterator[Any], count: int, report: Callable[[str], None]) -> Iterator[Any]:
    """Read the first `count` batches and drop them, and report how long that takes.

    Args:
        batches: the batches of an epoch, from its start.
        count: how many batches to drop.
        report: called with a sentence every five seconds.
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


def can_skip_indices(loader: Any) -> bool:
    """Whether `without_first_indices` can be used for a DataLoader of map-style data."""
    return _sampler_name(loader) in getattr(loader, "__dict__", {})


@contextlib.contextmanager
def without_first_indices(loader: Any, count: int, restore: Callable[[], None] | None) -> Generator[None]:
    """Make the iterator that is created in the block leave out the loader's first `count` entries.

    The loader is the same after the block. No sample is read for the entries that are left out.

    Args:
        loader: a torch DataLoader of map-style data.
        count: how many batches to leave out; for a loader without batches, how many samples.
        restore: a function that `rng_restorer` has returned, or None. If it is a function, the order is drawn when
            the loader requests an iterator from its sampler. If None, the order may be drawn later, when the loader
            requests the first entry.
    """
    name = _sampler_name(loader)
    skipping = _Skipping(vars(loader)[name], count, restore)
    vars(loader)[name] = skipping  # the loader refuses a plain assignment
    try:
        yield
    finally:
        vars(loader)[name] = skipping.sampler
    # Skip now, because the sampler may draw its order only when the first entry is requested.
    skipping.skip()


def rng_restorer(generators: list[torch.Generator]) -> Callable[[], None]:
    """Return a function that restores the present random number states, and the present states of `generators`."""
    rng, states = capture_rng(), [generator.get_state() for generator in generators]

    def restore() -> None:
        restore_rng(rng)
        restore_generators(generators, states)

    return restore


def _sampler_name(loader: Any) -> str:
    return "batch_sampler" if getattr(loader, "batch_sampler", None) is not None else "sampler"


class _Skipping:
    """Wraps a sampler, and leaves out its first entries in one pass only.

    The entries are left out when the loader requests its first entry, or earlier. A loader with workers requests its
    first entry as soon as its iterator is made.

    Args:
        sampler: a sampler of single samples, or of batches.
        count: how many entries to leave out.
        restore: restores the random number states that were present before the order was drawn; see
            `without_first_indices`.
    """

    def __init__(self, sampler: Any, count: int, restore: Callable[[], None] | None) -> None:
        self.sampler = sampler
        self._count = count
        self._restore = restore
        self._is_done = False
        self._entries: Iterator[Any] = iter(())

    def __iter__(self) -> "_Skipping":
        is_early = self._restore is not None and not self._is_done
        if self._restore is not None and is_early:
            self._restore()  # in each call: a loader with workers calls `iter` twice before the first `next`
        self._entries = iter(self.sampler)
        if is_early:
            self._draw()
        return self

    def __len__(self) -> int:
        return len(self.sampler)

    def skip(self) -> None:
        """Leave out the first entries, unless they were left out already. Later passes yield all entries."""
        is_done, self._is_done = self._is_done, True
        if self._restore is None and not is_done:
            self._draw()

    def _draw(self) -> None:
        for _ in itertools.islice(self._entries, self._count):
            pass

    def __next__(self) -> Any:
        self.skip()
        return next(self._entries)
