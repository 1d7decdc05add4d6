"""A loop's place in its data: what comes after a resume is what would have come, batch for batch, draw for draw."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from safepoint.errors import ConflictError
from safepoint.training.plain.data.tracked_data import TrackedData
from safepoint.training.state.rng import capture_rng

NUM_SAMPLES = 22


class Noisy(Dataset[torch.Tensor]):
    """Reading a sample draws from the global generator, and is counted."""

    def __init__(self) -> None:
        self.num_read = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_read += 1
        return torch.tensor(float(index)) + torch.rand(()) / 2


class Stream(IterableDataset[torch.Tensor]):
    """Has no length and no index."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(float(NUM_SAMPLES))


def _numbers() -> TensorDataset:
    return TensorDataset(torch.arange(float(NUM_SAMPLES)))


def _sampled() -> DataLoader[Any]:
    data = _numbers()
    return DataLoader(data, sampler=RandomSampler(data), batch_size=None)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(_numbers(), batch_size=4),
    "shuffled": lambda: DataLoader(_numbers(), batch_size=4, shuffle=True),
    "shuffled, incomplete batch dropped": lambda: DataLoader(_numbers(), batch_size=4, shuffle=True, drop_last=True),
    "drawing while it reads": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "drawing in workers": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=2),
    "drawing in workers that stay": lambda: DataLoader(
        Noisy(), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "shuffled by workers": lambda: DataLoader(_numbers(), batch_size=4, shuffle=True, num_workers=2),
    "shuffled by workers that stay": lambda: DataLoader(
        _numbers(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "shuffled by a generator of its own": lambda: DataLoader(
        _numbers(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "shuffled by a generator of its own and workers that stay": lambda: DataLoader(
        _numbers(),
        batch_size=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
        num_workers=1,
        persistent_workers=True,
    ),
    "one sample at a time": _sampled,
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
    "a list": lambda: [torch.tensor([float(number)]) for number in range(6)],
    "keeping its own state": lambda: StatefulDataLoader(_numbers(), batch_size=4, shuffle=True),
    "keeping its own state, with workers that stay": lambda: StatefulDataLoader(
        _numbers(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "a stream keeping its own state": lambda: StatefulDataLoader(Stream(), batch_size=4),
}


def _walk(data: TrackedData, epochs: int) -> Iterator[tuple[int, list[float]]]:
    for batches in data.epochs(epochs):
        yield from _read(data, batches)


def _read(data: TrackedData, batches: Iterator[Any]) -> Iterator[tuple[int, list[float]]]:
    for batch in batches:
        tensor = batch[0] if isinstance(batch, list | tuple) else batch
        # What a model draws in a step.
        yield data.epoch, [*tensor.flatten().tolist(), torch.rand(()).item()]


def _ignore(*_: object) -> None:
    pass


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork", "ignore:.*set_vital")
@pytest.mark.parametrize("kind", list(LOADERS))
@pytest.mark.parametrize("stop", [1, 3, "end of an epoch", "second epoch"])
def test_what_comes_after_a_resume(kind: str, stop: int | str) -> None:
    """Three epochs in one go, and the same with a stop."""
    torch.manual_seed(1)
    expected = list(_walk(TrackedData(LOADERS[kind](), _ignore), 3))
    in_epoch = len([epoch for epoch, _ in expected if epoch == 0])
    count = {"end of an epoch": in_epoch, "second epoch": in_epoch + 2}.get(str(stop), stop)
    assert isinstance(count, int)

    torch.manual_seed(1)
    data = TrackedData(LOADERS[kind](), _ignore)
    walk = _walk(data, 3)
    first = [next(walk) for _ in range(count)]
    position, rng = data.position(), capture_rng()

    torch.manual_seed(7)  # another process
    resumed = TrackedData(LOADERS[kind](), _ignore)
    resumed.resume(position, rng)
    assert first + list(_walk(resumed, 3)) == expected


def test_what_was_seen_is_not_read_again() -> None:
    """Indices are drawn and thrown away; samples are not touched."""
    dataset = Noisy()
    data = TrackedData(DataLoader(Noisy(), batch_size=2, shuffle=True), _ignore)
    walk = _walk(data, 1)
    for _ in range(8):
        next(walk)
    resumed = TrackedData(DataLoader(dataset, batch_size=2, shuffle=True), _ignore)
    resumed.resume(data.position(), capture_rng())
    assert len(list(_walk(resumed, 1))) == 3
    assert dataset.num_read == 6


def test_the_loader_is_as_it_was() -> None:
    """Only the resumed epoch has another sampler."""
    loader = DataLoader(_numbers(), batch_size=4, shuffle=True)
    sampler = loader.batch_sampler
    data = TrackedData(loader, _ignore)
    walk = _walk(data, 1)
    next(walk)
    resumed = TrackedData(loader, _ignore)
    resumed.resume(data.position(), capture_rng())
    next(_walk(resumed, 1))
    assert loader.batch_sampler is sampler


def test_a_sampler_is_told_the_epoch() -> None:
    """As DistributedSampler wants it, in each epoch and on resume."""
    sampler = torch.utils.data.DistributedSampler(_numbers(), num_replicas=2, rank=0, seed=3)
    reported: list[int] = []
    sampler.set_epoch = reported.append  # type: ignore[method-assign]
    data = TrackedData(DataLoader(_numbers(), batch_size=4, sampler=sampler), _ignore)
    list(_walk(data, 2))
    assert reported == [0, 1]


def test_nothing_is_left_of_a_finished_run() -> None:
    """All epochs were seen."""
    data = TrackedData(DataLoader(_numbers(), batch_size=4), _ignore)
    list(_walk(data, 2))
    resumed = TrackedData(DataLoader(_numbers(), batch_size=4), _ignore)
    resumed.resume(data.position(), capture_rng())
    assert list(_walk(resumed, 2)) == []
    assert len(list(_walk(resumed, 3))) == 6


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork", "ignore:.*set_vital")
@pytest.mark.parametrize("kind", list(LOADERS))
def test_a_run_that_is_extended(kind: str) -> None:
    """A finished run goes on for more epochs, and is stopped in the first of these: all of it equals one go."""
    torch.manual_seed(1)
    expected = list(_walk(TrackedData(LOADERS[kind](), _ignore), 4))

    torch.manual_seed(1)
    data = TrackedData(LOADERS[kind](), _ignore)
    done = list(_walk(data, 2))
    position, rng = data.position(), capture_rng()

    torch.manual_seed(7)  # another process
    extended = TrackedData(LOADERS[kind](), _ignore)
    extended.resume(position, rng)
    walk = _walk(extended, 4)
    done += [next(walk) for _ in range(2)]
    position, rng = extended.position(), capture_rng()

    torch.manual_seed(9)  # and another one
    again = TrackedData(LOADERS[kind](), _ignore)
    again.resume(position, rng)
    assert done + list(_walk(again, 4)) == expected


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork", "ignore:.*set_vital")
@pytest.mark.parametrize("kind", list(LOADERS))
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_step_after_the_last_batch(kind: str, epochs: int) -> None:
    """What is saved when the loader has said that its epoch is over: nothing of it is left, and the next is whole."""
    torch.manual_seed(1)
    expected = list(_walk(TrackedData(LOADERS[kind](), _ignore), 4))

    torch.manual_seed(1)
    data = TrackedData(LOADERS[kind](), _ignore)
    rounds = data.epochs(4)
    done = [entry for _ in range(epochs) for entry in _read(data, next(rounds))]
    position, rng = data.position(), capture_rng()
    assert position.epoch == epochs - 1

    torch.manual_seed(7)  # another process
    resumed = TrackedData(LOADERS[kind](), _ignore)
    resumed.resume(position, rng)
    assert done + list(_walk(resumed, 4)) == expected


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork", "ignore:.*set_vital")
@pytest.mark.parametrize("kind", [kind for kind in LOADERS if "state" in kind])
def test_a_place_that_has_moved_to_other_ranks(kind: str) -> None:
    """The state of a loader that was led past what was seen is not saved: it does not know of that."""
    torch.manual_seed(1)
    expected = list(_walk(TrackedData(LOADERS[kind](), _ignore), 3))

    torch.manual_seed(1)
    data = TrackedData(LOADERS[kind](), _ignore)
    walk = _walk(data, 3)
    done = [next(walk) for _ in range(2)]
    for seed in (7, 8):
        place, rng = data.position(), capture_rng()
        torch.manual_seed(seed)  # another process
        data = TrackedData(LOADERS[kind](), _ignore)
        data.resume(dataclasses.replace(place, loader=None) if seed == 7 else place, rng)
        walk = _walk(data, 3)
        done += [next(walk) for _ in range(2)]
    assert done + list(walk) == expected


def _made(num_generators: int) -> DataLoader[Any]:
    data, own = _numbers(), torch.Generator().manual_seed(3)
    sampler = RandomSampler(data, generator=own if num_generators else None)
    return DataLoader(
        data, batch_size=4, sampler=sampler, generator=torch.Generator() if num_generators > 1 else None
    )


@pytest.mark.parametrize(("before", "now"), [(0, 1), (1, 0), (1, 2), (2, 1)])
def test_other_generators_within_an_epoch_are_refused(before: int, now: int) -> None:
    """The order of the rest would be another, without a message."""
    data = TrackedData(_made(before), _ignore)
    next(_walk(data, 1))
    resumed = TrackedData(_made(now), _ignore)
    with pytest.raises(ConflictError, match=f"drawn with {before} random generator.* has {now}, .*--from-scratch"):
        resumed.resume(data.position(), capture_rng())


@pytest.mark.parametrize("is_left", [False, True])
def test_other_generators_after_an_epoch_are_the_scripts_matter(is_left: bool) -> None:
    """Every epoch that comes is whole."""
    data = TrackedData(_made(1), _ignore)
    rounds = data.epochs(1)
    for _ in next(rounds):
        pass
    if is_left:
        next(rounds, None)
    resumed = TrackedData(_made(2), _ignore)
    resumed.resume(data.position(), capture_rng())
    assert len(list(_walk(resumed, 2))) == 6
