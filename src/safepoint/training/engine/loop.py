"""The Protocol of a training loop: what the loop reports to the engine, and how it writes the files of a save."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch

from safepoint.checkpoint.format.manifest import ManifestFacts
from safepoint.training.engine.streams import Streams
from safepoint.training.start.claim import Attempt

Write = Callable[[Path, Path], None]
"""Writes this rank's files into the folder `checkpoint-<step>`; called with the parent of this folder and the folder
itself.

In a save through the keeper (the process that writes snapshots to disk), `snapshot.images.capture` replaces some of
the functions that write tensors, and these tensors are copied later. Everything else is written at once. The call may
raise any exception of the framework.
"""


class TrainingLoop(Protocol):
    """One rank's training loop."""

    step_being_saved: int | None
    """The step of the checkpoint that the keeper is writing; set by the engine."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def written_fraction(self) -> float:
        """The fraction of the model and the optimizer that this rank writes, from 0 to 1."""
        ...

    @property
    def has_callbacks(self) -> bool:
        """Whether callbacks may add files to a checkpoint.

        If so, old checkpoints are deleted only after the callbacks have run.
        """
        ...

    def parameters(self) -> Iterable[torch.Tensor]:
        """The parameters of the model that a checkpoint contains."""
        ...

    def moments_per_parameter(self) -> int:
        """How many tensors of a parameter's size the optimizer keeps, or will keep, for each trained parameter."""
        ...

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, without wrappers; called when the loop starts."""
        ...

    def manifest_facts(self, attempt: Attempt) -> ManifestFacts:
        """The facts for the manifest of a checkpoint of the current step; the engine adds `libraries`."""
        ...

    def retention(self) -> tuple[int | None, set[int]]:
        """How many checkpoints the script keeps (None for all), and the steps whose checkpoints are never deleted."""
        ...

    def write(self, parent: Path, folder: Path) -> None:
        """Write the state at this boundary (the point between two steps); see `Write`."""
        ...

    def write_final(self, folder: Path) -> Streams | None:
        """Write the finished model in the layout that the framework reads; all ranks call this method.

        Returns:
            The large files that are still to be written; None if everything is written. Either all ranks return None,
            or no rank does.
        """
        ...
