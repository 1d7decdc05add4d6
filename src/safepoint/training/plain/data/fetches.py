"""The fetches of a torch DataLoader, and the random numbers that they draw.

A fetch reads the samples of a batch and puts the batch together. It may draw random numbers, for example in a
collator that masks tokens, or in an augmentation. An exact resume has to draw the same numbers again.

- Accelerate and Lightning fetch a batch before the loop trains on the previous batch. So at the end of a step, the
  next batch is fetched already, and has drawn its random numbers. A resume has to fetch this batch again. For a
  loader without workers, this module copies the random number states before the samples of each batch are read. A
  resume restores the copy that was made for this batch, and fetches the batch. Only then it restores the states that
  the checkpoint has for the end of the step.
- Each worker of a loader has random number states of its own. These states are saved for map-style data, if the
  loader itself keeps no state. A persistent worker sends its states with each batch. Any other worker sends them only
  after it has drawn a number. A resume starts the new workers with these states. The workers read batches in turn. So
  a resume begins at a batch whose number is a multiple of the number of workers, and each worker reads the same
  batches as before. At most one batch of each worker is read again.

This module saves only the states of the global generators of Python, numpy and torch. `TrackedData`, and the
`DataPosition` of the Trainer, save the states of the generators of the loader and its samplers
(`training.state.rng.generators_of`). The states of other generators are not saved.
"""

import contextlib
import importlib
import logging
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from safepoint.checkpoint.pickles.loading import states_of
from safepoint.checkpoint.pickles.temporary_attributes import temporarily
from safepoint.errors import CheckpointError
from safepoint.training.plain.data.loader_states import check_loader_state
from safepoint.training.plain.data.skipping import can_skip_indices, rng_restorer, without_first_indices
from safepoint.training.state.rng import capture_host_rng, capture_rng, generators_of, restore_rng

