"""The data of a loop, and the loop's position in the data, which a resume restores.

How a resume returns to the position:

- A loader with its own state (`state_dict`: torchdata's StatefulDataLoader) receives the state that was saved.
- For map-style data, the sampler draws the indices of the batches that were already trained on, and the resume drops
  these indices. No sample of these batches is read.
- For a stream, the resume reads these batches and drops them, and the log reports how long that takes.

The order of an epoch is drawn from the random number states at the start of the epoch. A resume restores these
states, lets the loader draw the order, and afterwards restores the states of the checkpoint's step. The generators of
the loader and of its samplers are also set to their states at the start of the epoch, and continue from there.

A loader that Accelerate has prepared counts its epochs by itself. After a resume, the loader would count from 0. So
this module sets the count at the start of each epoch.

When a sample is read, random numbers may also be drawn, for example in an augmentation. The module `fetches` restores
the states from which these numbers are drawn.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from safepoint.checkpoint.pickles.loading import states_of
from safepoint.training.plain.data.fetches import WHERE, Fetches
from safepoint.training.plain.data.position import ACCELERATED, GENERATED, DataProgress, Position, Shared
from safepoint.training.plain.data.skipping import skip_batches
from safepoint.training.state.rng import (
    capture_rng,
    generators_of,
    other_generators,
    restore_generators,
    restore_rng,
)

_SEEDED = f"{ACCELERATED}SeedableRandomSampler"
"""This sampler draws from a seed and the number of the epoch. It may create its generator in the first epoch."""


class TrackedData:
    """The data of one loop; see `DataSource`.

    Args:
        loader: a DataLoader, or anything that can be iterated once for each epoch.
        report: called with messages about skipped batches; see `skip_batches`.
    """

    def __init__(self, loader: Iterable[Any] | None, report: Callable[[str], None]) -> None:
        self.loader = loader
        self._report = report
        self._has_state = (
            hasattr(loader, "state_dict")
            and hasattr(loader, "load_state_dict")
            and getattr(loader, "use_stateful_dataloader", True)
        )
        self._drop_first_pass()
        self._fetches = Fetches(loader)
        self._generators = generators_of(loader)
        self._generator_states: list[torch.Tensor] = []
        self._is_by_count = False
        """Whether the position is saved as a number of batches, because the loader's own state would be wrong."""
        self._resumed: Position | None = None
        self._rng: dict[str, Any] | None = None
        self.epoch = 0
        self.batches = 0
        self._taken: int | None = 0
        self._epoch_rng: dict[str, Any] | None = None

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in an epoch; None when the loader has no length."""
        try:
            return len(self.loader)  # pyright: ignore[reportArgumentType]
        except TypeError:
            return None

    def progress(self) -> DataProgress:
        """See `DataSource`; the size of a batch is 1 if the loader does not state its size."""
        size = getattr(self.loader, "batch_size", None)
        if size is None:
            size = getattr(getattr(self.loader, "batch_sampler", None), "batch_size", None)
        return DataProgress(
            epoch=self.epoch,
            batches=self.batches,
            num_batches=self.num_batches,
            batch_size=int(size or 1),
            sampler=self.sampler,
        )

    @property
    def sampler(self) -> str:
        """The kind of the loader's sampler. For a loader of Accelerate, the kind of the script's sampler."""
        if not _is_accelerates(self.loader):
            return type(getattr(self.loader, "sampler", None)).__name__
        sampler = getattr(self._batch_sampler, "sampler", None)
        has_generator = isinstance(getattr(sampler, "generator", None), torch.Generator)
        return ACCELERATED + type(sampler).__name__ + GENERATED * has_generator * (type(sampler) is RandomSampler)

    @property
    def _batch_sampler(self) -> Any:
        """The batch sampler of the script; None if there is none, as for a stream."""
        batches: Any = getattr(self.loader, "batch_sampler", None)
        while hasattr(batches, "batch_sampler"):  # Accelerate's wrappers
            batches = batches.batch_sampler
        return batches

    def position(self) -> Position:
        """The loop's position now."""
        if self._resumed is not None:
            return self._resumed
        if self._epoch_rng is None:
            return self._start_of(self.epoch)
        state = self.loader.state_dict() if self._has_state and not self._is_by_count else None  # pyright: ignore
        return Position(
            epoch=self.epoch,
            batches=self.batches,
            taken=self._taken,
            epoch_rng=self._epoch_rng,
            loader=state,
            sampler=self.sampler,
            generators=self._generator_states,
            fetched=self.fetched(),
        )

    def fetched(self, *, num_ahead: int | None = None) -> dict[str, Any]:
        """See `Fetches.state`."""
        return self._fetches.state(num_ahead=num_ahead) if self._fetches.is_followed else {}

    def next_epoch_start(self) -> Position:
        """The position at the start of the next epoch."""
        return self._start_of(self.epoch + 1 if self._epoch_rng is not None else self.epoch)

    def _start_of(self, epoch: int) -> Position:
        states = [generator.get_state() for generator in self._generators]
        return Position(
            epoch=epoch,
            taken=self._taken,
            sampler=self.sampler,
            generators=states,
            fetched=self._fetches.state_between_epochs,
        )

    def shared(self, position: Position) -> Shared:
        """See `DataSource`.

        Ranks that have taken the same number of batches are at the same place, if their epochs have the same length,
        or if all of them are in the first epoch. A loop may leave out batches on some ranks only. Then these ranks
        have taken other numbers of batches, and may be at other places. A loop may also end an epoch early on some
        ranks only: then the number is None, and nothing is compared.
        """
        num_batches = self._exact_num_batches
        if position.taken is None or (num_batches is None and position.epoch):
            return Shared((), ())
        return Shared((position.taken, num_batches), (position.epoch, position.batches))

    def positions(self, position: Position) -> list[Position]:
        """See `DataSource`: the only position. A loader's own state is not examined."""
        return [position]

    @property
    def _exact_num_batches(self) -> int | None:
        """Batches of this rank in an epoch; None if they are not known, or the loader may state a wrong number."""
        if isinstance(self.loader, list | tuple):
            return len(cast("list[Any]", self.loader))
        return self.num_batches if type(self._batch_sampler) is BatchSampler and not self._is_stream else None

    def resume(self, position: Position, rng: dict[str, Any] | None) -> None:
        """Continue from `position`.

        Args:
            position: the position in a checkpoint.
            rng: the random number states that belong to the position; None keeps the current states.

        Raises:
            ConflictError: the position is within an epoch, and the number of the loader's generators has changed
                since the order of this epoch was drawn.
        """
        self._check_generators(position)
        self._drop_first_pass()
        self.epoch, self.batches, self._epoch_rng = position.epoch, position.batches, None
        self._taken = position.taken
        self._resumed, self._rng = position, rng

    def epochs(self, count: int) -> Iterator[Iterator[Any]]:
        """The batches of each remaining epoch, up to `count` epochs in all."""
        while self.epoch < count:
            yield self._epoch()
            self.end_epoch()

    def next_epoch(self, number: int) -> Iterator[Any]:
        """The remaining batches of epoch `number`. The previous epoch ends, even if batches of it are left."""
        if self._epoch_rng is not None:
            self.end_epoch()
        self.epoch = number
        yield from self._epoch()

    def end_epoch(self) -> None:
        """Record that the running epoch has ended."""
        if self.batches != self._exact_num_batches:
            self._taken = None
        self.epoch += 1
        self.batches, self._epoch_rng = 0, None

    def _epoch(self) -> Iterator[Any]:
        assert self.loader is not None
        resumed, self._resumed = self._resumed, None
        rng, self._rng = self._rng, None
        self._set_epoch()
        if resumed is not None:
            restore_generators(self._generators, resumed.generators)
        if resumed is not None and resumed.epoch_rng is not None:
            restore_rng(resumed.epoch_rng)
        elif rng is not None:
            # The epoch starts with these states. They must not be restored again after the order of the epoch has
            # been drawn.
            restore_rng(rng)
            rng = None
        self._epoch_rng = capture_rng()
        self._generator_states = [generator.get_state() for generator in self._generators]
        # Persistent workers keep their first sampler. If this sampler left out batches, the loader's own count stays
        # wrong.
        self._is_by_count = self._is_by_count and bool(getattr(self.loader, "persistent_workers", False))
        batches = self._batches_after(resumed, rng)
        for batch in batches:
            self._fetches.finish()
            self.batches += 1
            self._taken = None if self._taken is None else self._taken + 1
            yield batch
        self._fetches.finish()

    def _check_generators(self, position: Position) -> None:
        before, now = len(position.generators), len(self._generators)
        is_over = self.num_batches is not None and position.batches >= self.num_batches
        if before == now or is_over or position.epoch_rng is None or self._is_stream:
            return
        # With several ranks, Accelerate may add a generator to a sampler, which changes the sampler's kind.
        is_moved = self.sampler.startswith(ACCELERATED) and self.sampler != position.sampler
        if is_moved or self.sampler == _SEEDED:
            return
        raise other_generators(before, now)

    def _drop_first_pass(self) -> None:
        """Make a stateful loader of Accelerate start from the beginning.

        A stateful loader starts its first pass when it is created, with an order that cannot be reproduced. The
        Accelerator's `load_state` may also have set a position for the loader's next pass.
        """
        loader: Any = self.loader
        if self._has_state and _is_accelerates(loader):
            loader.base_dataloader.load_state_dict({})
            loader.base_dataloader.next_iter_state = None

    def _set_epoch(self) -> None:
        for sampler in (getattr(self.loader, "sampler", None), getattr(self.loader, "batch_sampler", None)):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)  # pyright: ignore
        if _is_accelerates(self.loader):
            self.loader.set_epoch(self.epoch)  # pyright: ignore

    def _batches_after(self, resumed: Position | None, rng: dict[str, Any] | None) -> Iterator[Any]:
        """The batches of the epoch after the position `resumed`; all batches if `resumed` is None.

        Args:
            resumed: the position that the run resumes from.
            rng: the random number states to set when the order has been drawn; None keeps the current states.
        """
        loader: Any = self.loader
        if resumed is None or not (resumed.batches or self._draws_extra_seed):
            batches = iter(loader)
        elif self._has_state and resumed.loader is not None and not _is_finished(resumed.loader):
            with states_of(WHERE):
                loader.load_state_dict(resumed.loader)
            return self._after_resume(resumed, rng)
        elif self._has_state and resumed.loader is not None and self._is_stream:
            # The saved state belongs to a finished pass. If the loader loaded this state, it would start the next
            # pass at once. So it gets an empty state instead. No order has to be drawn for a stream.
            loader.load_state_dict({})
            batches = iter(())
        else:
            # The loader has no saved state, or the state of a finished pass. A loader with the state of a finished
            # pass would start the next pass at once, so this state is not loaded. The order of this epoch is drawn,
            # and the batches that were trained on are skipped. Then the generators have the states that the rest of
            # the data needs.
            return self._skip(resumed, rng)
        if rng is not None:
            restore_rng(rng)
        return batches

    def _after_resume(
        self, resumed: Position, rng: dict[str, Any] | None, *, skips: bool = False, is_read: bool = False
    ) -> Iterator[Any]:
        """The batches of a pass that continues an epoch; see `Fetches.resume`."""
        loader: Any = self.loader
        self._fetches.resume(
            resumed.batches,
            resumed.fetched,
            lambda: None if rng is None else restore_rng(rng),
            skips=skips,
            is_read=is_read,
            draws_extra_seed=self._draws_extra_seed,
        )
        return skip_batches(iter(loader), resumed.batches, self._report) if is_read else iter(loader)

    @property
    def _is_stream(self) -> bool:
        return isinstance(getattr(self.loader, "dataset", None), IterableDataset)

    @property
    def _draws_extra_seed(self) -> bool:
        """Whether a new loader draws a worker seed here that an uninterrupted run would not draw.

        For persistent workers, a loader draws a seed only before the first epoch; for others, before each epoch.
        """
        return bool(getattr(self.loader, "persistent_workers", False)) and self.epoch > 0

    def _skip(self, resumed: Position, rng: dict[str, Any] | None) -> Iterator[Any]:
        """The batches of an epoch that were not trained on yet.

        A loader does not count the batches that its sampler skips, so the loader's own state is not saved.
        """
        self._is_by_count = self._fetches.can_skip
        if self._fetches.is_followed:
            return self._after_resume(resumed, rng, skips=self._is_by_count, is_read=not self._is_by_count)
        batches = skip_batches(iter(self.loader), resumed.batches, self._report)  # pyright: ignore
        if rng is not None:
            restore_rng(rng)
        return batches


def _is_accelerates(loader: Any) -> bool:
    return hasattr(loader, "base_dataloader") and hasattr(loader, "iteration")


def _is_finished(state: Any) -> bool:
    """Whether a loader's state says that its pass is over; the key is torchdata's."""
    return isinstance(state, dict) and bool(state.get("_iterator_finished"))  # pyright: ignore
