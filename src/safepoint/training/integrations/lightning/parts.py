"""What a Lightning Trainer's state consists of: what `Trainer.save_checkpoint` puts into its file."""

import contextlib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch

from safepoint.errors import UsageError
from safepoint.foundation.environment import Place
from safepoint.training.collective.peers import Peers
from safepoint.training.integrations.lightning.checkpoint_io import DirectCheckpointIO

STATE = "lightning.ckpt"
"""The file of a checkpoint that Lightning reads."""
_MODEL = "model.ckpt"


class LightningParts:
    """See `plain.parts.Parts`.

    Args:
        trainer: a `lightning.pytorch.Trainer`.
        place: this rank.
    """

    def __init__(self, trainer: Any, place: Place) -> None:
        self._trainer = trainer
        self._place = place

    @property
    def strategy(self) -> str:
        """One process, or DDP: `callback` refuses others."""
        return "ddp" if self._place.world_size > 1 else "single"

    @property
    def zero_stage(self) -> int | None:
        """Nothing here is DeepSpeed's."""
        return None

    @property
    def share(self) -> float:
        """The first rank writes what all of them have."""
        return 1.0 if self._place.is_first else 0.0

    def modules(self) -> list[torch.nn.Module]:
        """The LightningModule."""
        return [self._trainer.lightning_module]

    def base(self, peers: Peers) -> Mapping[str, str] | None:
        """None: models with adapters are saved with what is below them."""
        return None

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Of the LightningModule."""
        return list(self._trainer.optimizers)

    def write(self, folder: Path) -> None:
        """A file that `Trainer.fit(ckpt_path=…)` reads, too."""
        self._write(folder / STATE, weights_only=False)

    def write_final(self, folder: Path) -> None:
        """A file that `LightningModule.load_from_checkpoint` reads."""
        self._write(folder / _MODEL, weights_only=True)

    def _write(self, path: Path, *, weights_only: bool) -> None:
        # Not `Trainer.save_checkpoint`: it ends with a barrier, where ranks would wait for one whose save has failed.
        with self._writing_directly():
            checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only)
            self._trainer.strategy.save_checkpoint(checkpoint, path)

    def load(self, folder: Path) -> None:
        """Nothing: Lightning has loaded by `restore` in its own time."""

    def restore(self, folder: Path, weights_only: bool | None) -> None:
        """Let Lightning restore modules and callbacks from a checkpoint, and keep the rest for its later steps.

        Args:
            folder: the checkpoint.
            weights_only: see `DirectCheckpointIO.load_checkpoint`.

        Raises:
            UsageError: the checkpoint is none of Lightning's, or it holds objects that were not allowed.
        """
        if not (folder / STATE).exists():
            raise UsageError(
                f"{folder.name} has no {STATE}: it was not written by a Lightning Trainer",
                hint="resume from it with the script that wrote it, or begin anew with --from-scratch",
            )
        with self._writing_directly():
            self._trainer._checkpoint_connector._restore_modules_and_callbacks(folder / STATE, weights_only)

    @contextlib.contextmanager
    def _writing_directly(self) -> Generator[None]:
        strategy = self._trainer.strategy
        before = strategy.checkpoint_io
        strategy.checkpoint_io = DirectCheckpointIO()
        try:
            yield
        finally:
            strategy.checkpoint_io = before
