"""The state of a data loader of its own, which the loader uses when it makes its iterator.

A loader does not check it. An error that names no file would end the run in each start.
"""

import copy
import functools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.errors import CheckpointError
from safepoint.training.integrations.transformers.resume.data_position import DataPosition
from safepoint.training.plain.data.position import Position
from safepoint.training.plain.data.tracked_data import TrackedData
from safepoint.training.state.rng import capture_rng

stateful = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
_DONE = 3


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(16))


class StreamWithState(torch.utils.data.IterableDataset):
    """A stream that continues from its own state."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Any:
        while self.number < 16:
            self.number += 1
            yield self.number - 1

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def loader_of(*, is_stream: bool, num_workers: int = 0, has_state: bool = False) -> Any:
    data: Any = (StreamWithState() if has_state else Stream()) if is_stream else list(range(16))
    return stateful.StatefulDataLoader(data, batch_size=2, num_workers=num_workers)


def state_after(loader: Any) -> dict[str, Any]:
    batches = iter(loader)
    for _ in range(_DONE):
        next(batches)
    return loader.state_dict()


@functools.cache
def _saved_with_workers() -> dict[str, Any]:
    return state_after(loader_of(is_stream=True, num_workers=1))


def _changed(state: Any, path: tuple[str, ...], value: Any) -> Any:
    changed = copy.deepcopy(state)
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    assert path[-1] in inner
    inner[path[-1]] = value
    return changed


def _in_session(loader: Any, state: Any) -> list[Any]:
    data = TrackedData(loader, print)
    data.resume(Position(batches=_DONE, epoch_rng=capture_rng(), loader=state), capture_rng())
    return [batch for batches in data.epochs(1) for batch in batches]


def _in_trainer(loader: Any, state: Any) -> list[Any]:
    loader.use_stateful_dataloader = True
    context: Any = SimpleNamespace(place=SimpleNamespace(is_first=True), log=logging.getLogger())
    data = DataPosition(context, state, [])
    data.begin_epoch(loader)
    return list(data.skip_first_batches(lambda one, count: one, loader, _DONE))


_OTHERS: list[Any] = [5, [1], "x", {"a": 1}, True, torch.ones(2)]
_COUNTS: list[Any] = ["x", None, -1, 1 << 80, 2.5, [1]]


@pytest.mark.parametrize("use", [_in_session, _in_trainer])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("state", _OTHERS)
def test_a_value_of_another_kind(use: Any, is_stream: bool, state: Any) -> None:
    with pytest.raises(CheckpointError, match="the position of the data loader"):
        use(loader_of(is_stream=is_stream), state)


@pytest.mark.parametrize("use", [_in_session, _in_trainer])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("count", _COUNTS)
def test_counts(use: Any, is_stream: bool, count: Any) -> None:
    loader = loader_of(is_stream=is_stream)
    hostile = {**state_after(loader), "_num_yielded": count, "_sampler_iter_yielded": count}
    with pytest.raises(CheckpointError, match="the position of the data loader"):
        use(loader_of(is_stream=is_stream), hostile)


@pytest.mark.parametrize("use", [_in_session, _in_trainer])
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_the_loader_saves(use: Any, is_stream: bool, tmp_path: Path) -> None:
    loader = loader_of(is_stream=is_stream)
    batches = use(loader_of(is_stream=is_stream), state_after(loader))
    assert [int(one) for batch in batches for one in batch] == list(range(2 * _DONE, 16))


_FIELDS: list[tuple[tuple[str, ...], Any]] = [
    (("_IterableDataset_len_called",), "x"),
    (("_IterableDataset_len_called",), -1),
    (("_num_yielded",), 10**12),
    (("_sampler_iter_yielded",), 10**12),
    (("_shared_seed",), "x"),
    (("_iterator_finished",), ""),
    (("fetcher_state", "fetcher_ended"), "no"),
]


@pytest.mark.parametrize("use", [_in_session, _in_trainer])
@pytest.mark.parametrize(("path", "value"), _FIELDS)
def test_fields(use: Any, path: tuple[str, ...], value: Any) -> None:
    """A value of another kind raised an error in a later batch; a large count made a start read without end."""
    state = state_after(loader_of(is_stream=True, has_state=True))
    with pytest.raises(CheckpointError, match="the position of the data loader"):
        use(loader_of(is_stream=True, has_state=True), _changed(state, path, value))


@pytest.mark.parametrize("use", [_in_session, _in_trainer])
def test_what_a_stream_with_a_state_saves(use: Any) -> None:
    state = state_after(loader_of(is_stream=True, has_state=True))
    batches = use(loader_of(is_stream=True, has_state=True), state)
    assert [int(one) for batch in batches for one in batch] == list(range(2 * _DONE, 16))


_WORKER_FIELDS: list[tuple[tuple[str, ...], Any]] = [
    (("_steps_since_snapshot",), -1),
    (("_steps_since_snapshot",), 10**12),
    (("_snapshot", "_snapshot_step"), 10**12),
    (("_snapshot", "_last_yielded_worker_id"), 10**12),
    (("_snapshot", "_main_snapshot", "_base_seed"), "x"),
    (("_snapshot", "_main_snapshot", "_IterableDataset_len_called"), "x"),
    (("_snapshot", "_worker_snapshots", "worker_0", "fetcher_state", "fetcher_ended"), "no"),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("path", "value"), _WORKER_FIELDS)
def test_fields_of_a_loader_with_workers(path: tuple[str, ...], value: Any) -> None:
    with pytest.raises(CheckpointError, match="the position of the data loader"):
        _in_session(loader_of(is_stream=True, num_workers=1), _changed(_saved_with_workers(), path, value))


def test_what_a_loader_with_workers_saves() -> None:
    batches = _in_session(loader_of(is_stream=True, num_workers=1), _saved_with_workers())
    assert [int(one) for batch in batches for one in batch] == list(range(2 * _DONE, 16))


class Failing(Stream):
    def __iter__(self) -> Any:
        raise KeyError("of the script")


def test_an_error_of_the_script() -> None:
    """Of a data set whose position is a number of batches: it is not a fault of the checkpoint."""
    data = TrackedData(torch.utils.data.DataLoader(Failing()), print)
    data.resume(Position(batches=_DONE, epoch_rng=capture_rng()), capture_rng())
    with pytest.raises(KeyError, match="of the script"):
        list(next(data.epochs(1)))
