"""Samples per step: the Trainer's own arithmetic, and keeping it with another number of ranks."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.checkpoint.format.manifest import FileEntry, Manifest, Trigger
from safepoint.errors import ConflictError
from safepoint.training.integrations.transformers.resume.batch_geometry import BatchGeometry, adapt


def trainer(batch: int, accumulation: int, ranks: int, samples: int = 103, drop_last: bool = False) -> Any:
    args = SimpleNamespace(
        gradient_accumulation_steps=accumulation,
        dataloader_drop_last=drop_last,
        train_sampling_strategy="random",
    )
    return SimpleNamespace(
        args=args,
        train_dataset=range(samples),
        get_total_train_batch_size=lambda args: batch * args.gradient_accumulation_steps * ranks,
    )


def manifest(geometry: BatchGeometry, strategy: str = "ddp") -> Manifest:
    return Manifest(
        run_id="r",
        attempt=1,
        step=4,
        epoch=0.5,
        trigger=Trigger.JIT,
        world_size=geometry.world_size,
        global_batch=geometry.global_batch,
        gradient_accumulation=geometry.accumulation,
        samples_seen=4 * geometry.global_batch,
        strategy=strategy,
        created="x",
        files=(FileEntry(path="a", size_bytes=1, digest="xxh3-128:" + "0" * 32),),
    )


@given(
    samples=st.integers(1, 400),
    batch=st.integers(1, 7),
    accumulation=st.integers(1, 5),
    ranks=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_steps_per_epoch_are_the_trainers(
    samples: int, batch: int, accumulation: int, ranks: int, drop_last: bool
) -> None:
    """The same as batching, sharding over ranks and accumulating one after the other."""
    geometry = BatchGeometry.of(trainer(batch, accumulation, ranks, samples, drop_last), ranks)
    batches = samples // batch if drop_last else math.ceil(samples / batch)
    per_rank = batches // ranks if drop_last else math.ceil(batches / ranks)
    assert geometry.steps_per_epoch == max(1, math.ceil(per_rank / accumulation))


@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_every_pair_of_world_sizes_keeps_the_batch(before: int, after: int) -> None:
    """With 12 micro-batches per step, any of 1 to 4 ranks can keep it."""
    old = BatchGeometry.of(trainer(2, 12 // before, before), before)
    now = trainer(2, 12 // before, after)
    kept, _ = adapt(now, manifest(old), BatchGeometry.of(now, after), allow_change=False)
    assert kept.global_batch == old.global_batch == 24
    assert now.args.gradient_accumulation_steps == 12 // after
    assert kept.steps_per_epoch == old.steps_per_epoch


def test_what_cannot_be_kept_is_refused_with_the_option() -> None:
    """No whole number of micro-batches, a changed script, an order bound to the batch."""
    old = BatchGeometry.of(trainer(2, 1, 2), 2)
    for ranks, batch, strategy, order, word in [
        (3, 2, "ddp", "random", "is not a multiple of"),
        (2, 3, "ddp", "random", "was changed"),
        (1, 2, "ddp", "group_by_length", "group_by_length"),
    ]:
        now = trainer(batch, 1, ranks)
        now.args.train_sampling_strategy = order
        geometry = BatchGeometry.of(now, ranks)
        with pytest.raises(ConflictError, match=word) as error:
            adapt(now, manifest(old, strategy), geometry, allow_change=False)
        assert "--allow-batch-change" in str(error.value)
        assert adapt(now, manifest(old, strategy), geometry, allow_change=True) == (geometry, None)


def test_what_was_adapted_stays_so_on_the_same_ranks() -> None:
    """The unchanged script asks for what it asked for before; one that asks for something else is refused."""
    script = trainer(2, 3, 2)
    kept, _ = adapt(
        trainer(2, 3, 1),
        manifest(BatchGeometry.of(script, 2)),
        BatchGeometry.of(trainer(2, 3, 1), 1),
        allow_change=False,
    )
    now = trainer(2, 3, 1)
    assert adapt(now, manifest(kept), BatchGeometry.of(now, 1), requested_before=3, allow_change=False) == (
        kept,
        None,
    )
    assert now.args.gradient_accumulation_steps == kept.accumulation == 6
    for changed in (trainer(2, 4, 1), trainer(3, 3, 1)):
        with pytest.raises(ConflictError, match="was changed"):
            adapt(changed, manifest(kept), BatchGeometry.of(changed, 1), requested_before=3, allow_change=False)


def test_a_step_may_be_divided_in_another_way() -> None:
    """As many samples in other micro-batches: nothing is refused, but what counts batches no longer fits."""
    old = BatchGeometry.of(trainer(4, 2, 2), 2)
    now = trainer(2, 4, 2)
    geometry, kept = adapt(now, manifest(old), BatchGeometry.of(now, 2), allow_change=False)
    assert (geometry.accumulation, geometry.global_batch, kept) == (4, 16, None)
    assert geometry.as_saved(manifest(old)) != geometry
    assert geometry.has_same_steps(geometry.as_saved(manifest(old)))


def test_a_step_is_not_divided_so_that_an_epoch_has_others() -> None:
    """15 samples are a step and a half of 8, or, without incomplete micro-batches, one."""
    old = BatchGeometry.of(trainer(2, 4, 1, samples=15, drop_last=True), 1)
    now = trainer(8, 1, 1, samples=15, drop_last=True)
    with pytest.raises(ConflictError, match="an epoch would have 1 steps instead of 2"):
        adapt(now, manifest(old), BatchGeometry.of(now, 1), allow_change=False)
    geometry, _ = adapt(now, manifest(old), BatchGeometry.of(now, 1), allow_change=True)
    assert not geometry.has_same_steps(geometry.as_saved(manifest(old)))


@pytest.mark.parametrize(("before", "after", "refused"), [(2, 1, True), (1, 4, True), (5, 1, False), (2, 2, False)])
@pytest.mark.parametrize("dispatches", [False, None])
def test_a_stream_whose_shards_are_dealt_to_ranks_is_bound_to_their_number(
    before: int, after: int, refused: bool, dispatches: bool | None
) -> None:
    """Accelerate does that where there are enough, and where the first rank does not read for all."""
    datasets = pytest.importorskip("datasets")
    stream = datasets.IterableDataset.from_generator(lambda part: iter([]), gen_kwargs={"part": [0, 1, 2, 3]})
    old = BatchGeometry.of(trainer(2, 20 // before, before), before)
    now = trainer(2, 20 // after, after)
    now.train_dataset = stream
    now.accelerator = SimpleNamespace(
        dataloader_config=SimpleNamespace(dispatch_batches=dispatches, split_batches=False)
    )
    if refused and dispatches is False:
        with pytest.raises(ConflictError, match="each rank reads its own shards"):
            adapt(now, manifest(old), BatchGeometry.of(now, after), allow_change=False)
    else:
        geometry, _ = adapt(now, manifest(old), BatchGeometry.of(now, after), allow_change=False)
        assert geometry.global_batch == 40


def test_position_and_samples_seen_are_inverse_at_steps() -> None:
    """After any number of steps, the samples seen lead back to epoch and micro-batch."""
    geometry = BatchGeometry.of(trainer(2, 3, 2, samples=100), 2)
    assert geometry.steps_per_epoch == 9
    for step in range(40):
        seen = geometry.samples_seen(step=step, epoch=step / 9, regular=True)
        epochs, micro = geometry.position(seen, epoch=step / 9, before=geometry)
        assert (epochs, micro) == (step // 9, step % 9 * 3)


def test_the_place_in_a_run_with_steps_of_two_sizes() -> None:
    """Five steps of 8, then steps of 12: the seventh ends at sample 60, wherever the number of steps would lead."""
    before, after = (BatchGeometry.of(trainer(batch, 1, 1, samples=100), 1) for batch in (8, 12))
    seen = before.samples_seen(step=5, epoch=5 / 13, regular=True)
    assert seen == 40
    assert after.position(seen, epoch=5 / 13, before=before) == (0, 3)  # a step of 12 begins at 36
    seen = after.samples_seen(step=7, epoch=5 / 9, regular=False)
    assert seen == 60
    assert after.position(seen, epoch=5 / 9, before=after) == (0, 5)
    # More steps than an epoch has now, and still in the first; then at its end.
    assert after.position(after.samples_seen(step=9, epoch=7 / 9, regular=False), epoch=7 / 9, before=after) == (0, 7)
    assert after.position(after.samples_seen(step=11, epoch=1.0, regular=False), epoch=1.0, before=after) == (1, 0)


def test_an_epoch_that_shows_more_than_before_does_not_swallow_the_next() -> None:
    """96 of 100 samples by 24, without the rest; all by 10."""
    before, after = (BatchGeometry.of(trainer(batch, 1, 1, samples=100, drop_last=True), 1) for batch in (24, 10))
    seen = before.samples_seen(step=5, epoch=1.25, regular=True)
    assert seen == 120
    assert after.position(seen, epoch=1.25, before=before) == (1, 2)
