"""The fetches of a torch DataLoader, and the random numbers that they draw.

Reading a sample or putting a batch together may draw random numbers: a collator that masks tokens, an augmentation.
An exact resume has to draw the same ones again.

- Accelerate and Lightning fetch a batch before the previous one is trained on. At the end of a step that batch has
  drawn its numbers already, and a resume fetches it again. So this module copies the random number states before the
  samples of each batch are read. A resume sets those of the batch that it fetches first, and then those of the step.
- The workers of a loader have random number states of their own, which begin with the epoch. Each batch brings those
  of its worker along, if the worker has drawn from them. A resume starts each worker with its state, and lets it read
  the same batches as before: so the first batch that is read is a multiple of the number of workers, and up to one
  batch of each worker is read again.

Generators other than Python's, numpy's and torch's global ones are not saved, except those of the loader and its
samplers (`training.state.rng.generators_of`).
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

from safepoint.errors import CheckpointError
from safepoint.training.plain.data.skipping import can_skip_indices, rng_restorer, without_first_indices
from safepoint.training.state.rng import capture_host_rng, capture_rng, generators_of, restore_rng
from safepoint.training.state.temporary_attributes import temporarily

_log = logging.getLogger("safepoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resume:
    """How the next pass continues an epoch.

    Args:
        start: the number of the first fetch of the pass.
        first: the number of the first fetch that has not been trained on.
        last: the number of the fetch before which the states of the step are set.
        skips: whether the indices of the fetches before `start` are left out.
        later: whether this is not the first epoch; see `Fetches.resume`.
        rng: the states for the fetch `first`; empty if they are not known.
        workers: the states of the workers before the fetch `start`; empty if they are not known.
        then: sets the states of the step.
    """

    start: int
    first: int
    last: int
    skips: bool
    later: bool
    rng: dict[str, Any]
    workers: list[dict[str, Any] | None]
    then: Callable[[], None]


class Fetches:
    """Follows the fetches of one loader.

    Args:
        loader: a DataLoader, one that Accelerate has prepared, or any other object, which is not followed.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._base: Any = getattr(loader, "base_dataloader", loader)
        self.is_followed = _is_torchs(self._base)
        """Whether this class knows how the loader fetches."""
        self._number = 0
        self._rng: dict[int, dict[str, Any]] = {}
        self._resume: _Resume | None = None
        self._num_workers = 0
        self._newest: list[bytes | None] = []
        self._aligned: dict[int, list[bytes | None]] = {}
        if not self.is_followed:
            return
        self._base.__dict__.pop("_get_iterator", None)  # of a run before this one
        self._base._get_iterator = _weakly(self._begin_pass, self._base._get_iterator)
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
        """Fetches of this rank for a batch of the loader. Accelerate's dispatcher fetches those of all ranks."""
        if hasattr(self._loader, "_fetch_batches") and not self._loader.split_batches:
            return int(self._loader.state.num_processes)
        return 1

    def state(self, *, num_ahead: int | None = None) -> dict[str, Any]:
        """What `resume` needs, for a checkpoint.

        Args:
            num_ahead: batches that were fetched and not trained on; None if that is the loader's own matter.
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
        """Like `state`, at the end of an epoch. Only the states of workers that persist over epochs matter there."""
        return _of_workers(self._newest) if self._num_workers and self._base.persistent_workers else {}

    def resume(
        self, count: int, saved: Any, then: Callable[[], None], *, skips: bool, is_read: bool = False, later: bool
    ) -> None:
        """Let the loader's next pass continue an epoch.

        Args:
            count: batches of the loader that were trained on.
            saved: what `state` has returned.
            then: sets the random number states of the step. It is called when the batches that were ahead at the end
                of the step have been fetched, or by `finish`.
            skips: whether to leave out the batches by their indices. Otherwise the caller reads them, or the loader
                has a state of its own.
            is_read: whether the caller reads the batches.
            later: whether earlier epochs had the same persistent workers. A new loader draws a seed for its workers
                then, which an uninterrupted run would not draw.

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
            last=first + (per if is_ahead else 0),
            skips=skips,
            later=later,
            rng=rng,
            workers=workers,
            then=then,
        )

    def finish(self) -> None:
        """Set the random number states of the step, if `resume` was called and they have not been set since."""
        resume, self._resume = self._resume, None
        if resume is not None:
            resume.then()

    # ---- the loader's methods -------------------------------------------------------------------------------

    def _begin_pass(self, original: Callable[[], Any]) -> Any:
        """Override the method with which a DataLoader makes an iterator."""
        resume = self._resume
        self._number = 0 if resume is None else resume.start
        self._rng.clear()
        self._aligned.clear()
        self._newest = [None] * self._num_workers
        skipping = contextlib.nullcontext()
        states: list[dict[str, Any] | None] = []
        if resume is not None and resume.skips:
            states = resume.workers
            restore = rng_restorer(generators_of(self._loader)) if resume.later else None
            skipping = without_first_indices(self._base, resume.start, restore)
        if states:
            self._newest = [None if one is None else _packed(one) for one in states]
        with skipping, self._followed_workers(states):
            iterator = original()
        iterator._next_data = _weakly(self._fetch, iterator._next_data)
        if self._is_in_process:
            iterator._next_index = _weakly(self._draw_index, iterator._next_index)
        if self._num_workers and self._base.persistent_workers:
            iterator._reset = _weakly(self._begin_later_pass, iterator._reset)
        return iterator

    def _followed_workers(self, states: list[dict[str, Any] | None]) -> contextlib.AbstractContextManager[None]:
        """Let workers that start in the block begin with `states`, and send theirs with each batch."""
        base = self._base
        if not self._num_workers:
            return contextlib.nullcontext()
        collate = _Collate(base.collate_fn, is_always=bool(base.persistent_workers))
        return temporarily(base, collate_fn=collate, worker_init_fn=_Begin(base.worker_init_fn, states))

    def _begin_later_pass(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Override the method with which persistent workers begin a pass. Their states stay."""
        self._number = 0
        self._aligned.clear()
        return original(*args, **kwargs)

    def _fetch(self, original: Callable[[], Any]) -> Any:
        """Override the method with which an iterator fetches a batch."""
        resume = self._resume
        if resume is not None:
            while resume.skips and self._number < resume.first:
                self._take(original)
            if self._number >= resume.last:
                self.finish()
        return self._take(original)

    def _draw_index(self, original: Callable[[], Any]) -> Any:
        """Override the method with which an iterator without workers asks the sampler; then it reads the samples.

        The first call of a pass may draw the order of the whole epoch.
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


def _weakly(override: Any, original: Any) -> Callable[..., Any]:
    """A function that calls a method with the one that it overrides, and keeps the objects of neither alive.

    The workers of a loader end when its iterator is released.
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
    """The states in a checkpoint.

    Raises:
        CheckpointError: they are not such ones.
    """
    if not saved:
        return {}, []
    parts: Any = cast("dict[str, Any]", saved) if isinstance(saved, dict) else {}
    rng, workers = parts.get("rng", {}), parts.get("workers", [])
    if not isinstance(rng, dict) or not isinstance(workers, list) or not parts.keys() <= {"rng", "workers"}:
        raise CheckpointError("the checkpoint has invalid states of random number generators of a data loader")
    states = cast("list[Any]", [rng, *cast("list[Any]", workers)])
    before = capture_rng()
    try:
        for one in states:
            if one:
                restore_rng(one)  # raises an error that names the fault; in a worker, none would be seen
    finally:
        restore_rng(before)
    return cast("dict[str, Any]", rng), cast("list[dict[str, Any] | None]", workers)


_pin_memory: Any = importlib.import_module("torch.utils.data._utils.pin_memory").pin_memory


# ---- in a worker ------------------------------------------------------------------------------------------------


class _Fetched:
    """A batch, and the random number states of its worker after it was read; None if the worker has drawn nothing."""

    def __init__(self, batch: Any, rng: bytes | None) -> None:
        self.batch = batch
        self.rng = rng

    def pin_memory(self, *_: Any) -> "_Fetched":
        """Called by the loader where `pin_memory=True`."""
        return _Fetched(_pin_memory(self.batch), self.rng)


class _Begin:
    """A worker's first call: remembers the states that it begins with, or sets those that it continues with.

    Args:
        original: the loader's own `worker_init_fn`.
        states: of each worker, in a resumed run; otherwise empty.
    """

    unchanged: bytes | None = None
    """In a worker: the states that it began with."""

    def __init__(self, original: Callable[[int], Any] | None, states: list[dict[str, Any] | None]) -> None:
        self._original = original
        self._states = states

    def __call__(self, worker: int) -> None:
        if self._original is not None:
            self._original(worker)
        _Begin.unchanged = _packed(capture_host_rng())
        state = self._states[worker] if self._states else None
        if state is not None:
            restore_rng(state)


class _Collate:
    """Puts a batch together, and adds the worker's states to it.

    Args:
        original: the loader's own `collate_fn`.
        is_always: whether to add the states also if they are those that the worker began with. A resumed run has
            other workers where they persist over epochs, and they begin with other states.
    """

    def __init__(self, original: Callable[[Any], Any], *, is_always: bool) -> None:
        self._original = original
        self._is_always = is_always

    def __call__(self, samples: Any) -> Any:
        batch = self._original(samples)
        if get_worker_info() is None:
            return batch
        packed = _packed(capture_host_rng())
        return _Fetched(batch, packed if self._is_always or packed != _Begin.unchanged else None)


def _of_workers(packed: list[bytes | None]) -> dict[str, Any]:
    return {"workers": [None if one is None else _unpacked(one) for one in packed]} if any(packed) else {}


def _packed(states: dict[str, Any]) -> bytes:
    """The states as bytes. A worker would need a file descriptor to send the tensor in them."""
    return pickle.dumps({**states, "cpu": states["cpu"].numpy()})


def _unpacked(packed: bytes) -> dict[str, Any]:
    """The states that `_packed` was given, in this run."""
    states: dict[str, Any] = pickle.loads(packed)  # a worker of this process has sent it
    return {**states, "cpu": torch.as_tensor(states["cpu"])}