WHERE = "the position of the data loader in the checkpoint"
"""How messages name the state of a loader."""
_log = logging.getLogger("safepoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resume:
    """How the next pass continues an epoch. Fetches are numbered from 0.

    Args:
        start: the number of the first fetch of the pass.
        first: the number of the first fetch whose batch has not been trained on.
        first_new: the number of the first fetch that the original run made after the checkpoint's step.
            `restore_step` is called before this fetch.
        skips: whether the sampler leaves out the indices of the fetches before `start`.
        has_state: whether the loader has loaded its own state. The loader uses this state when it makes its iterator.
        num_fetched: how many fetches the original run made for the batches that it trained on.
        draws_extra_seed: see `Fetches.resume`.
        rng: the random number states for the fetch `first`; empty if they are not known.
        workers: the states of the workers before the fetch `start`; empty if they are not known.
        restore_step: see `Fetches.resume`.
    """

    start: int
    first: int
    first_new: int
    skips: bool
    has_state: bool
    num_fetched: int
    draws_extra_seed: bool
    rng: dict[str, Any]
    workers: list[dict[str, Any] | None]
    restore_step: Callable[[], None]


class Fetches:
    """Follows the fetches of one loader.

    Args:
        loader: a DataLoader, or a loader that Accelerate has prepared. Any other object is allowed, but its fetches
            are not followed.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._base: Any = getattr(loader, "base_dataloader", loader)
        self.is_followed = _is_torchs(self._base)
        """Whether the fetches of the loader are followed: True for a loader of torch or of Accelerate."""
        self._number = 0
        self._rng: dict[int, dict[str, Any]] = {}
        self._resume: _Resume | None = None
        self._num_workers = 0
        self._newest: list[bytes | None] = []
        self._aligned: dict[int, list[bytes | None]] = {}
        if not self.is_followed:
            return
        self._base.__dict__.pop("_get_iterator", None)  # the override of an earlier training with this loader
        self._base._get_iterator = _weak_override(self._begin_pass, self._base._get_iterator)
        is_indexed = not isinstance(self._base.dataset, IterableDataset) and not hasattr(self._base, "state_dict")
        self._is_in_process = self._base.num_workers == 0
        if is_indexed and not self._is_in_process:
            self._num_workers = self._base.num_workers
            self._newest = [None] * self._num_workers

    @property
    def can_skip(self) -> bool:
        """Whether a resume can leave out batches by their indices."""
        is_stream = isinstance(getattr(self._base, "dataset", None), IterableDataset)
        return self.is_followed and not is_stream and can_skip_indices(self._base)

    @property
    def _is_ahead(self) -> bool:
        """Whether the loader fetches a batch before it yields the previous one."""
        return self._loader is not self._base

    @property
    def _per_batch(self) -> int:
        """Fetches per batch of the loader.

        Accelerate's dispatcher makes one fetch for each rank, unless it splits batches.
        """
        if hasattr(self._loader, "_fetch_batches") and not self._loader.split_batches:
            return int(self._loader.state.num_processes)
        return 1

    def state(self, *, num_ahead: int | None = None) -> dict[str, Any]:
        """The state that a checkpoint stores for `resume`.

        Args:
            num_ahead: how many batches were fetched but not trained on. None means 1 if Accelerate has prepared the
                loader and the loader has not reached its last batch. In all other cases, None means 0.
        """
        if num_ahead is None:
            num_ahead = int(self._is_ahead and not self._loader.end_of_dataloader)
        per = self._per_batch
        first = max(0, -(-self._number // per) - num_ahead) * per
        if not self._num_workers:
            return {"rng": self._rng[first]} if first in self._rng else {}
        workers = self._aligned.get(first - first % self._num_workers, self._newest)
        return _of_workers(workers)

    @property
    def state_between_epochs(self) -> dict[str, Any]:
        """Like `state`, for the end of an epoch: the states of persistent workers. Empty if there are none."""
        return _of_workers(self._newest) if self._num_workers and self._base.persistent_workers else {}

    def resume(
        self,
        count: int,
        saved: Any,
        restore_step: Callable[[], None],
        *,
        skips: bool,
        is_read: bool = False,
        draws_extra_seed: bool,
    ) -> None:
        """Make the loader's next pass continue an epoch.

        Args:
            count: batches of the epoch that were trained on.
            saved: what `state` has returned.
            restore_step: sets the random number states that the checkpoint has for the end of its step. The function
                is called before the first fetch that the original run made after this step, or by `finish`.
            skips: whether the sampler leaves out the indices of the batches that were trained on. If `skips` and
                `is_read` are both false, the loader starts after these batches, because of its own state.
            is_read: whether the caller reads the batches that were trained on, and drops them.
            draws_extra_seed: whether the workers are persistent and this is not the first epoch. If so, the new
                loader draws a seed for its workers. An uninterrupted run would not draw this seed.

        Raises:
            CheckpointError: `saved` is invalid.
        """
        per = self._per_batch
        rng, workers = _checked(saved)
        if workers and len(workers) != self._num_workers:
            _log.warning(
                "the data loader has %s workers, and had %s when the checkpoint was written: its workers draw other "
                "random numbers than in a run without interruption",
                self._num_workers,
                len(workers),
            )
            workers = []
        first = count * per if skips or is_read else 0
        start = first - first % max(1, self._num_workers) if skips else 0
        is_ahead = self._is_ahead or bool(rng)
        self._resume = _Resume(
            start=start,
            first=first,
            first_new=first + (per if is_ahead else 0),
            skips=skips,
            has_state=not (skips or is_read),
            num_fetched=count * per,
            draws_extra_seed=draws_extra_seed,
            rng=rng,
            workers=workers,
            restore_step=restore_step,
        )

    def finish(self) -> None:
        """Call the `restore_step` that `resume` has received, if it was not called before."""
        resume, self._resume = self._resume, None
        if resume is not None:
            resume.restore_step()

    # ---- the loader's methods -------------------------------------------------------------------------------

    def _begin_pass(self, original: Callable[[], Any]) -> Any:
        """Replaces the method with which a DataLoader makes an iterator."""
        resume = self._resume
        self._number = 0 if resume is None else resume.start
        self._rng.clear()
        self._aligned.clear()
        self._newest = [None] * self._num_workers
        skipping = contextlib.nullcontext()
        states: list[dict[str, Any] | None] = []
        if resume is not None and resume.skips:
            states = resume.workers
            restore = rng_restorer(generators_of(self._loader)) if resume.draws_extra_seed else None
            skipping = without_first_indices(self._base, resume.start, restore)
        if states:
            self._newest = [None if one is None else _packed(one) for one in states]
        with skipping, self._followed_workers(states):
            if resume is not None and resume.has_state:
                iterator = _continued(original, self._base, resume.num_fetched)
            else:
                iterator = original()
        iterator._next_data = _weak_override(self._fetch, iterator._next_data)
        if self._is_in_process:
            iterator._next_index = _weak_override(self._draw_index, iterator._next_index)
        if self._num_workers and self._base.persistent_workers:
            iterator._reset = _weak_override(self._begin_later_pass, iterator._reset)
        return iterator

    def _followed_workers(self, states: list[dict[str, Any] | None]) -> contextlib.AbstractContextManager[None]:
        """While the block runs, new workers begin with `states`. They send their states with their batches."""
        base = self._base
        if not self._num_workers:
            return contextlib.nullcontext()
        collate = _Collate(base.collate_fn, is_always=bool(base.persistent_workers))
        return temporarily(base, collate_fn=collate, worker_init_fn=_Begin(base.worker_init_fn, states))

    def _begin_later_pass(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces the method with which persistent workers begin a later pass. The workers keep their states."""
        self._number = 0
        self._aligned.clear()
        return original(*args, **kwargs)

    def _fetch(self, original: Callable[[], Any]) -> Any:
        """Replaces the method with which an iterator fetches a batch."""
        resume = self._resume
        if resume is not None:
            while resume.skips and self._number < resume.first:
                self._take(original)
            if self._number >= resume.first_new:
                self.finish()
        return self._take(original)

    def _draw_index(self, original: Callable[[], Any]) -> Any:
        """Replaces the method with which an iterator without workers draws indices, before it reads the samples.

        The first call of a pass may draw the order of the whole epoch. So the states are restored and copied after
        the call.
        """
        index = original()
        number, resume = self._number, self._resume
        if resume is not None and number == resume.first and resume.rng:
            restore_rng(resume.rng)
        self._rng[number] = capture_rng()
        self._rng.pop(number - 2 * self._per_batch, None)
        return index

    def _take(self, original: Callable[[], Any]) -> Any:
        number, num_workers = self._number, self._num_workers
        if num_workers and number % num_workers == 0:
            oldest = number - 2 * self._per_batch - num_workers
            self._aligned = {key: one for key, one in self._aligned.items() if key >= oldest}
            self._aligned[number] = list(self._newest)
        batch = original()
        if isinstance(batch, _Fetched):
            self._newest[number % num_workers] = batch.rng
            batch = batch.batch
        self._number = number + 1
        return batch


def _continued(make_iterator: Callable[[], Any], loader: Any, num_fetched: int) -> Any:
    """Make the iterator of a loader that has loaded its own state. An attacker may have written this state.

    Args:
        make_iterator: makes the iterator.
        loader: the loader.
        num_fetched: how many batches of the epoch the loader had fetched.

    Raises:
        CheckpointError: the loader cannot continue from its state.
    """
    with states_of(WHERE):
        check_loader_state(loader, num_fetched)
        return make_iterator()


def _weak_override(override: Any, original: Any) -> Callable[..., Any]:
    """A function that calls the method `override`, with the method `original` as its first argument.

    The returned function does not keep the objects of the two methods alive, because the workers of a loader end only
    when its iterator is released. If the object of `override` is gone, the function calls only `original`.
    """
    override_of, original_of = weakref.WeakMethod(override), weakref.WeakMethod(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        method, own = override_of(), original_of()
        assert own is not None
        return own(*args, **kwargs) if method is None else method(own, *args, **kwargs)

    return call


def _is_torchs(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and hasattr(cast("Any", loader), "_get_iterator")


def _checked(saved: Any) -> tuple[dict[str, Any], list[dict[str, Any] | None]]:
    """The entries `rng` and `workers` of a saved result of `Fetches.state`.

    Raises:
        CheckpointError: `saved` does not have this form, or a state is invalid.
    """
    if not saved:
        return {}, []
    parts: Any = cast("dict[str, Any]", saved) if isinstance(saved, dict) else {}
    rng, workers = parts.get("rng", {}), parts.get("workers", [])
    if not isinstance(rng, dict) or not isinstance(workers, list) or not parts.keys() <= {"rng", "workers"}:
        raise CheckpointError(
            "the checkpoint is damaged: the states of a data loader's random number generators are invalid"
        )
    states = cast("list[Any]", [rng, *cast("list[Any]", workers)])
    before = capture_rng()
    try:
        for one in states:
            if one:
                restore_rng(one)  # raises the error of an invalid state here, and not later in a worker
    finally:
        restore_rng(before)
    return cast("dict[str, Any]", rng), cast("list[dict[str, Any] | None]", workers)


_pin_memory: Any = importlib.import_module("torch.utils.data._utils.pin_memory").pin_memory


# ---- in a worker ------------------------------------------------------------------------------------------------


class _Fetched:
    """A batch from a worker.

    Args:
        batch: what the loader's own `collate_fn` has returned.
        rng: the worker's random number states after the read of the batch; None if they can be left out (`_Collate`).
    """

    def __init__(self, batch: Any, rng: bytes | None) -> None:
        self.batch = batch
        self.rng = rng

    def pin_memory(self, *_: Any) -> "_Fetched":
        """Pin the batch; a loader with `pin_memory=True` calls this method."""
        return _Fetched(_pin_memory(self.batch), self.rng)


class _Begin:
    """The `worker_init_fn`, which each worker calls first. It records initial states, and sets saved states.

    Args:
        original: the loader's own `worker_init_fn`.
        states: the saved states of each worker; empty if no states are to be set.
    """

    initial: bytes | None = None
    """In a worker: its random number states after the call of `original`, before the saved states are set."""

    def __init__(self, original: Callable[[int], Any] | None, states: list[dict[str, Any] | None]) -> None:
        self._original = original
        self._states = states

    def __call__(self, worker: int) -> None:
        if self._original is not None:
            self._original(worker)
        _Begin.initial = _packed(capture_host_rng())
        state = self._states[worker] if self._states else None
        if state is not None:
            restore_rng(state)


class _Collate:
    """Puts a batch together, and adds the worker's states to it.

    Args:
        original: the loader's own `collate_fn`.
        is_always: whether to add the states even if they are the worker's initial states. Persistent workers need
            this, because a resume replaces them by new workers, which have other initial states.
    """

    def __init__(self, original: Callable[[Any], Any], *, is_always: bool) -> None:
        self._original = original
        self._is_always = is_always

    def __call__(self, samples: Any) -> Any:
        batch = self._original(samples)
        if get_worker_info() is None:
            return batch
        packed = _packed(capture_host_rng())
        return _Fetched(batch, packed if self._is_always or packed != _Begin.initial else None)


def _of_workers(packed: list[bytes | None]) -> dict[str, Any]:
    return {"workers": [None if one is None else _unpacked(one) for one in packed]} if any(packed) else {}


def _packed(states: dict[str, Any]) -> bytes:
    """The states as bytes. An array replaces the tensor, because a tensor takes a file descriptor when it is sent."""
    return pickle.dumps({**states, "cpu": states["cpu"].numpy()})


def _unpacked(packed: bytes) -> dict[str, Any]:
    """The states that `_packed` has packed in this run. Bytes from a checkpoint must not be unpacked in this way."""
    states: dict[str, Any] = pickle.loads(packed)  # sent by a worker that this process has started
    return {**states, "cpu": torch.as_tensor(states["cpu"])}
