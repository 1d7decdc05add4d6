"""The epoch of a trainer that generates, against TRL's own sampler, and its order on another number of ranks."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.errors import ConflictError
from safepoint.training.integrations.transformers.resume.batch_geometry import BatchGeometry, adapt

_PER_DEVICE = 4


def trainer_of(
    *, prompts: int, generations: int, per_generation: int, iterations: int, accumulation: int, ranks: int
):
    args = SimpleNamespace(
        gradient_accumulation_steps=accumulation,
        dataloader_drop_last=False,
        generation_batch_size=_PER_DEVICE * ranks * per_generation,
        steps_per_generation=per_generation,
    )

    def total(args: Any) -> int:
        return _PER_DEVICE * ranks * args.gradient_accumulation_steps

    return SimpleNamespace(
        args=args,
        train_dataset=range(prompts),
        num_generations=generations,
        num_iterations=iterations,
        get_total_train_batch_size=total,
    )


def prompts_of_steps(trainer: Any, ranks: int) -> list[list[int]]:
    """What TRL's sampler gives to each optimizer step, in an epoch, once for each time it is generated."""
    sampling = pytest.importorskip("trl.trainer.utils")
    args = trainer.args
    sampler = sampling.RepeatSampler(
        trainer.train_dataset,
        mini_repeat_count=trainer.num_generations,
        batch_size=args.generation_batch_size // trainer.num_generations,
        repeat_count=trainer.num_iterations * args.steps_per_generation,
        seed=3,
    )
    # A loader's batch is a whole generation on each rank; each counts as one micro-step.
    size = _PER_DEVICE * args.steps_per_generation * ranks
    indices = list(sampler)
    micro = [indices[start : start + size] for start in range(0, len(indices), size)]
    steps = [
        micro[start : start + args.gradient_accumulation_steps]
        for start in range(0, len(micro), args.gradient_accumulation_steps)
    ]
    return [list(itertools.chain.from_iterable(step[:: args.steps_per_generation])) for step in steps]


GRID = [
    {"prompts": prompts, "generations": 2, "per_generation": per_generation, "iterations": iterations}
    for prompts, per_generation, iterations in itertools.product((16, 24, 33, 48), (1, 2, 4), (1, 2))
]


def test_an_epoch_has_the_steps_of_the_sampler() -> None:
    """For every shape of run, whatever a generation is for."""
    for shape, accumulation, ranks in itertools.product(GRID, (1, 2, 4), (1, 2)):
        trainer = trainer_of(**shape, accumulation=accumulation, ranks=ranks)
        steps = prompts_of_steps(trainer, ranks)
        if steps:
            assert BatchGeometry.of(trainer, ranks).steps_per_epoch == len(steps), (shape, accumulation, ranks)


def test_another_number_of_ranks_sees_the_same_prompts_or_is_refused() -> None:
    """Where nothing is refused, each step sees the prompts that it saw before."""
    outcomes: set[bool] = set()
    for shape, accumulation in itertools.product(GRID, (1, 2, 4)):
        before = trainer_of(**shape, accumulation=accumulation, ranks=2)
        geometry = BatchGeometry.of(before, 2)
        manifest: Any = SimpleNamespace(
            step=3, world_size=2, global_batch=geometry.global_batch, gradient_accumulation=accumulation
        )
        after = trainer_of(**shape, accumulation=accumulation, ranks=1)
        try:
            now, _ = adapt(after, manifest, BatchGeometry.of(after, 1), allow_change=False)
        except ConflictError:
            outcomes.add(False)
            continue
        assert now.global_batch == geometry.global_batch
        assert prompts_of_steps(after, 1) == prompts_of_steps(before, 2), (shape, accumulation)
        outcomes.add(True)
    assert outcomes == {True, False}
