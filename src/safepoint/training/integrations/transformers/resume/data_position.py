"""The Trainer's position in its data, restored from the loader's own state if the loader has one.

The Trainer skips batches with Accelerate's `skip_first_batches`, which makes a second loader. The second loader lacks
the batch size, so `gather_for_metrics` no longer removes the samples that fill up the last batch of an epoch. The
second loader also reads a stream again from the start, without any message.

With this module, the Trainer keeps its own loader. If the loader can save its own state (Accelerate's
`use_stateful_dataloader`), the state in the checkpoint is loaded. If it cannot, and the samples have indices, the
indices of the earlier batches are skipped. The samples of a stream have no indices. So a stream is read again, and a
message reports this. If a sampler has a generator of its own, the order of an epoch depends on the generator's state
at the start of the epoch. The Trainer does not save this state, so this module does.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import IterableDataset

from safepoint.checkpoint.pickles.loading import states_of
from safepoint.training.context.rank_context import RankContext
from safepoint.training.plain.data.fetches import WHERE, Fetches
from safepoint.training.plain.data.skipping import skip_batches
from safepoint.training.state.plain_values import is_plain
from safepoint.training.state.rng import generators_of, other_generators, restore_generators


class DataPosition:
    """The position of one rank.

    Args:
        context: the context of this rank.
        saved: the loader's state in the checkpoint; None if the checkpoint has no state that fits this run.
        generators: the states of the generators in the checkpoint; see `RankState.generators`.
        fetched: the random number states in the checkpoint for the batches that were read ahead; see
            `RankState.fetched`.
        restore: sets the random number states of the checkpoint's step. Before this call, the batches that the
            interrupted run had read ahead are fetched again.
    """

    def __init__(
        self,
        context: RankContext,
        saved: Any,
        generators: list[torch.Tensor],
        fetched: Any = None,
        restore: Callable[[], None] = lambda: None,
    ) -> None:
        self._context = context
        self._saved = saved
        self._saved_fetched = fetched
        self._restore = restore
        self._fetches = Fetches(None)
        self._saved_generators = generators
        self._generators: list[torch.Tensor] = generators
        self._num_generators = len(generators)
        self._loader: Any = None
        self._has_warned = False
        self._draws_extra_seed = False

    @property
    def state(self) -> Any:
        """The loader's state, for a checkpoint; None if the loader keeps no state, or the state cannot be stored."""
        if not _is_stateful(self._loader):
            return None
        state = self._loader.state_dict()
        if not is_plain(state):
            if not self._has_warned:
                self._has_warned = True
                self._context.log.warning(
                    "the data loader's state contains objects that cannot be stored; to find its position, a resume "
                    "reads the earlier batches of the epoch again"
                )
            return None
        state = copy.deepcopy(state)  # a loader may later change the object that it has returned
        if _reads_nothing(self._loader) and isinstance(state, dict):
            # Such a loader updates its state only when a pass ends. Without this line, the state would say during the
            # next pass that the pass has ended.
            state["_iterator_finished"] = bool(self._loader.end_of_dataloader)
        return cast("Any", state)

    def generators(self, *, within_epoch: bool) -> list[torch.Tensor]:
        """The states of the generators, for a checkpoint; see `RankState.generators`.

        Args:
            within_epoch: whether an epoch has started and not ended.
        """
        if within_epoch or self._loader is None:
            return self._generators
        return [generator.get_state() for generator in generators_of(self._loader)]

    def fetched(self, *, within_epoch: bool) -> dict[str, Any]:
        """The random number states for the batches that were read ahead, for a checkpoint; see `RankState.fetched`.

        Args:
            within_epoch: whether an epoch has started and not ended.
        """
        return self._fetches.state() if within_epoch else self._fetches.state_between_epochs

    def begin_epoch(self, loader: Any, number: int = 0) -> None:
        """Record that an epoch over `loader` starts.

        In the first epoch of a resumed run, restore the generators' states.

        Args:
            loader: the Trainer's own loader.
            number: the number of the epoch, from 0.
        """
        self._draws_extra_seed = number > 0 and bool(getattr(loader, "persistent_workers", False))
        if loader is not self._loader:
            self._fetches = Fetches(loader)
            if self._draws_extra_seed and self._fetches.can_skip:
                self._fetches.resume(0, self._saved_fetched, lambda: None, skips=True, draws_extra_seed=True)
        if loader is not self._loader and _is_stateful(loader) and loader.num_workers:
            # When Accelerate made the loader, the loader started the first epoch. Afterwards Accelerate replaced the
            # sampler. The order of the first sampler cannot be reproduced. An empty state discards the started epoch.
            loader.load_state_dict({})
        self._loader = loader
        generators = generators_of(loader)
        restore_generators(generators, self._saved_generators)
        self._saved_generators = []
        self._generators = [generator.get_state() for generator in generators]

    def skip_first_batches(self, original: Callable[[Any, int], Any], loader: Any, count: int) -> Any:
        """Replaces the function that the Trainer calls to skip the first `count` batches of an epoch.

        Raises:
            CheckpointError: the loader's state is invalid.
            ConflictError: the run that wrote the checkpoint shuffled its data with another number of generators.
        """
        is_stateful = _is_stateful(loader)
        if is_stateful and self._saved is not None:
            with states_of(WHERE):
                is_finished = bool(self._saved.get("_iterator_finished"))
                # The state of a finished pass is not loaded: the loader would begin the next pass, and not end this
                # pass.
                loader.load_state_dict({} if is_finished else self._saved)
            if is_finished:
                return _LoaderOf(loader, lambda: iter(()))
            self._continue(0)
            return loader
        if is_stateful or isinstance(getattr(loader, "dataset", None), IterableDataset):
            self._continue(count, is_read=True)
            return _LoaderOf(loader, lambda: skip_batches(iter(loader), count, self._report))
        self._check_generators(loader)
        if not self._fetches.can_skip:
            return original(loader, count)
        self._continue(count, skips=True)
        return loader

    def _continue(self, count: int, *, skips: bool = False, is_read: bool = False) -> None:
        if self._fetches.is_followed:
            saved, extra = self._saved_fetched, self._draws_extra_seed
            self._fetches.resume(count, saved, self._restore, skips=skips, is_read=is_read, draws_extra_seed=extra)

    def _check_generators(self, loader: Any) -> None:
        before, now = self._num_generators, len(generators_of(loader))
        # `before` is 0 if the order came from no generator, or if another program wrote the checkpoint.
        if before in {0, now} or _is_seeded(loader):
            return
        raise other_generators(before, now)

    def _report(self, sentence: str) -> None:
        if self._context.place.is_first:
            self._context.log.info(sentence)


