"""Where a loop stands in its data, and how it gets back there.

- A loader that keeps its own state (`state_dict`, `load_state_dict`: torchdata's StatefulDataLoader) is asked for it.
- Of map-style data the indices of batches that were seen are drawn and thrown away; nothing is read.
- Of a stream the batches are read and thrown away, with a line that says how long that takes.

The order of an epoch is drawn from the random number states of its beginning; those are put back for the drawing, and
the states of the checkpoint after it. Generators that belong to the loader or its samplers count among them.

A loader that Accelerate has prepared is looked through: it counts its epochs by itself, and Accelerate's own function
leaves out what was seen. It reads one batch ahead: a data set that draws random numbers in this process draws others
after a resume.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, RandomSampler

from safepoint.training.plain.data.position import Position
from safepoint.training.plain.data.rereading import read_past
from safepoint.training.state.rng import capture_rng, generators_of, other_generators, restore_rng

ACCELERATED = "Accelerate's "
"""Before the kind of a sampler whose batches Accelerate deals out."""
GENERATED = " with a generator"
"""Behind the kind of one that draws from a generator of its own, which Accelerate keeps the same on all ranks."""

_SEEDED = f"{ACCELERATED}SeedableRandomSampler"
"""Draws from a seed and the number of the epoch; its generator need not be there before the first one."""


class Data:
    """The data of one loop; see `Feed`.

    Args:
        loader: a DataLoader, or anything that can be iterated once for each epoch.
        tell: see `read_past`.
    """

    def __init__(self, loader: Iterable[Any] | None, tell: Callable[[str], None]) -> None:
        self._loader = loader
        self._tell = tell
        self._has_state = (
            hasattr(loader, "state_dict")
            and hasattr(loader, "load_state_dict")
            and getattr(loader, "use_stateful_dataloader", True)
        )
        self._drop_begun()
        self._generators = generators_of(loader)
        self._generator_states: list[torch.Tensor] = []
        self._is_by_count = False
        self._resumed: Position | None = None
        self._rng: dict[str, Any] | None = None
        self.epoch = 0
        self.batches = 0
        self._epoch_rng: dict[str, Any] | None = None

    @property
    def is_iterator(self) -> bool:
        """Whether it can be iterated once only."""
        return isinstance(self._loader, Iterator)

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in an epoch; None when the loader cannot tell."""
        try:
            return len(self._loader)  # pyright: ignore[reportArgumentType]
        except TypeError:
            return None

    @property
    def batch_size(self) -> int:
        """Samples of this rank in a batch; 1 when the loader cannot tell."""
        size = getattr(self._loader, "batch_size", None)
        if size is None:
            size = getattr(getattr(self._loader, "batch_sampler", None), "batch_size", None)
        return int(size or 1)

    @property
    def sampler(self) -> str:
        """The kind of the loader's sampler; of one that Accelerate has prepared, that of the script's."""
        if not _is_accelerates(self._loader):
            return type(getattr(self._loader, "sampler", None)).__name__
        batches: Any = getattr(self._loader, "batch_sampler", None)
        while hasattr(batches, "batch_sampler"):  # those that Accelerate puts around it
            batches = batches.batch_sampler
        sampler = getattr(batches, "sampler", None)
        has_generator = isinstance(getattr(sampler, "generator", None), torch.Generator)
        return ACCELERATED + type(sampler).__name__ + GENERATED * has_generator * (type(sampler) is RandomSampler)

    def position(self) -> Position:
        """Where the loop stands now."""
        if self._resumed is not None:
            return self._resumed
        if self._epoch_rng is None:
            return self._beginning(self.epoch)
        state = self._loader.state_dict() if self._has_state and not self._is_by_count else None  # pyright: ignore
        return Position(
            epoch=self.epoch,
            batches=self.batches,
            epoch_rng=self._epoch_rng,
            loader=state,
            sampler=self.sampler,
            generators=self._generator_states,
        )

    def beginning(self) -> Position:
        """Where the next epoch begins."""
        return self._beginning(self.epoch + 1 if self._epoch_rng is not None else self.epoch)

    def _beginning(self, epoch: int) -> Position:
        states = [generator.get_state() for generator in self._generators]
        return Position(epoch=epoch, sampler=self.sampler, generators=states)

    def resume(self, position: Position, rng: dict[str, Any] | None) -> None:
        """Go on from `position`, with the random number states of that moment; None leaves those of then.

        Raises:
            ConflictError: it lies within an epoch that other generators have shuffled.
        """
        self._check_generators(position)
        self._drop_begun()
        self.epoch, self.batches, self._epoch_rng = position.epoch, position.batches, None
        self._resumed, self._rng = position, rng

    @property
    def is_given(self) -> bool:
        """Whether there is anything to iterate."""
        return self._loader is not None

    def epochs(self, count: int) -> Iterator[Iterator[Any]]:
        """The batches of each epoch that is left of `count`."""
        while self.epoch < count:
            yield self._epoch()
            self.end_epoch()

    def next_epoch(self, number: int) -> Iterator[Any]:
        """The batches of epoch `number`, or what is left of it; the one before is over, however far it was read."""
        if self._epoch_rng is not None:
            self.end_epoch()
        self.epoch = number
        yield from self._epoch()

    def end_epoch(self) -> None:
        """The running epoch is over."""
        self.epoch += 1
        self.batches, self._epoch_rng = 0, None

    def _epoch(self) -> Iterator[Any]:
        assert self._loader is not None
        resumed, self._resumed = self._resumed, None
        rng, self._rng = self._rng, None
        self._tell_epoch()
        if resumed is not None and len(resumed.generators) == len(self._generators):
            for generator, state in zip(self._generators, resumed.generators, strict=True):
                generator.set_state(state)
        if resumed is not None and resumed.epoch_rng is not None:
            restore_rng(resumed.epoch_rng)
        elif rng is not None:
            # The epoch begins with them. Once its order may have been drawn, they are not put back again.
            restore_rng(rng)
            rng = None
        self._epoch_rng = capture_rng()
        self._generator_states = [generator.get_state() for generator in self._generators]
        # Workers that stay keep the sampler by which they were led.
        self._is_by_count = self._is_by_count and bool(getattr(self._loader, "persistent_workers", False))
        batches = self._from(resumed)
        if rng is not None:
            if _is_accelerates(self._loader):
                batches = _begun(batches)  # it draws the order when the first batch is asked of it
            restore_rng(rng)
        for batch in batches:
            self.batches += 1
            yield batch

    def _check_generators(self, position: Position) -> None:
        before, now = len(position.generators), len(self._generators)
        is_over = self.num_batches is not None and position.batches >= self.num_batches
        if before == now or is_over or position.epoch_rng is None or self._is_stream:
            return
        # Accelerate may give a sampler a generator where there are several ranks; it is of another kind then.
        is_moved = self.sampler.startswith(ACCELERATED) and self.sampler != position.sampler
        if is_moved or self.sampler == _SEEDED:
            return
        raise other_generators(before, now)

    def _drop_begun(self) -> None:
        """Let a loader of Accelerate's that keeps a state start from the beginning.

        It has begun its first pass when it was made, with an order that cannot be found again, and `load_state` has
        given it a place for its next one, whichever that is.
        """
        loader: Any = self._loader
        if self._has_state and _is_accelerates(loader):
            loader.base_dataloader.load_state_dict({})
            loader.base_dataloader.next_iter_state = None

    def _tell_epoch(self) -> None:
        for sampler in (getattr(self._loader, "sampler", None), getattr(self._loader, "batch_sampler", None)):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)  # pyright: ignore
        if _is_accelerates(self._loader):
            self._loader.set_epoch(self.epoch)  # pyright: ignore

    def _from(self, resumed: Position | None) -> Iterator[Any]:
        """What the epoch has after a place in it; None is its beginning."""
        loader: Any = self._loader
        if resumed is None or not (resumed.batches or self._draws_late):
            return iter(loader)
        if self._has_state and resumed.loader is not None:
            if not _is_finished(resumed.loader):
                loader.load_state_dict(resumed.loader)
                return iter(loader)
            # With such a state it would begin the next pass at once. It is started again when its turn comes, from
            # where drawing this one's order leaves its generators; a stream draws none.
            if self._is_stream:
                loader.load_state_dict({})
                return iter(())
        return self._forward(resumed.batches)

    @property
    def _is_stream(self) -> bool:
        return isinstance(getattr(self._loader, "dataset", None), IterableDataset)

    @property
    def _draws_late(self) -> bool:
        """Whether a loader that goes on begins this epoch with its order, and one that is new with a seed.

        Workers that stay draw their seed before the first epoch only; all others before the order of each.
        """
        stays = bool(getattr(self._loader, "persistent_workers", False)) and not _is_accelerates(self._loader)
        return stays and self.epoch > 0

    def _forward(self, count: int) -> Iterator[Any]:
        """An epoch without its first `count` batches.

        A loader with a state of its own does not know of those that it has not seen: its state is not to be saved.
        """
        loader: Any = self._loader
        self._is_by_count = True
        if _is_accelerates(loader) and not self._is_stream:
            return iter(sys.modules["accelerate"].skip_first_batches(loader, count))
        name = "batch_sampler" if getattr(loader, "batch_sampler", None) is not None else "sampler"
        if self._is_stream or name not in getattr(loader, "__dict__", {}):
            self._is_by_count = False
            return read_past(iter(loader), count, self._tell)
        put_back = _keep_draws(self._generators) if self._draws_late else None
        skipping = _Skipping(vars(loader)[name], count, put_back)
        vars(loader)[name] = skipping  # the loader itself refuses to have its sampler exchanged
        try:
            batches = iter(loader)
        finally:
            vars(loader)[name] = skipping.sampler
        # Now, because the sampler may draw its order only when the first batch is asked of it.
        skipping.skip()
        return batches


