"""Checks the state of torchdata's StatefulDataLoader before the loader makes an iterator from it.

torchdata sets the attributes of its iterators from a state without a check. A value of another kind would raise an
error in a later batch, which names no file. A large count would make the loader read batches without end.

Promises: each field that torchdata itself writes has the kind and the range that torchdata gives it. The states of
the data set, of its iterator and of the sampler are not checked here: their own `load_state_dict` reads them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from safepoint.foundation.field_types import COUNT, FLAG, whole

_SEED = whole(0, (1 << 63) - 1)
_KINDS = {
    "_IterableDataset_len_called": COUNT.optional,
    "_base_seed": _SEED,
    "_iterator_finished": FLAG,
    "_num_workers": COUNT,
    "_shared_seed": _SEED.optional,
    "fetcher_ended": FLAG,
    "worker_id": COUNT,
}
_NUMBERS_OF_BATCHES = ("_num_yielded", "_sampler_iter_yielded", "_snapshot_step", "_steps_since_snapshot")
_PARTS = ("_snapshot", "_main_snapshot", "_worker_snapshots", "fetcher_state")
"""The fields that contain other fields of torchdata."""
_LEAST_LIMIT = 1000


def check_loader_state(loader: Any, num_batches: int) -> None:
    """Check the state that `loader` has loaded, and from which it makes its next iterator.

    Args:
        loader: a DataLoader. If it is not torchdata's loader, nothing is checked.
        num_batches: how many batches of the epoch were fetched. A loader may have fetched some more.

    Raises:
        ValueError: a field is invalid; the message names it.
    """
    most = whole(0, _LEAST_LIMIT + 2 * num_batches)
    kinds = _KINDS | dict.fromkeys(_NUMBERS_OF_BATCHES, most)
    kinds["_last_yielded_worker_id"] = whole(0, max(0, getattr(loader, "num_workers", 0) - 1))
    for name, value in _fields(getattr(loader, "next_iter_state", None)):
        if name in kinds:
            kinds[name].check(name, value)


def _fields(state: Any) -> Iterator[tuple[str, Any]]:
    """The fields of torchdata in `state` and in its parts. A part of another kind has none: torchdata refuses it."""
    if not isinstance(state, Mapping):
        return
    for name, value in cast("Mapping[Any, Any]", state).items():
        yield name, value
        if name == "_worker_snapshots" and isinstance(value, Mapping):
            for worker in cast("Mapping[Any, Any]", value).values():
                yield from _fields(worker)
        elif name in _PARTS:
            yield from _fields(value)
