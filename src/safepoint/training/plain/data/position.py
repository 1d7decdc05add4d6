"""A position in the data of a loop, and how it changes with the number of ranks or their batch size.

The order of the data depends on the *kind* of the sampler. The kind is a text, which contains the name of the
sampler's class. If Accelerate assigns the batches to the ranks, the text begins with `ACCELERATED`. If the sampler
then has a generator of its own, the text can end with `GENERATED`.
"""

import dataclasses
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from safepoint.checkpoint.format.manifest import Manifest
from safepoint.errors import ConflictError
from safepoint.foundation.field_types import COUNT, NAMED, TEXT, Kind, check_fields
from safepoint.foundation.units import plural
from safepoint.training.state.plain_values import TENSORS

ACCELERATED = "Accelerate's "
"""Prefix of the kind of a sampler whose batches Accelerate assigns to the ranks."""
GENERATED = " with a generator"
"""Suffix of the kind of a sampler with its own generator. Accelerate keeps this generator the same on all ranks."""

_OPTION = "use --allow-batch-change, which keeps the position in the data only approximately"
_INDEPENDENT = "DistributedSampler"
"""A sampler of torch. Its order over all ranks does not depend on the number of ranks."""
_DEALT = {ACCELERATED + name for name in ("SequentialSampler", "SeedableRandomSampler", f"RandomSampler{GENERATED}")}
"""Accelerate's samplers whose order does not depend on the number of ranks: all ranks draw the same order, and
Accelerate assigns its batches to the ranks in turn."""
_MOST_IN_STEP = 1 << 12
"""The most batches of an optimizer step, in multiples of the batches of the last step."""
_MOST_AHEAD = 1024
"""Batches by which ranks may differ, if a loop leaves out batches on some ranks only."""
_KINDS: dict[str, Kind] = {
    "epoch": COUNT,
    "batches": COUNT,
    "taken": COUNT.optional,
    "epoch_rng": NAMED.optional,
    "sampler": TEXT,
    "generators": TENSORS,
    "fetched": NAMED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A position in the data of one rank. It may come from a checkpoint that an attacker has written.

    Args:
        epoch: epochs done.
        batches: batches of the running epoch that the loop has received.
        taken: batches that the loop has received in all epochs; None if this number is not known, or does not
            determine the position. It is not known in checkpoints of earlier versions of Safepoint. It does not
            determine the position if an epoch has ended early or with an unexpected number of batches.
        epoch_rng: random number states at the start of the running epoch; None before its first batch.
        loader: the loader's own state; None if the loader has no such state.
        sampler: the kind of the loader's sampler.
        generators: states of the generators of loader and samplers at the start of the running epoch. Before the
            epoch's first batch, these are their current states.
        fetched: see `Fetches.state`.

    Raises:
        ValueError: a field has a value of another kind, or is negative.
    """

    epoch: int = 0
    batches: int = 0
    taken: int | None = None
    epoch_rng: dict[str, Any] | None = None
    loader: Any = None
    sampler: str = ""
    generators: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    fetched: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        check_fields(self, _KINDS)

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as a checkpoint stores them."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataProgress:
    """How far a loop is in its data.

    Unlike a `Position`, a `DataProgress` has no states to restore.

    Args:
        epoch: epochs done.
        batches: batches of the running epoch that the loop has received.
        num_batches: batches of this rank in an epoch; None if their number is not known.
        batch_size: samples of this rank in a batch.
        sampler: the kind of the loader's sampler.
    """

    epoch: int
    batches: int
    num_batches: int | None
    batch_size: int
    sampler: str

    @property
    def epochs_done(self) -> float:
        """Epochs done, including the finished part of the running epoch if `num_batches` is known."""
        return self.epoch + (self.batches / self.num_batches if self.num_batches else 0.0)


class Shared(NamedTuple):
    """What the position of a rank has to have in common with the positions of other ranks.

    Ranks with the same `pace` have to be at the same `place`.

    Args:
        pace: what decides whether ranks take their batches together.
        place: where the rank is in its data.
    """

    pace: tuple[Hashable, ...]
    place: tuple[Hashable, ...]


class DataSource(Protocol):
    """Where a loop takes its batches from."""

    def progress(self) -> DataProgress:
        """How far the loop is now."""
        ...

    def position(self) -> Position:
        """The loop's position now."""
        ...

    def shared(self, position: Position) -> Shared:
        """What `position` has to have in common with the positions of other ranks in the same checkpoint.

        The loaders may not exist yet.

        Raises:
            ValueError: the position is invalid.
        """
        ...

    def positions(self, position: Position) -> list[Position]:
        """`position`, and the positions of single loaders that it contains.

        Raises:
            ValueError: the position of a loader is invalid.
        """
        ...

    def resume(self, position: Position, rng: dict[str, Any]) -> None:
        """Continue from `position`, with the random number states that belong to it."""
        ...


def excess_of(positions: Iterable[Position], manifest: Manifest) -> str:
    """Why a run of the size that the manifest states cannot have reached these positions; empty if it can have.

    To resume within an endless stream, a run reads and drops the batches before its position. With a position of any
    size, this would never end.

    Args:
        positions: the positions in a checkpoint, of one rank.
        manifest: the manifest of the checkpoint.
    """
    in_batch = max(1, manifest.global_batch // manifest.gradient_accumulation)
    by_steps = max(1, manifest.step) * manifest.gradient_accumulation
    # If steps had other numbers of batches than the last step, the samples say how many batches there were.
    by_samples = min(manifest.samples_seen // in_batch, by_steps * _MOST_IN_STEP)
    most = 2 * max(by_steps, by_samples) + _MOST_AHEAD
    batches = max((one.batches for one in positions), default=0)
    if batches <= most:
        return ""
    return f"its position is after {batches} batches of an epoch, and the manifest says step {manifest.step}"


def rescale_position(
    position: Position, manifest: Manifest, data: DataProgress, world_size: int, *, allow_change: bool
) -> Position:
    """The position from which this run's ranks continue without repeating or missing a sample of the running epoch.

    Args:
        position: the position of one of the ranks that wrote the checkpoint.
        manifest: the manifest of the checkpoint.
        data: the progress of this rank before its first batch.
        world_size: number of ranks in this run.
        allow_change: return an approximate position, and raise no error, if there is no exact position.

    Raises:
        ConflictError: there is no exact position, and `allow_change` is false.
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
        ranks = f"on {plural(manifest.world_size, 'rank')}, this run has {world_size}: "
        raise ConflictError(
            f"the checkpoint of step {manifest.step} was written "
            f"{ranks if manifest.world_size != world_size else 'with other batches: '}{reason}; "
            "training was not started",
            hint=hint,
        )
    if _is_at_epoch_end(position, manifest, data):
        return dataclasses.replace(position, batches=data.num_batches, loader=None, fetched={})
    return dataclasses.replace(position, batches=position.batches * before // now, loader=None, fetched={})


def _num_batches_before(position: Position, manifest: Manifest) -> int | None:
    """Batches of a rank in an epoch when the checkpoint was written; None if their number is not known."""
    part = manifest.epoch - int(manifest.epoch)
    return round(position.batches / part) if part and position.batches else None


def _is_at_epoch_end(position: Position, manifest: Manifest, data: DataProgress) -> bool:
    """Whether the loop had received all batches of the running epoch; False if `data.num_batches` is not known."""
    return position.batches > 0 and float(manifest.epoch).is_integer() and data.num_batches is not None


def _obstacle(
    position: Position, manifest: Manifest, data: DataProgress, world_size: int, before: int, now: int
) -> tuple[str, str]:
    """Why there is no exact position, and a hint; two empty strings if there is an exact position."""
    if before != now:
        fitting = f"give the loader batches of {before // world_size}; or " if before % world_size == 0 else ""
        return f"a batch of all ranks together had {before} samples, and now has {now}", fitting + _OPTION
    if _is_at_epoch_end(position, manifest, data):
        return "", ""
    if position.loader is not None:
        return "the saved state of a data loader is valid for one number of ranks only", _OPTION
    is_independent = position.sampler == data.sampler and data.sampler in {_INDEPENDENT, *_DEALT}
    if position.batches and not is_independent:
        other = next(name for name in (position.sampler, data.sampler) if name != _INDEPENDENT)
        return f"the order of {other} depends on the number of ranks", f"use a {_INDEPENDENT}; or {_OPTION}"
    return "", ""
