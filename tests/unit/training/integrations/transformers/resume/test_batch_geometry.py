"""The epoch of `Geometry` against accelerate's own sharding, walked through batch by batch."""

import itertools

import pytest

from safepoint.training.integrations.transformers.resume.batch_geometry import BatchGeometry


def walk(num_samples: int, batch: int, ranks: int, *, drop_last: bool) -> list[list[int]]:
    """The samples of each micro-step over all ranks, as torch batches them and accelerate deals them out."""
    batches = [list(range(start, min(start + batch, num_samples))) for start in range(0, num_samples, batch)]
    if drop_last:
        batches = [samples for samples in batches if len(samples) == batch]
    dealt = [list(group) for group in (batches[start : start + ranks] for start in range(0, len(batches), ranks))]
    if drop_last:
        dealt = [group for group in dealt if len(group) == ranks]
    return [list(itertools.chain.from_iterable(group)) for group in dealt]


GRID = list(itertools.product(range(1, 60, 2), (1, 2, 3, 5), (1, 2, 3), (1, 2, 3, 4), (True, False)))


def test_steps_and_samples_of_every_step_are_those_of_the_walk() -> None:
    """For 2880 shapes of run: as many steps as the walk has, and as many samples after each of them."""
    for num_samples, batch, accumulation, ranks, drop_last in GRID:
        micro_steps = walk(num_samples, batch, ranks, drop_last=drop_last)
        geometry = BatchGeometry(
            world_size=ranks,
            accumulation=accumulation,
            global_batch=batch * accumulation * ranks,
            num_samples=num_samples,
            drop_last=drop_last,
        )
        shape = (num_samples, batch, accumulation, ranks, drop_last)
        steps = [micro_steps[start : start + accumulation] for start in range(0, len(micro_steps), accumulation)]
        assert geometry.steps_per_epoch == max(1, len(steps)), shape
        if not steps:
            continue
        seen = 0
        for step in range(2 * len(steps) + 1):
            assert geometry.samples_seen(step=step, epoch=0.0, regular=True) == seen, (shape, step)
            micro_done = (step % len(steps)) * accumulation
            epoch = step // len(steps) + micro_done / len(micro_steps)
            assert geometry.samples_seen(step=step + 7, epoch=epoch, regular=False) == seen, (shape, step)
            place = geometry.position(seen, epoch=epoch, before=geometry)
            assert place == (step // len(steps), micro_done), (shape, step)
            seen += sum(len(samples) for samples in steps[step % len(steps)])


def test_the_walk_is_accelerates() -> None:
    """The walk above has as many micro-steps as accelerate's sampler yields on each rank."""
    data_loader = pytest.importorskip("accelerate.data_loader")
    from torch.utils.data import BatchSampler, SequentialSampler

    for num_samples, batch, _, ranks, drop_last in GRID[::7]:
        sampler = BatchSampler(SequentialSampler(range(num_samples)), batch, drop_last)
        for rank in range(ranks):
            shard = data_loader.BatchSamplerShard(sampler, num_processes=ranks, process_index=rank)
            assert len(list(shard)) == len(walk(num_samples, batch, ranks, drop_last=drop_last))


@pytest.mark.parametrize("steps_per_pass", [3, 7, 24, 40])
@pytest.mark.parametrize("max_steps", [24, 49])
def test_a_stream_goes_on_in_the_pass_in_which_it_was(steps_per_pass: int, max_steps: int) -> None:
    """Whatever its length, which is unknown; `epoch` is what the Trainer counts."""
    geometry = BatchGeometry(world_size=2, accumulation=3, global_batch=12, num_samples=None, drop_last=False)
    halved = BatchGeometry(world_size=2, accumulation=2, global_batch=6, num_samples=None, drop_last=False)
    for step in range(1, max_steps + 1):
        passes, before = divmod(step - 1, steps_per_pass)
        epoch = passes + (before + 1) * 3 / (max_steps * 3)
        place = geometry.position_in_stream(epoch, max_steps=max_steps, step=10**6, global_batch=12)
        assert place == (passes, (before + 1) * 3)
        place = halved.position_in_stream(epoch, max_steps=max_steps, step=10**6, global_batch=12)
        assert place == (passes, (before + 1) * 2 * 2)


def test_a_data_set_without_a_length_counts_samples() -> None:
    """No epoch is known: samples are steps times the batch."""
    geometry = BatchGeometry(world_size=2, accumulation=3, global_batch=12, num_samples=None, drop_last=False)
    assert geometry.steps_per_epoch is None
    assert geometry.samples_seen(step=5, epoch=0.0, regular=False) == 60
