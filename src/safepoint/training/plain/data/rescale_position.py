"""A loop's place in its data after the number of ranks, or the size of their batches, has changed."""

import dataclasses

from safepoint.checkpoint.format.manifest import Manifest
from safepoint.errors import ConflictError
from safepoint.training.plain.data.data_state import ACCELERATED, GENERATED
from safepoint.training.plain.data.position import Feed, Position

_OPTION = "allow it with --allow-batch-change: the place in the data is kept as well as it can be"
_INDEPENDENT = "DistributedSampler"
"""The order of all its samples does not depend on how many ranks share them."""
_DEALT = {ACCELERATED + name for name in ("SequentialSampler", "SeedableRandomSampler", f"RandomSampler{GENERATED}")}
"""Likewise: every rank draws the same order, and Accelerate deals the batches out in turn."""


def moved(position: Position, manifest: Manifest, data: Feed, world_size: int, *, allow_change: bool) -> Position:
    """The place from which the ranks of now go on, with no sample of the running epoch seen twice or left out.

    Args:
        position: of a rank of then.
        manifest: of the checkpoint.
        data: of this rank.
        world_size: ranks of now.
        allow_change: go on where that cannot be kept, too.

    Raises:
        ConflictError: it cannot be kept, and that was not allowed.
    """
    before = max(1, manifest.global_batch // manifest.gradient_accumulation)
    now = data.batch_size * world_size
    if manifest.world_size == world_size and before == now:
        then = _batches_then(position, manifest)
        if then in {None, data.num_batches} or data.num_batches is None or allow_change:
            return position
        raise ConflictError(
            f"an epoch had {then} batches when the checkpoint of step {manifest.step} was written in it, "
            f"and has {data.num_batches} now; training was not started",
            hint="train on the same data; or " + _OPTION,
        )
    reason, hint = _obstacle(position, manifest, data, world_size, before, now)
    if reason and not allow_change:
        ranks = f"on {manifest.world_size} rank(s), and these are {world_size}: "
        raise ConflictError(
            f"the checkpoint of step {manifest.step} was written "
            f"{ranks if manifest.world_size != world_size else 'with other batches: '}{reason}; "
            "training was not started",
            hint=hint,
        )
    if _is_at_epoch_end(position, manifest, data):
        return dataclasses.replace(position, batches=data.num_batches, loader=None)
    return dataclasses.replace(position, batches=position.batches * before // now, loader=None)


def _batches_then(position: Position, manifest: Manifest) -> int | None:
    """Batches of a rank in an epoch of then; None where the checkpoint does not tell."""
    part = manifest.epoch - int(manifest.epoch)
    return round(position.batches / part) if part and position.batches else None


def _is_at_epoch_end(position: Position, manifest: Manifest, data: Feed) -> bool:
    """Whether the loop has had all batches of the running epoch."""
    return position.batches > 0 and float(manifest.epoch).is_integer() and data.num_batches is not None


def _obstacle(
    position: Position, manifest: Manifest, data: Feed, world_size: int, before: int, now: int
) -> tuple[str, str]:
    if before != now:
        fitting = f"give the loader batches of {before // world_size}; or " if before % world_size == 0 else ""
        return f"a batch of all ranks together had {before} samples and has {now}", fitting + _OPTION
    if _is_at_epoch_end(position, manifest, data):
        return "", ""
    if position.loader is not None:
        return "the state of their loaders is tied to the number of ranks", _OPTION
    is_independent = position.sampler == data.sampler and data.sampler in {_INDEPENDENT, *_DEALT}
    if position.batches and not is_independent:
        other = next(name for name in (position.sampler, data.sampler) if name != _INDEPENDENT)
        return f"the order of {other} depends on the number of ranks", f"use a {_INDEPENDENT}; or {_OPTION}"
    return "", ""
