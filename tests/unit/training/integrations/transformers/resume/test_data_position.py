"""A loader with a state of its own, over a stream, as Accelerate makes it."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

from safepoint.errors import ConflictError
from safepoint.training.integrations.transformers.resume.data_position import DataPosition
from tests.support.contexts import rank_context

accelerate = pytest.importorskip("accelerate.data_loader")
pytest.importorskip("torchdata")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
CONTEXT = rank_context()


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.fixture(autouse=True)
def _no_state_is_left() -> Iterator[None]:
    yield
    accelerate.PartialState._reset_state()


def without_first(position: DataPosition, loader: Any, count: int) -> Any:
    """What the Trainer iterates over in an epoch of which it skips `count` batches."""
    position.begin_epoch(loader)
    return position.skip_first_batches(accelerate.skip_first_batches, loader, count)


def loader() -> Any:
    return accelerate.DataLoaderShard(Stream(), use_stateful_dataloader=True, batch_size=2)


@pytest.mark.parametrize("seen", [1, 3, 4])
def test_a_pass_goes_on_and_ends(seen: int) -> None:
    """Also one of which everything was seen: nothing is left of it, and the next one is whole."""
    first, second = loader(), loader()
    batches = iter(first)
    for _ in range(seen):
        next(batches)
    position = DataPosition(CONTEXT, first.state_dict(), [])
    left = [batch.tolist() for batch in without_first(position, second, seen)]
    whole = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert left == whole[seen:]
    position.begin_epoch(second)
    assert [batch.tolist() for batch in second] == whole


def test_a_place_does_not_move_with_its_loader() -> None:
    """What a boundary remembers stays while the batches of the next step are fetched."""
    first = loader()
    position = DataPosition(CONTEXT, None, [])
    position.begin_epoch(first)
    batches = iter(first)
    next(batches)
    place = position.state
    next(batches)
    next(batches)
    assert place["_num_yielded"] == 1
    assert position.state["_num_yielded"] == 3


class Shuffled(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def shuffled(num_generators: int) -> Any:
    generators = [torch.Generator().manual_seed(number) for number in range(num_generators)]
    sampler = RandomSampler(Shuffled(), generator=generators[0] if generators else None)
    options = {"generator": generators[1]} if num_generators > 1 else {}
    batches = BatchSampler(sampler, batch_size=2, drop_last=False)
    return accelerate.DataLoaderShard(Shuffled(), batch_sampler=batches, **options)


def seeded() -> Any:
    sampler = accelerate.SeedableRandomSampler(Shuffled(), data_seed=3)
    batches = BatchSampler(sampler, batch_size=2, drop_last=False)
    shared = accelerate.BatchSamplerShard(batches, num_processes=2, process_index=0)
    return accelerate.DataLoaderShard(Shuffled(), batch_sampler=shared)


@pytest.mark.parametrize(("before", "now"), [(1, 0), (1, 2), (2, 1)])
def test_other_generators_within_an_epoch_are_refused(before: int, now: int) -> None:
    """The order of the rest would be another, without a message."""
    states = [torch.Generator().get_state()] * before
    with pytest.raises(ConflictError, match=f"drawn with {before} random generator.* has {now}, .*--from-scratch"):
        without_first(DataPosition(CONTEXT, None, states), shuffled(now), 1)


@pytest.mark.parametrize(("before", "make"), [(0, lambda: shuffled(1)), (1, lambda: shuffled(1)), (1, seeded)])
def test_generators_that_are_as_they_were(before: int, make: Callable[[], Any]) -> None:
    """Or of which nothing was noted; or that a seeded sampler makes when it begins."""
    loader = make()
    position = DataPosition(CONTEXT, None, [torch.Generator().get_state()] * before)
    left = list(without_first(position, loader, 1))
    assert len(left) == len(loader) - 1


def test_what_fills_up_the_last_batch_is_known_after_a_resume() -> None:
    """`gather_for_metrics` removes it, by the loader's `remainder`."""

    def made() -> Any:
        batches = BatchSampler(RandomSampler(Shuffled()), batch_size=3, drop_last=False)
        shared = accelerate.BatchSamplerShard(batches, num_processes=2, process_index=0)
        return accelerate.DataLoaderShard(Shuffled(), batch_sampler=shared)

    whole = made()
    assert [(one.end_of_dataloader, one.remainder) for one in [whole] for _ in one] == [(False, 2), (True, 2)]
    position = DataPosition(CONTEXT, None, [])
    resumed = without_first(position, made(), 1)
    assert [(resumed.end_of_dataloader, resumed.remainder) for _ in resumed] == [(True, 2)]
    assert len(list(resumed)) == 2  # the next epoch is whole


class DataLoaderDispatcher:
    """As Accelerate's loader on a rank that receives its batches: it updates its state only when a pass ends."""

    use_stateful_dataloader = True
    num_workers = 0
    end_of_dataloader = False

    def __init__(self, rank: int) -> None:
        self.state = SimpleNamespace(process_index=rank)

    def state_dict(self) -> dict[str, Any]:
        return {"_num_yielded": 0, "_iterator_finished": True}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_receives_its_batches_has_not_ended_the_next_pass(rank: int) -> None:
    loader = DataLoaderDispatcher(rank)
    position = DataPosition(SimpleNamespace(), None, [])  # pyright: ignore
    position._loader = loader  # pyright: ignore
    assert position.state["_iterator_finished"] is (rank == 0)
    loader.end_of_dataloader = True
    assert position.state["_iterator_finished"]
