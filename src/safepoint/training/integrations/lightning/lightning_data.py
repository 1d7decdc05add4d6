"""The position of a Lightning Trainer in its data.

Lightning itself restores the position of a loader only if the loader keeps its own state. Lightning reads any other
loader from its start, even if the run resumes in the middle of an epoch. So each loader is wrapped in a
`TrackedLoader`, whose `TrackedData` restores the position of any loader.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from safepoint.checkpoint.pickles.loading import states_of
from safepoint.errors import ConflictError
from safepoint.training.plain.data.position import DataProgress, Position, Shared
from safepoint.training.plain.data.tracked_data import TrackedData
from safepoint.training.state.rng import restore_rng

_MOST_LOADERS = 1024


class TrackedLoader:
    """Wraps a loader, and tracks the position in it. All other attributes come from the wrapped loader.

    Args:
        loader: the loader, as Lightning has prepared it.
        trainer: the Lightning Trainer, which counts the epochs.
        report: called with messages about skipped batches; see `skip_batches`.
    """

    def __init__(self, loader: Any, trainer: Any, report: Callable[[str], None]) -> None:
        self.loader = loader
        """The wrapped loader."""
        self.data = TrackedData(loader, report)
        """Reads the batches of the wrapped loader, and tracks the position."""
        self._trainer = trainer
        self._before: Position | None = None

    def __getattr__(self, name: str) -> Any:
        if name in {"state_dict", "load_state_dict"}:  # Lightning would save the first rank's state only
            raise AttributeError(name)
        return getattr(self.__dict__["loader"], name)

    @property
    def _iterator(self) -> Any:
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self.loader._iterator = value  # Lightning stops the loader's workers through this attribute

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # Lightning makes the iterator before it restores anything. This is harmless, because this method is a
        # generator: it reads no batch before the first `next`.
        batches = self.data.next_epoch(int(self._trainer.current_epoch))
        is_endless = self.data.num_batches is None
        while True:
            if is_endless:
                self._before = self.data.position()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def position(self, *, is_ahead: bool) -> Position:
        """The position after the last batch that was trained on.

        Args:
            is_ahead: whether Lightning has fetched one more batch than it has trained on.
        """
        if not is_ahead:
            return self.data.position()
        fetched = self.data.fetched(num_ahead=1)
        if self._before is not None:
            return dataclasses.replace(self._before, fetched=fetched)
        now = self.data.position()
        return dataclasses.replace(now, batches=now.batches - 1, taken=None, fetched=fetched)


class LightningData:
    """The data of a Lightning Trainer; see `plain.data.position.DataSource`.

    Args:
        trainer: a `lightning.pytorch.Trainer`.
        report: called with messages about skipped batches; see `skip_batches`.
    """

    def __init__(self, trainer: Any, report: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._report = report
        self.resumed: Position | None = None
        """The position of the checkpoint; None if the run did not resume, and after its first epoch has begun."""
        self._rng: dict[str, Any] = {}
        self.is_between_epochs = False
        """Whether an epoch has ended and the next epoch has not started."""

    def track(self, loader: Any) -> TrackedLoader:
        """Wrap a loader for training."""
        return TrackedLoader(loader, self._trainer, self._report)

    def untrack(self) -> None:
        """Put the wrapped loaders back into Lightning's loop, in place of their wrappers."""
        combined = self._trainer.fit_loop._combined_loader
        if combined is not None:
            combined.flattened = [getattr(one, "loader", one) for one in combined.flattened]

    @property
    def _loaders(self) -> list[TrackedLoader]:
        loop = self._trainer.fit_loop
        if loop._combined_loader is None:
            loop.setup_data()
        return [] if loop._combined_loader is None else list(loop._combined_loader.flattened)

    def progress(self) -> DataProgress:
        """See `DataSource`: Lightning's counts of epochs and batches, and the batch size of the first loader."""
        trainer, first = self._trainer, self._loaders[0].data.progress() if self._loaders else None
        in_epoch, done = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress.current.processed
        return DataProgress(
            epoch=int(trainer.current_epoch),
            batches=0 if self.is_between_epochs else int(done),
            num_batches=int(in_epoch) if in_epoch != float("inf") else None,
            batch_size=first.batch_size if first is not None else 1,
            sampler=first.sampler if first is not None else "",
        )

    def position(self) -> Position:
        """The position of the first loader. Its field `loader` has the positions of all loaders."""
        now = self.progress()
        if self.is_between_epochs:
            return Position(epoch=now.epoch, sampler=now.sampler, loader=self._next_epoch_starts())
        is_ahead = bool(getattr(self._trainer.fit_loop._data_fetcher, "batches", None))
        places = [loader.position(is_ahead=is_ahead) for loader in self._loaders]
        return Position(
            epoch=now.epoch,
            batches=now.batches,
            epoch_rng=places[0].epoch_rng if places else None,
            loader=[place.as_dict() for place in places],
            sampler=now.sampler,
        )

    def _next_epoch_starts(self) -> list[dict[str, Any]] | None:
        """Where each loader starts the next epoch; None if no loader has a generator of its own."""
        places = [loader.data.next_epoch_start() for loader in self._loaders]
        return [place.as_dict() for place in places] if any(place.generators for place in places) else None

    def shared(self, position: Position) -> Shared:
        """See `DataSource`. In Lightning, all ranks take their batches together.

        The positions in several loaders are not compared: a shorter loader may begin again within an epoch, and its
        length may differ between the ranks.
        """
        loaders = _loader_positions(position)
        only = (loaders[0].epoch, loaders[0].batches) if len(loaders) == 1 else ()
        return Shared((), (position.epoch, position.batches, len(loaders), *only))

    def positions(self, position: Position) -> list[Position]:
        """See `DataSource`: the position of the Trainer, and those of all loaders."""
        return [position, *_loader_positions(position)]

    def resume(self, position: Position, rng: dict[str, Any]) -> None:
        """See `DataSource`. The loaders get their positions later, in `begin_loop`.

        Raises:
            ConflictError: the position is in the middle of an epoch, and the number of ranks or the batch size has
                changed.
        """
        if position.batches and position.loader is None:
            raise ConflictError(
                "the checkpoint is from the middle of an epoch. Lightning cannot continue this epoch with another "
                "number of ranks or another batch size; training was not started",
                hint="use the number of ranks and the batch size of the run that wrote the checkpoint, resume from "
                "the end of an epoch, or start from the beginning with --from-scratch",
            )
        self.resumed, self._rng = position, rng
        self.is_between_epochs = not position.batches
        restore_rng(rng)

    def begin_loop(self) -> None:
        """In a resumed run, set the positions of the loaders. Lightning has just made the loaders."""
        position = self.resumed
        if position is None:
            return
        with states_of("the position of a data loader in the checkpoint"):
            places = _loader_positions(position)
        for number, loader in enumerate(self._loaders):
            place = places[number] if number < len(places) else Position(epoch=position.epoch)
            loader.data.resume(place, self._rng if position.batches else None)
        if position.batches:
            # Start the fetcher again: if the data is a stream, the fetcher has already read the start of the stream.
            iter(self._trainer.fit_loop._data_fetcher)

    def begin_epoch(self) -> None:
        """At the first epoch of a run that resumes between two epochs, restore the random number states."""
        self.is_between_epochs = False
        resumed, self.resumed = self.resumed, None
        if resumed is not None and not resumed.batches:
            restore_rng(self._rng)


def _loader_positions(position: Position) -> list[Position]:
    """The positions of all loaders, from the position that a checkpoint has."""
    states: list[dict[str, Any]] = position.loader or []
    if len(states) > _MOST_LOADERS:
        raise ValueError(f"there are positions of {len(states)} loaders, and {_MOST_LOADERS} is the limit")
    return [Position(**state) for state in states]
