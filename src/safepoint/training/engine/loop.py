"""The seam between the engine and a training loop: what a loop tells about itself, and how its files are written."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch

from safepoint.checkpoint.format.manifest import ManifestFacts
from safepoint.training.engine.run_facts import RunFacts
from safepoint.training.engine.streams import Streams

Write = Callable[[Path, Path], None]
"""Writes everything of this rank into a folder `checkpoint-<step>`, given (the folder above it, the folder).

Tensors go through functions that `snapshot.capture` knows, so that they can be copied later; what goes another way is
written at once. It may raise whatever the framework raises.
"""


class TrainingLoop(Protocol):
    """One rank's training loop."""

    handed_step: int | None
    """The step of a checkpoint that is still being written; set by the engine."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def strategy(self) -> str:
        """How the ranks share the model: `single`, `ddp`, `fsdp`, `deepspeed`."""
        ...

    @property
    def written_fraction(self) -> float:
        """How much of model and optimizer this rank writes, from 0 to 1."""
        ...

    def parameters(self) -> Iterable[torch.Tensor]:
        """Of the model, trained or not."""
        ...

    def moments_per_parameter(self) -> int:
        """How many tensors of its size the optimizer keeps for each parameter, or will."""
        ...

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that step; asked when the loop begins."""
        ...

    def manifest_facts(self, run: RunFacts) -> ManifestFacts:
        """What the manifest of a checkpoint of this step says besides files, trigger and time."""
        ...

    def retention(self) -> tuple[int | None, set[int]]:
        """How many checkpoints the script keeps, and steps that stay in any case."""
        ...

    def write_again(self) -> Write:
        """How to write this boundary: for a snapshot of it, and for a save that has failed."""
        ...

    def write_final(self, folder: Path) -> Streams | None:
        """Write the finished model, in the layout that the framework reads; all ranks call it.

        Returns:
            None when all of it is written; otherwise the large files, which nobody has written. It is None on all
            ranks or on none.
        """
        ...