class _LoaderOf:
    """Wraps a loader and yields other batches. All other attributes come from the wrapped loader."""

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
    """Whether a seed determines the order. Accelerate has such a sampler, which makes a generator from its seed."""
    part = getattr(loader, "batch_sampler", None)
    for _ in range(8):  # Accelerate's wrappers, and the sampler in them
        inner = getattr(part, "batch_sampler", None)
        part = inner if inner is not None else getattr(part, "sampler", None)
        if hasattr(part, "initial_seed"):
            return True
    return False


def may_dispatch(trainer: Any) -> bool:
    """Whether the first rank may read the data for all ranks, so that the other ranks' loaders read nothing.

    Accelerate decides this when it makes the loader, after a checkpoint has been chosen.
    """
    asked: Any = getattr(getattr(trainer, "accelerator", None), "dispatch_batches", None)
    if asked is not None:
        return bool(asked)
    source = str(getattr(cast("Any", type(trainer)).get_train_dataloader, "__module__", ""))
    data: Any = trainer.train_dataset
    is_own_loader = source.partition(".")[0] not in {"transformers", "trl"}
    return is_own_loader or isinstance(data, IterableDataset) or not hasattr(data, "__len__")


def _reads_nothing(loader: Any) -> bool:
    """Whether the first rank reads the data of this loader, and this rank only receives batches."""
    is_dispatcher = any(base.__name__ == "DataLoaderDispatcher" for base in type(loader).__mro__)
    return is_dispatcher and int(loader.state.process_index) != 0


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))
