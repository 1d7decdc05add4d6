"""A position in the data, and the protocol of what knows a loop's position."""

from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A position in the data of one rank.

    Args:
        epoch: epochs done.
        batches: batches of the running epoch that the loop has received.
        epoch_rng: random number states at the start of the running epoch; None before its first batch.
        loader: the loader's own state, where it has one; None otherwise.
        sampler: the kind of the loader's sampler.
        generators: states of the generators of loader and samplers at the start of the running epoch; before its
            first batch, those of now.
    """

    epoch: int = 0
    batches: int = 0
    epoch_rng: dict[str, Any] | None = None
    loader: Any = None
    sampler: str = ""
    generators: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as a checkpoint stores them."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


class DataSource(Protocol):
    """Where a loop takes its batches from."""

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in an epoch; None when that is not known."""
        ...

    @property
    def batch_size(self) -> int:
        """Samples of this rank in a batch."""
        ...

    @property
    def sampler(self) -> str:
        """The kind of the loader's sampler."""
        ...

    @property
    def epoch(self) -> int:
        """Epochs done."""
        ...

    @property
    def batches(self) -> int:
        """Batches of the running epoch that the loop has received."""
        ...

    def position(self) -> Position:
        """The loop's position now."""
        ...

    def resume(self, position: Position, rng: dict[str, Any]) -> None:
        """Continue from `position`, with the random number states that belong to it."""
        ...
