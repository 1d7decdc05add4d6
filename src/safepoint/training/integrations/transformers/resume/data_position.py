"""The Trainer's place in its data, found again without reading what was seen, where the loader can.

The Trainer leaves out what was seen by Accelerate's `skip_first_batches`: of map-style data it skips indices, of a
stream it reads everything again and says nothing. Here a loader that keeps a state of its own, as Accelerate makes it
with `use_stateful_dataloader`, is given that state, and reading is watched. A sampler that draws its order from a
generator of its own begins each epoch where an uninterrupted run's would: nobody else remembers that generator.
"""

import contextlib
import copy
import importlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from safepoint.training.context.rank_context import RankContext
from safepoint.training.integrations.transformers.resume.trainer_state import is_plain
from safepoint.training.plain.data.rereading import read_past
from safepoint.training.state.rng import generators_of, other_generators


class DataPosition:
    """The place of one rank.

    Args:
        context: this rank.
        saved: the loader's state at the checkpoint; None when there is none that could be used.
        generators: see `RankState.generators`; those of the checkpoint.
    """

    def __init__(self, context: RankContext, saved: Any, generators: list[torch.Tensor]) -> None:
        self._context = context
        self._saved = saved
        self._saved_generators = generators
        self._generators: list[torch.Tensor] = generators
        self._num_generators = len(generators)
        self._loader: Any = None
        self._has_told = False

    @property
    def state(self) -> Any:
        """The loader's state, for a checkpoint of now; None when it has none, or one that cannot be stored."""
        if not _is_stateful(self._loader):
            return None
        state = self._loader.state_dict()
        if not is_plain(state):
            if not self._has_told:
                self._has_told = True
                self._context.log.warning(
                    "the data loader's state holds objects that are not stored; a resume reads what was seen"
                )
            return None
        return copy.deepcopy(state)  # a loader may go on with what it gave

    def generators(self, *, within_epoch: bool) -> list[torch.Tensor]:
        """For a checkpoint of now, see `RankState.generators`.

        Args:
            within_epoch: whether an epoch has begun and not ended.
        """
        if within_epoch or self._loader is None:
            return self._generators
        return [generator.get_state() for generator in generators_of(self._loader)]

    @contextlib.contextmanager
    def epoch(self, loader: Any) -> Generator[None]:
        """For the time of an epoch over `loader`: what it leaves out first is left out in the best way.

        Raises:
            ConflictError: by the Trainer's call, when other generators have shuffled what it leaves out.
        """
        if loader is not self._loader and _is_stateful(loader) and loader.num_workers:
            # Accelerate has begun the first epoch when it made the loader, with a sampler that it then replaced: an
            # order that cannot be found again. An empty state drops that beginning.
            loader.load_state_dict({})
        self._loader = loader
        generators, saved = generators_of(loader), self._saved_generators
        self._saved_generators = []
        if len(saved) == len(generators):
            for generator, state in zip(generators, saved, strict=True):
                generator.set_state(state)
        self._generators = [generator.get_state() for generator in generators]
        module: Any = importlib.import_module("transformers.trainer")
        original: Callable[[Any, int], Any] = module.skip_first_batches

        def skip(loader: Any, count: int) -> Any:
            module.skip_first_batches = original
            return self._without_first(loader, count, original)

        module.skip_first_batches = skip
        try:
            yield
        finally:
            module.skip_first_batches = original

    def _without_first(self, loader: Any, count: int, original: Callable[[Any, int], Any]) -> Any:
        is_stateful = _is_stateful(loader)
        if is_stateful and self._saved is not None:
            if self._saved.get("_iterator_finished"):
                # With such a state it would begin the next pass at once; that is begun anew when its turn comes.
                loader.load_state_dict({})
                return _Led(loader, lambda: iter(()))
            loader.load_state_dict(self._saved)
            return loader
        if is_stateful or isinstance(getattr(loader, "dataset", None), IterableDataset):
            return _Led(loader, lambda: read_past(iter(loader), count, self._tell))
        self._check_generators(loader)
        return original(loader, count)

    def _check_generators(self, loader: Any) -> None:
        before, now = self._num_generators, len(generators_of(loader))
        # No generator was noted: or nothing was, because the checkpoint was not written here.
        if before in {0, now} or _is_seeded(loader):
            return
        raise other_generators(before, now)

    def _tell(self, sentence: str) -> None:
        if self._context.place.is_first:
            self._context.log.info(sentence)


class _Led:
    """A loader that gives other batches than its own; everything else is the loader's."""

    def __init__(self, loader: Any, batches: Callable[[], Iterator[Any]]) -> None:
        self._loader = loader
        self._batches = batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._batches()


def _is_seeded(loader: Any) -> bool:
    """Whether the order comes from a seed, as Accelerate's sampler draws it: with a generator of its own, or one that
    it makes when it begins."""
    part = getattr(loader, "batch_sampler", None)
    for _ in range(8):  # those that Accelerate puts around it, and the one that is within
        inner = getattr(part, "batch_sampler", None)
        part = inner if inner is not None else getattr(part, "sampler", None)
        if hasattr(part, "initial_seed"):
            return True
    return False


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))
