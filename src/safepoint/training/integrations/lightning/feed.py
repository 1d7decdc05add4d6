"""The place of a Lightning Trainer in its data.

Lightning finds its place in loaders that keep a state of their own, and reads all others from their beginning in the
middle of an epoch. So each loader is wrapped: it draws its batches by way of `plain.data.Data`, which finds the place
of any loader.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from safepoint.errors import ConflictError
from safepoint.training.plain.data.data_state import Data
from safepoint.training.plain.data.position import Position
from safepoint.training.state.rng import restore_rng


class TrackedLoader:
    """A loader and its place; everything else is the loader's.

    Args:
        loader: as Lightning has prepared it.
        trainer: whose epochs it is for.
        tell: see `rereading.read_past`.
    """

    def __init__(self, loader: Any, trainer: Any, tell: Callable[[str], None]) -> None:
        self.loader = loader
        """What is wrapped."""
        self.data = Data(loader, tell)
        """Where it stands."""
        self._trainer = trainer
        self._before: Position | None = None

    def __getattr__(self, name: str) -> Any:
        if name in {"state_dict", "load_state_dict"}:  # Lightning would save by them, and for the first rank only
            raise AttributeError(name)
        return getattr(self.__dict__["loader"], name)

    @property
    def _iterator(self) -> Any:
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self.loader._iterator = value  # Lightning ends workers by it

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # A generator: Lightning makes an iterator before it has restored anything. The epoch begins with a batch.
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
        """The place of what has been trained on.

        Args:
            is_ahead: whether a batch has been fetched that waits for its step.
        """
        if not is_ahead:
            return self.data.position()
        if self._before is not None:
            return self._before
        now = self.data.position()
        return dataclasses.replace(now, batches=now.batches - 1)


class LightningFeed:
    """See `plain.position.Feed`.

    Args:
        trainer: a `lightning.pytorch.Trainer`.
        tell: see `rereading.read_past`.
    """

    def __init__(self, trainer: Any, tell: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._tell = tell
        self._resumed: Position | None = None
        self._rng: dict[str, Any] = {}
        self.is_between_epochs = False
        """Whether the running epoch has been ended and the next one has not begun."""

    def track(self, loader: Any) -> TrackedLoader:
        """Wrap a loader for training."""
        return TrackedLoader(loader, self._trainer, self._tell)

    def untrack(self) -> None:
        """Give Lightning's loop its loaders back."""
        combined = self._trainer.fit_loop._combined_loader
        if combined is not None:
            combined.flattened = [getattr(one, "loader", one) for one in combined.flattened]

    @property
    def _loaders(self) -> list[TrackedLoader]:
        loop = self._trainer.fit_loop
        if loop._combined_loader is None:
            loop.setup_data()
        return [] if loop._combined_loader is None else list(loop._combined_loader.flattened)

    @property
    def num_batches(self) -> int | None:
        """As Lightning counts them."""
        count = self._trainer.num_training_batches
        return int(count) if count != float("inf") else None

    @property
    def batch_size(self) -> int:
        """Of the first loader."""
        return self._loaders[0].data.batch_size if self._loaders else 1

    @property
    def sampler(self) -> str:
        """Of the first loader."""
        return self._loaders[0].data.sampler if self._loaders else ""

    @property
    def epoch(self) -> int:
        """As Lightning counts them."""
        return int(self._trainer.current_epoch)

    @property
    def batches(self) -> int:
        """Those that were trained on."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return 0 if self.is_between_epochs else int(progress.processed)

    def position(self) -> Position:
        """The first loader's, and in `loader` those of all."""
        if self.is_between_epochs:
            return Position(epoch=self.epoch, sampler=self.sampler, loader=self._begins())
        is_ahead = bool(getattr(self._trainer.fit_loop._data_fetcher, "batches", None))
        places = [loader.position(is_ahead=is_ahead) for loader in self._loaders]
        return Position(
            epoch=self.epoch,
            batches=self.batches,
            epoch_rng=places[0].epoch_rng if places else None,
            loader=[_as_plain(place) for place in places],
            sampler=self.sampler,
        )

    def _begins(self) -> list[dict[str, Any]] | None:
        """Where loaders begin the next epoch; None when that is the same on any number of ranks."""
        places = [loader.data.beginning() for loader in self._loaders]
        return [_as_plain(place) for place in places] if any(place.generators for place in places) else None

    def resume(self, position: Position, rng: dict[str, Any]) -> None:
        """See `Feed`; counts when the loop begins.

        Raises:
            ConflictError: the place in the middle of an epoch was left by another number of ranks.
        """
        if position.batches and position.loader is None:
            raise ConflictError(
                "Lightning's count of an epoch's batches cannot be kept with another number of ranks or another size "
                "of their batches; training was not started",
                hint="train as the run began, go on from the end of an epoch, or start a new run with --from-scratch",
            )
        self._resumed, self._rng = position, rng
        self.is_between_epochs = not position.batches
        restore_rng(rng)

    def begin_loop(self) -> None:
        """Lightning has made its loaders: those of a resumed run go to their places."""
        position = self._resumed
        if position is None:
            return
        states: list[dict[str, Any]] = position.loader or []
        places = [Position(**state) for state in states]
        for number, loader in enumerate(self._loaders):
            place = places[number] if number < len(places) else Position(epoch=position.epoch)
            loader.data.resume(place, self._rng if position.batches else None)
        if position.batches:
            iter(self._trainer.fit_loop._data_fetcher)  # a stream has been read ahead from its beginning

    def begin_epoch(self) -> None:
        """The epoch's hooks are being called next."""
        self.is_between_epochs = False
        resumed, self._resumed = self._resumed, None
        if resumed is not None and not resumed.batches:
            restore_rng(self._rng)


def _as_plain(position: Position) -> dict[str, Any]:
    return {field.name: getattr(position, field.name) for field in dataclasses.fields(position)}
