"""The state of a data loader of its own, which the loader uses when it makes its iterator.

A loader does not check it. An error that names no file would end the run in each start.
"""

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


def loader_of(*, is_stream: bool) -> Any:
    return stateful.StatefulDataLoader(Stream() if is_stream else list(range(16)), batch_size=2)


def state_after(loader: Any) -> dict[str, Any]:
    batches = iter(loader)
    for _ in range(_DONE):
        next(batches)
    return loader.state_dict()


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


class Failing(Stream):
    def __iter__(self) -> Any:
        raise KeyError("of the script")


def test_an_error_of_the_script() -> None:
    """Of a data set whose position is a number of batches: it is not a fault of the checkpoint."""
    data = TrackedData(torch.utils.data.DataLoader(Failing()), print)
    data.resume(Position(batches=_DONE, epoch_rng=capture_rng()), capture_rng())
    with pytest.raises(KeyError, match="of the script"):
        list(next(data.epochs(1)))
