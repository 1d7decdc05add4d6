"""A place in the data, and whoever knows a loop's."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place in the data.

    Args:
        epoch: epochs done.
        batches: batches of this rank that were seen in the running one.
        epoch_rng: random number states when the running one began; empty at its very beginning.
        loader: the loader's own state, where it has one; None otherwise.
        sampler: the kind of the loader's sampler.
        generators: states of the generators of loader and samplers: when the running epoch began, or now at its very
            beginning.
    """

    epoch: int = 0
    batches: int = 0
    epoch_rng: dict[str, Any] | None = None
    loader: Any = None
    sampler: str = ""
    generators: list[torch.Tensor] = field(default_factory=list[torch.Tensor])


class Feed(Protocol):
    """What feeds a loop."""

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
        """Batches of this rank that the loop has had in the running one."""
        ...

    def position(self) -> Position:
        """Where the loop stands now."""
        ...

    def resume(self, position: Position, rng: dict[str, Any]) -> None:
        """Go on from `position`, with the random number states of that moment."""
        ...
