"""Where a loop goes on with other ranks, and why it is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, TensorDataset

from safepoint.checkpoint.format.manifest import FileEntry, Manifest, Trigger
from safepoint.errors import ConflictError
from safepoint.training.plain.data.position import Position, rescale_position
from safepoint.training.plain.data.tracked_data import TrackedData

SAMPLES = TensorDataset(torch.arange(96))


def manifest(world_size: int, per_batch: int, accumulation: int = 1, epoch: float = 0.5) -> Manifest:
    return Manifest(
        run_id="run",
        attempt=1,
        step=5,
        epoch=epoch,
        trigger=Trigger.JIT,
        created="2026-11-21T00:00:00Z",
        world_size=world_size,
        global_batch=per_batch * accumulation,
        gradient_accumulation=accumulation,
        samples_seen=5 * per_batch,
        strategy="ddp",
        libraries={},
        files=(FileEntry(path="model.pt", size_bytes=1, digest="xxh3-128:" + 32 * "0"),),
    )


def data(batch_size: int, world_size: int, *, is_distributed: bool = True) -> TrackedData:
    sampler = DistributedSampler(SAMPLES, num_replicas=world_size, rank=0) if is_distributed else None
    return TrackedData(DataLoader(SAMPLES, batch_size=batch_size, sampler=sampler), lambda *_: None)


SHUFFLED = Position(batches=6, epoch_rng={}, sampler="RandomSampler")
OWN_STATE = Position(batches=6, epoch_rng={}, loader={}, sampler="DistributedSampler")
PLACE = Position(epoch=1, batches=6, epoch_rng={}, sampler="DistributedSampler")


def move(before: Manifest, now: TrackedData, world_size: int, place: Position = PLACE, **options: Any) -> Position:
    return rescale_position(place, before, now.progress(), world_size, **{"allow_change": False, **options})


def test_as_many_ranks_with_as_many_samples() -> None:
    """Nothing is changed, whatever the sampler and the loader's own state."""
    place = Position(epoch=1, batches=6, epoch_rng={}, sampler="RandomSampler", loader={"place": 3})
    assert move(manifest(2, 24, epoch=1.75), data(12, 2, is_distributed=False), 2, place) is place


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1), (2, 3), (4, 2)])
def test_other_ranks_with_as_many_samples_together(before: int, now: int) -> None:
    """The same number of batches was seen."""
    assert move(manifest(before, 24, accumulation=2), data(24 // now, now), now) == PLACE


@pytest.mark.parametrize(
    ("before", "now", "place", "text"),
    [
        (manifest(2, 24), data(12, 3), PLACE, "had 24 samples, and now has 36"),
        (manifest(2, 24), data(8, 2), PLACE, "had 24 samples, and now has 16"),
        (
            manifest(1, 24),
            data(12, 2),
            SHUFFLED,
            "order of RandomSampler",
        ),
        (manifest(2, 24), data(24, 1, is_distributed=False), PLACE, "order of SequentialSampler"),
        (
            manifest(2, 24),
            data(24, 1),
            OWN_STATE,
            "valid for one number of ranks only",
        ),
    ],
)
def test_what_would_repeat_or_leave_out_samples_is_refused(
    before: Manifest, now: TrackedData, place: Position, text: str
) -> None:
    """With the reason, and what to do; the option goes on."""
    world_size = {12: 3, 8: 2, 24: 1}[now.progress().batch_size] if text != "order of RandomSampler" else 2
    with pytest.raises(ConflictError, match=text) as refusal:
        move(before, now, world_size, place)
    assert "--allow-batch-change" in str(refusal.value.hint)
    allowed = move(before, now, world_size, place, allow_change=True)
    assert allowed.batches == 6 * 24 // (now.progress().batch_size * world_size)
    assert allowed.loader is None


def test_the_batch_that_would_fit_is_named() -> None:
    """Where there is one."""
    with pytest.raises(ConflictError) as refusal:
        move(manifest(2, 24), data(12, 3), 3)
    assert "batches of 8" in str(refusal.value.hint)


@pytest.mark.parametrize("sampler", ["RandomSampler", "SequentialSampler", "Accelerate's RandomSampler"])
def test_between_two_epochs(sampler: str) -> None:
    """No order is to be kept: also where the last batch is the newest, which is all batches of now."""
    begins = Position(epoch=2, sampler=sampler)
    assert move(manifest(2, 24, epoch=2.0), data(24, 1, is_distributed=False), 1, begins) == begins
    ends = Position(epoch=1, batches=4, epoch_rng={}, sampler=sampler, loader={"place": 4})
    moved_on = move(manifest(2, 24, epoch=2.0), data(8, 3), 3, ends)
    assert (moved_on.epoch, moved_on.batches, moved_on.loader) == (1, 4, None)
    with pytest.raises(ConflictError, match="had 24 samples, and now has 48"):
        move(manifest(2, 24, epoch=2.0), data(24, 2), 2, begins)


class Prepared:
    """A loader as Accelerate prepares it for one of several ranks."""

    base_dataloader = iteration = 0

    def __init__(self, sampler: Any, batch_size: int) -> None:
        inner = SimpleNamespace(sampler=sampler, batch_size=batch_size)
        self.batch_sampler = SimpleNamespace(batch_sampler=inner, batch_size=batch_size)
        self.batch_size = None


@pytest.mark.parametrize(
    ("sampler", "is_kept"),
    [
        (SequentialSampler(SAMPLES), True),
        (RandomSampler(SAMPLES, generator=torch.Generator()), True),
        (RandomSampler(SAMPLES), False),
    ],
    ids=["sequential", "one generator", "each draws for itself"],
)
def test_what_accelerate_deals_out(sampler: Any, is_kept: bool) -> None:
    """One order for all ranks is as good on another number of them."""
    now = TrackedData(Prepared(sampler, 8), lambda *_: None)  # type: ignore[arg-type]
    place = Position(batches=6, epoch_rng={}, sampler=now.sampler)
    assert now.sampler.startswith("Accelerate's ")
    if is_kept:
        assert move(manifest(2, 24), now, 3, place) == place
    else:
        with pytest.raises(ConflictError, match="order of Accelerate's RandomSampler"):
            move(manifest(2, 24), now, 3, place)


@pytest.mark.parametrize(("part", "batches"), [(0.5, 6), (1 / 12, 1), (11 / 12, 11)])
def test_data_of_another_length_are_refused_in_the_midst_of_an_epoch(part: float, batches: int) -> None:
    """The order is another one, whatever is left out of it."""
    place = Position(epoch=1, batches=batches, epoch_rng={}, sampler="DistributedSampler")
    before = manifest(1, 8, epoch=1 + part)
    assert move(before, data(8, 1), 1, place) == place
    shorter = TrackedData(DataLoader(TensorDataset(torch.arange(80)), batch_size=8), lambda *_: None)
    with pytest.raises(ConflictError, match=r"an epoch had 12 batches .* and has 10 now; training was not started"):
        move(before, shorter, 1, place)
    assert move(before, shorter, 1, place, allow_change=True) == place
    at_end = Position(epoch=1, batches=12, epoch_rng={}, sampler="DistributedSampler")
    assert move(manifest(1, 8, epoch=2.0), shorter, 1, at_end) == at_end
