"""The number of samples in an optimizer step, and how to keep this number when the number of ranks has changed.

The Trainer finds its position in the data by counting micro-batches. So another number of ranks would silently change
the position and the learning-rate schedule. The global batch is the number of samples in a step over all ranks. This
module adapts gradient accumulation so that the global batch stays the same as in the checkpoint. If this is
impossible, or would change the order of the data, the module refuses to resume.
"""

import math
import sys
from dataclasses import dataclass, replace
from typing import Any

from safepoint.checkpoint.format.manifest import MAX_SAMPLES, Manifest
from safepoint.errors import ConflictError
from safepoint.foundation.events.run_events import BatchKept
from safepoint.foundation.units import plural

_OPTION = (
    "to resume at the same position in the data with a different number of samples per step, use --allow-batch-change"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGeometry:
    """The numbers of ranks, micro-batches and samples from which the steps and epochs of a run are computed.

    Args:
        world_size: number of ranks.
        accumulation: micro-batches per optimizer step and rank.
        global_batch: samples per optimizer step over all ranks.
        num_samples: samples in an epoch. For a trainer that generates text, such as GRPO, the number of completions.
            None if the data set has no length.
        drop_last: whether an incomplete last batch is left out.
    """

    world_size: int
    accumulation: int
    global_batch: int
    num_samples: int | None
    drop_last: bool

    @classmethod
    def of(cls, trainer: Any, world_size: int) -> "BatchGeometry":
        """Read the Trainer's arguments and data set."""
        return cls(
            world_size=world_size,
            accumulation=trainer.args.gradient_accumulation_steps,
            global_batch=trainer.get_total_train_batch_size(trainer.args),
            num_samples=_num_samples(trainer),
            drop_last=bool(trainer.args.dataloader_drop_last),
        )

    def as_saved(self, manifest: Manifest) -> "BatchGeometry":
        """The geometry of a checkpoint, over the data of this run."""
        return replace(
            self,
            world_size=manifest.world_size,
            accumulation=manifest.gradient_accumulation,
            global_batch=manifest.global_batch,
        )

    def has_same_steps(self, other: "BatchGeometry") -> bool:
        """Whether steps and epochs have the same length in both geometries."""
        return (self.global_batch, self.steps_per_epoch) == (other.global_batch, other.steps_per_epoch)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in an epoch; None when the data set has no length."""
        if self.num_samples is None:
            return None
        return max(1, -(-self._micro_steps(self.num_samples) // self.accumulation))

    def _micro_steps(self, num_samples: int) -> int:
        """Micro-batches per rank in an epoch of `num_samples`."""
        whole, rest = divmod(num_samples, self.per_micro_step)
        return whole if self.drop_last or not rest else whole + 1

    @property
    def per_micro_step(self) -> int:
        """Samples of a micro-batch over all ranks."""
        return max(1, self.global_batch // self.accumulation)

    def _samples_per_epoch(self, num_samples: int) -> int:
        """How many of `num_samples` an epoch uses; an incomplete last batch may be dropped."""
        dropped = num_samples % self.per_micro_step if self.drop_last else 0
        return max(1, num_samples - dropped)

    def samples_seen(self, *, step: int, epoch: float, regular: bool) -> int:
        """Samples the optimizer has seen after `step` steps.

        Args:
            step: optimizer steps done.
            epoch: epochs done, including the finished fraction of the running epoch.
            regular: whether every step so far had this geometry. If not, the result is the number of samples before
                the present position in the data, and is computed from `epoch`.
        """
        steps_per_epoch = self.steps_per_epoch
        if self.num_samples is None or steps_per_epoch is None:
            return min(step * self.global_batch, MAX_SAMPLES)
        in_epoch = self._samples_per_epoch(self.num_samples)
        if regular:
            epochs, steps = divmod(step, steps_per_epoch)
        else:
            # The Trainer counts an epoch in micro-batches. Only the last step of an epoch may have fewer of them.
            epochs = math.floor(epoch)
            steps = round((epoch - epochs) * self._micro_steps(self.num_samples) / self.accumulation)
        return min(epochs * in_epoch + min(steps * self.global_batch, in_epoch), MAX_SAMPLES)

    def position(self, samples_seen: int, *, epoch: float, before: "BatchGeometry") -> tuple[int, int]:
        """The position of a checkpoint: whole epochs, and micro-batches per rank to skip in the running epoch.

        Call this method only for a data set with a length.

        Args:
            samples_seen: this field of the checkpoint's manifest.
            epoch: this field of the checkpoint's manifest.
            before: the checkpoint's geometry. An epoch of this geometry may use a different number of samples.
        """
        assert self.num_samples is not None
        epochs = math.floor(epoch)
        rest = max(0, samples_seen - epochs * before._samples_per_epoch(self.num_samples))
        rest = min(rest, self._samples_per_epoch(self.num_samples))
        return epochs, rest // self.global_batch * self.accumulation

    def position_in_stream(self, epoch: float, *, max_steps: int, step: int, global_batch: int) -> tuple[int, int]:
        """The position of a checkpoint in a data set without a length. The data set may have been read several times.

        Return the number of whole passes, and the number of micro-batches per rank to skip in the running pass.

        For such a data set, the Trainer adds 1 / `max_steps` to the epoch in each step, for a pass of any length.

        Args:
            epoch: the epoch in a checkpoint: the number of passes that have ended, plus the steps of the running pass
                divided by `max_steps`.
            max_steps: the value in the run that wrote the checkpoint.
            step: the step of the checkpoint, which limits the steps of the running pass.
            global_batch: the value in the run that wrote the checkpoint.
        """
        passes = max(0, math.ceil(epoch) - 1)
        steps = max(0, min(round((epoch - passes) * max_steps), step))
        return passes, steps * global_batch // self.global_batch * self.accumulation


def adapt(
    trainer: Any, manifest: Manifest, now: BatchGeometry, *, requested_before: int = 0, allow_change: bool
) -> tuple[BatchGeometry, BatchKept | None]:
    """Adapt gradient accumulation so that each step uses as many samples as the steps of the checkpoint.

    Args:
        trainer: the Trainer. This function changes its `args.gradient_accumulation_steps`.
        manifest: the manifest of the checkpoint to resume from.
        now: the geometry from the script's arguments.
        requested_before: the accumulation that the script requested in the run that wrote the checkpoint; 0 if
            unknown.
        allow_change: accept another global batch, and raise no error.

    Returns:
        The geometry that the run uses, and a description of the change. The description is None if nothing was
        changed, or if an earlier resume had already made the same change.

    Raises:
        ConflictError: the global batch cannot be kept, and `allow_change` is false.
    """
    saved = now.as_saved(manifest)
    if saved == now:
        return now, None
    is_script_the_same = (now.accumulation, now.per_micro_step) == (requested_before, saved.per_micro_step)
    if is_script_the_same and saved.world_size == now.world_size:
        # An earlier resume adapted the accumulation to this number of ranks, and the script is still the same.
        trainer.args.gradient_accumulation_steps = saved.accumulation
        return BatchGeometry.of(trainer, now.world_size), None
    reason = _obstacle(trainer, saved, now)
    if reason is not None:
        if allow_change:
            return now, None
        same_ranks = saved.world_size == now.world_size
        where = "with the script's settings" if same_ranks else f"on {plural(now.world_size, 'rank')}"
        raise ConflictError(
            f"the checkpoint of step {manifest.step} has {saved.global_batch} samples per step on "
            f"{plural(saved.world_size, 'rank')}. This number is not possible {where}: {reason}. The script's "
            f"settings would give {now.global_batch} samples per step; training was not started",
            hint=_OPTION,
        )
    if saved.world_size == now.world_size:
        return now, None
    accumulation = saved.global_batch // now.per_micro_step
    trainer.args.gradient_accumulation_steps = accumulation
    kept = BatchKept(
        world_size_before=saved.world_size,
        world_size=now.world_size,
        accumulation_before=saved.accumulation,
        accumulation=accumulation,
        global_batch=saved.global_batch,
    )
    return BatchGeometry.of(trainer, now.world_size), kept


def _obstacle(trainer: Any, saved: BatchGeometry, now: BatchGeometry) -> str | None:
    """Why the steps of this run cannot have as many samples as the steps of the checkpoint; None if they can."""
    if saved.world_size == now.world_size and saved.global_batch != now.global_batch:
        return "the script's batch size or gradient accumulation was changed"
    accumulation, rest = divmod(saved.global_batch, now.per_micro_step)
    if rest:
        return (
            f"{plural(now.world_size, 'rank')} {'takes' if now.world_size == 1 else 'take'} {now.per_micro_step} "
            "samples at a time (per_device_train_batch_size on each rank), and "
            f"{saved.global_batch} is not a multiple of {now.per_micro_step}"
        )
    reason = _obstacle_of_order(trainer, saved.world_size, now.world_size)
    reason = reason or _obstacle_of_generation(trainer, saved, accumulation)
    after = replace(now, accumulation=accumulation, global_batch=saved.global_batch)
    if reason is None and saved.steps_per_epoch != after.steps_per_epoch:
        return f"an epoch would have {after.steps_per_epoch} steps instead of {saved.steps_per_epoch}"
    return reason


def _obstacle_of_order(trainer: Any, ranks_before: int, ranks: int) -> str | None:
    """Why another number of ranks changes the order of samples; None if the order stays the same."""
    if ranks_before == ranks:
        return None
    strategy = getattr(trainer.args, "train_sampling_strategy", "random")
    if strategy in {"group_by_length", "batch_rebalance"}:
        return (
            f"with train_sampling_strategy={strategy!r} the order of samples depends on the batch size and the ranks"
        )
    if _is_sharded_stream(trainer, ranks_before) or _is_sharded_stream(trainer, ranks):
        return "with dispatch_batches=False each rank reads its own shards of the data set"
    return None


def _is_sharded_stream(trainer: Any, num_ranks: int) -> bool:
    """Whether Accelerate gives each rank some shards of a stream, instead of every n-th batch of the stream."""
    datasets = sys.modules.get("datasets")  # Accelerate divides only the shards of this library's streams
    if datasets is None or not isinstance(trainer.train_dataset, datasets.IterableDataset):
        return False
    config = trainer.accelerator.dataloader_config
    dispatches = config.dispatch_batches is not False  # by default the first rank reads for all ranks
    return 1 < num_ranks <= trainer.train_dataset.n_shards and not dispatches and not config.split_batches


def _num_samples(trainer: Any) -> int | None:
    try:
        num_samples = len(trainer.train_dataset)
    except TypeError:
        return None
    at_once = getattr(trainer.args, "generation_batch_size", None)
    if not at_once:
        return num_samples
    # An epoch leaves out the last prompts, if they are too few for a whole generation.
    prompts = at_once // trainer.num_generations
    return num_samples // prompts * at_once * getattr(trainer, "num_iterations", 1)


def _obstacle_of_generation(trainer: Any, saved: BatchGeometry, accumulation: int) -> str | None:
    """Why another number of ranks changes the completions that a step uses; None if they stay the same."""
    if not getattr(trainer.args, "generation_batch_size", None):
        return None
    per_generation = getattr(trainer.args, "steps_per_generation", None) or accumulation
    if getattr(trainer, "num_iterations", 1) > 1:
        return "num_iterations > 1 reuses completions, and they would be reused in different steps"
    for num_micro_steps in (saved.accumulation, accumulation):
        if num_micro_steps % per_generation:
            return (
                f"a step has {num_micro_steps} micro-batches on each rank, and {num_micro_steps} is not a multiple "
                f"of steps_per_generation={per_generation}"
            )
    num_prompts = None if saved.num_samples is None else len(trainer.train_dataset)
    if num_prompts is not None and num_prompts * trainer.num_generations % saved.global_batch:
        return (
            f"{num_prompts} prompts do not fill a whole number of steps: an epoch would leave out different prompts"
        )
    return None