def _begun(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches, the first of which has been fetched."""
    first = next(batches, _END)
    return iter(()) if first is _END else itertools.chain((first,), batches)


_END = object()


def _is_accelerates(loader: Any) -> bool:
    return hasattr(loader, "base_dataloader") and hasattr(loader, "iteration")


def _is_finished(state: Any) -> bool:
    """Whether the loader whose state this is has said that its pass is over, as torchdata's notes it."""
    return isinstance(state, dict) and bool(state.get("_iterator_finished"))  # pyright: ignore


def _keep_draws(generators: list[torch.Generator]) -> Callable[[], None]:
    """Return what puts all random number states back to what they are now."""
    rng, states = capture_rng(), [generator.get_state() for generator in generators]

    def put_back() -> None:
        restore_rng(rng)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    return put_back


class _Skipping:
    """A sampler without its first entries, once; the loader's workers draw from it ahead.

    Args:
        sampler: of single samples or of batches.
        count: entries to leave out.
        put_back: undoes what has been drawn before the order; with it the order is drawn as soon as the loader asks
            for the sampler, not for its first entry.
    """

    def __init__(self, sampler: Any, count: int, put_back: Callable[[], None] | None) -> None:
        self.sampler = sampler
        self._count = count
        self._put_back = put_back
        self._is_done = False
        self._entries: Iterator[Any] = iter(())

    def __iter__(self) -> "_Skipping":
        is_early = self._put_back is not None and not self._is_done
        if self._put_back is not None and is_early:
            self._put_back()  # a loader with workers asks twice before it begins
        self._entries = iter(self.sampler)
        if is_early:
            self._draw()
        return self

    def __len__(self) -> int:
        return len(self.sampler)

    def skip(self) -> None:
        """Leave out what is to be left out; from now on this is the whole sampler."""
        is_done, self._is_done = self._is_done, True
        if self._put_back is None and not is_done:
            self._draw()

    def _draw(self) -> None:
        for _ in range(self._count):
            next(self._entries, None)

    def __next__(self) -> Any:
        self.skip()
        return next(self._entries)
