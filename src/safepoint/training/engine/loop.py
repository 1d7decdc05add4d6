"""The protocol between the engine and a training loop: what the loop reports, and how its files are written."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch

from safepoint.checkpoint.format.manifest import ManifestFacts
from safepoint.training.engine.streams import Streams
from safepoint.training.start.claim import Attempt

Write = Callable[[Path, Path], None]
"""Writes this rank's files into a folder `checkpoint-<step>`, given (its parent folder, the folder).

`snapshot.images.capture` replaces some of the functions that write tensors; their tensors are copied later.
Everything else is written at once. The call may raise any exception of the framework.
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
        """The fraction of model and optimizer that this rank writes, from 0 to 1."""
        ...

    @property
    def has_callbacks(self) -> bool:
        """Whether callbacks may add files to a checkpoint. Then pruning waits until the manifest lists them."""
        ...

    def parameters(self) -> Iterable[torch.Tensor]:
        """The parameters of the model that are saved."""
        ...

    def moments_per_parameter(self) -> int:
        """For each parameter, how many tensors of the same size the optimizer keeps or will keep."""
        ...

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that step, without wrappers; called when the loop starts."""
        ...

    def manifest_facts(self, attempt: Attempt) -> ManifestFacts:
        """The fields of this step's manifest, without files, trigger, time and libraries."""
        ...

    def retention(self) -> tuple[int | None, set[int]]:
        """How many checkpoints the script keeps (None for all), and the steps that are never deleted."""
        ...

    def write(self, parent: Path, folder: Path) -> None:
        """Write the state at this boundary; see `Write`."""
        ...

    def write_final(self, folder: Path) -> Streams | None:
        """Write the finished model in the layout that the framework reads; all ranks call it.

        Returns:
            None when everything is written; otherwise the large files that are still to be written. All ranks return
            None, or none does.
        """
        ...
