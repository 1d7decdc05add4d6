"""A loop's position in its data after the number of ranks, or their batch size, has changed."""

import dataclasses

from safepoint.checkpoint.format.manifest import Manifest
from safepoint.errors import ConflictError
from safepoint.training.plain.data.position import DataSource, Position
from safepoint.training.plain.data.tracked_data import ACCELERATED, GENERATED

_OPTION = "use --allow-batch-change, which keeps the position in the data only approximately"
_INDEPENDENT = "DistributedSampler"
"""The order of all its samples does not depend on the number of ranks."""
_DEALT = {ACCELERATED + name for name in ("SequentialSampler", "SeedableRandomSampler", f"RandomSampler{GENERATED}")}
"""Likewise: every rank draws the same order, and Accelerate assigns the batches to the ranks in turn."""


def rescale_position(
    position: Position, manifest: Manifest, data: DataSource, world_size: int, *, allow_change: bool
) -> Position:
    """The position from which this run's ranks continue without repeating or missing a sample of the running epoch.

    Args:
        position: of one of the ranks that wrote the checkpoint.
        manifest: of the checkpoint.
        data: of this rank.
        world_size: number of ranks in this run.
        allow_change: accept an approximate position instead of an error.

    Raises:
        ConflictError: there is no exact position, and an approximate one was not allowed.
    """
    before = max(1, manifest.global_batch // manifest.gradient_accumulation)
    now = data.batch_size * world_size
    if manifest.world_size == world_size and before == now:
        num_batches = _num_batches_before(position, manifest)
        if num_batches in {None, data.num_batches} or data.num_batches is None or allow_change:
            return position
        raise ConflictError(
            f"an epoch had {num_batches} batches when the checkpoint of step {manifest.step} was written, "
            f"and has {data.num_batches} now; training was not started",
            hint="train on the same data; or " + _OPTION,
        )
    reason, hint = _obstacle(position, manifest, data, world_size, before, now)
    if reason and not allow_change:
        ranks = f"on {manifest.world_size} rank(s), this run has {world_size}: "
        raise ConflictError(
            f"the checkpoint of step {manifest.step} was written "
            f"{ranks if manifest.world_size != world_size else 'with other batches: '}{reason}; "
            "training was not started",
            hint=hint,
        )
    if _is_at_epoch_end(position, manifest, data):
        return dataclasses.replace(position, batches=data.num_batches, loader=None)
    return dataclasses.replace(position, batches=position.batches * before // now, loader=None)


def _num_batches_before(position: Position, manifest: Manifest) -> int | None:
    """Batches of a rank in an epoch when the checkpoint was written; None where it does not show that."""
    part = manifest.epoch - int(manifest.epoch)
    return round(position.batches / part) if part and position.batches else None


def _is_at_epoch_end(position: Position, manifest: Manifest, data: DataSource) -> bool:
    """Whether the loop has received all batches of the running epoch."""
    return position.batches > 0 and float(manifest.epoch).is_integer() and data.num_batches is not None


def _obstacle(
    position: Position, manifest: Manifest, data: DataSource, world_size: int, before: int, now: int
) -> tuple[str, str]:
    """Why there is no exact position, and a hint; two empty strings when there is one."""
    if before != now:
        fitting = f"give the loader batches of {before // world_size}; or " if before % world_size == 0 else ""
        return f"a batch of all ranks together had {before} samples and has {now}", fitting + _OPTION
    if _is_at_epoch_end(position, manifest, data):
        return "", ""
    if position.loader is not None:
        return "the state of their loaders depends on the number of ranks", _OPTION
    is_independent = position.sampler == data.sampler and data.sampler in {_INDEPENDENT, *_DEALT}
    if position.batches and not is_independent:
        other = next(name for name in (position.sampler, data.sampler) if name != _INDEPENDENT)
        return f"the order of {other} depends on the number of ranks", f"use a {_INDEPENDENT}; or {_OPTION}"
    return "", ""
