"""A loader with a state of its own, over a stream, as Accelerate makes it."""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.training.integrations.transformers.data_position import DataPosition

accelerate = pytest.importorskip("accelerate.data_loader")
pytest.importorskip("torchdata")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
SESSION: Any = SimpleNamespace()


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def loader() -> Any:
    return accelerate.DataLoaderShard(Stream(), use_stateful_dataloader=True, batch_size=2)


@pytest.mark.parametrize("seen", [1, 3, 4])
def test_a_pass_goes_on_and_ends(seen: int) -> None:
    """Also one of which everything was seen: nothing is left of it, and the next one is whole."""
    first, second = loader(), loader()
    batches = iter(first)
    for _ in range(seen):
        next(batches)
    position = DataPosition(SESSION, first.state_dict(), [])
    module: Any = importlib.import_module("transformers.trainer")
    with position.epoch(second):
        left = [batch.tolist() for batch in module.skip_first_batches(second, seen)]
    whole = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert left == whole[seen:]
    with position.epoch(second):
        assert [batch.tolist() for batch in second] == whole


def test_a_place_does_not_move_with_its_loader() -> None:
    """What a boundary remembers stays while the batches of the next step are fetched."""
    first = loader()
    position = DataPosition(SESSION, None, [])
    with position.epoch(first):
        batches = iter(first)
        next(batches)
        place = position.state
        next(batches)
        next(batches)
        assert place["_num_yielded"] == 1
        assert position.state["_num_yielded"] == 3
