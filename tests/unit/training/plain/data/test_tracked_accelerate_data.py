"""A loop's place in loaders that Accelerate has prepared."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, TensorDataset

from safepoint.training.plain.data import skipping
from safepoint.training.plain.data.tracked_data import TrackedData
from safepoint.training.state.rng import capture_rng

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("torchdata")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(14.0)


def _shuffled(kind: str = "DataLoaderShard", **options: Any) -> Any:
    data = TensorDataset(torch.arange(14.0))
    batches = BatchSampler(RandomSampler(data), batch_size=4, drop_last=False)
    return getattr(accelerate.data_loader, kind)(data, batch_sampler=batches, **options)


def _stream(**options: Any) -> Any:
    return accelerate.data_loader.DataLoaderShard(Stream(), batch_size=4, **options)


def _masked(samples: list[Any]) -> torch.Tensor:
    """As a collator of masked language models; it draws from all three global generators."""
    batch = torch.stack([torch.as_tensor(one[0] if isinstance(one, tuple) else one) for one in samples])
    return batch + torch.rand(()) / 4 + random.random() / 4 + float(np.random.rand()) / 4


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": _shuffled,
    "shuffled, keeping its own state": lambda: _shuffled(use_stateful_dataloader=True),
    "a stream": _stream,
    "a stream keeping its own state": lambda: _stream(use_stateful_dataloader=True),
    "masked": lambda: _shuffled(collate_fn=_masked),
    "masked by workers": lambda: _shuffled(collate_fn=_masked, num_workers=2),
    "masked by workers that stay": lambda: _shuffled(collate_fn=_masked, num_workers=2, persistent_workers=True),
    "masked, keeping its own state": lambda: _shuffled(collate_fn=_masked, use_stateful_dataloader=True),
    "masked and dispatched": lambda: _shuffled("DataLoaderDispatcher", collate_fn=_masked),
    "a masked stream": lambda: _stream(collate_fn=_masked),
    "a masked stream read by workers": lambda: _stream(collate_fn=_masked, num_workers=2),
    "a masked stream keeping its own state": lambda: _stream(collate_fn=_masked, use_stateful_dataloader=True),
}


@pytest.fixture(autouse=True)
def _no_state_is_left() -> Iterator[None]:
    yield
    accelerate.state.PartialState._reset_state()


def _walk(data: TrackedData, epochs: int) -> Iterator[tuple[int, list[float]]]:
    for batches in data.epochs(epochs):
        for batch in batches:
            tensor = batch[0] if isinstance(batch, list | tuple) else batch
            yield data.epoch, [*tensor.flatten().tolist(), torch.rand(()).item()]


def _ignore(*_: object) -> None:
    pass


@pytest.mark.parametrize("kind", list(LOADERS))
@pytest.mark.parametrize("count", [1, 3, 4, 6, 8])
@pytest.mark.parametrize("is_moved", [False, True])
def test_what_comes_after_a_resume(kind: str, count: int, is_moved: bool) -> None:
    """Three epochs in one go, and the same with a stop; after the last batch of one, too, and with other ranks."""
    if kind == "masked and dispatched" and count in {4, 8}:
        pytest.skip("Accelerate's dispatcher fails on an epoch of which nothing is left")
    accelerate.utils.set_seed(1)
    expected = list(_walk(TrackedData(LOADERS[kind](), _ignore), 3))

    accelerate.utils.set_seed(1)
    data = TrackedData(LOADERS[kind](), _ignore)
    walk = _walk(data, 3)
    first = [next(walk) for _ in range(count)]
    position, rng = data.position(), capture_rng()

    accelerate.utils.set_seed(7)  # another process
    loader = LOADERS[kind]()
    resumed = TrackedData(loader, _ignore)
    if position.loader is not None:
        loader.load_state_dict(position.loader)  # as Accelerate's load_state does
    resumed.resume(dataclasses.replace(position, loader=None) if is_moved else position, rng)
    assert first + list(_walk(resumed, 3)) == expected


def test_a_stream_that_is_read_again_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take as long as the epoch did."""
    monkeypatch.setattr(skipping, "_REPORT_EVERY_S", -1.0)
    data = TrackedData(_stream(), _ignore)
    walk = _walk(data, 1)
    for _ in range(2):
        next(walk)
    reported: list[str] = []
    resumed = TrackedData(_stream(), reported.append)
    resumed.resume(data.position(), capture_rng())
    assert [batch[0] for _, batch in _walk(resumed, 1)] == [8.0, 12.0]
    assert "skipping batches that were already trained on: 2 of 2" in reported[-1]


def test_a_seeded_sampler_needs_no_generator() -> None:
    """It makes one when it begins, and the order is that of its seed."""
    data = TensorDataset(torch.arange(14.0))

    def made() -> Any:
        sampler = accelerate.data_loader.SeedableRandomSampler(data, data_seed=5)
        batches = BatchSampler(sampler, batch_size=4, drop_last=False)
        return accelerate.data_loader.DataLoaderShard(data, batch_sampler=batches)

    used = made()
    expected = [batch[0].tolist() for batch in used]
    first = TrackedData(used, _ignore)
    next(_walk(first, 1))
    assert len(first.position().generators) == 1
    resumed = TrackedData(made(), _ignore)
    resumed.resume(first.position(), capture_rng())
    assert [batch[:-1] for _, batch in _walk(resumed, 1)] == expected[1:]
