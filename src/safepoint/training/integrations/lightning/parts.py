"""The state of a Lightning Trainer: what `Trainer.save_checkpoint` writes into its file."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from safepoint.errors import UsageError
from safepoint.foundation.environment import Place
from safepoint.training.collective.peers import Peers
from safepoint.training.integrations.lightning.checkpoint_io import DirectCheckpointIO
from safepoint.training.state.temporary_attributes import temporarily

STATE = "lightning.ckpt"
"""The file of a checkpoint that Lightning reads."""
_MODEL = "model.ckpt"


class LightningParts:
    """See `plain.state.parts.Parts`.

    Args:
        trainer: a `lightning.pytorch.Trainer`.
        place: this rank.
    """

    def __init__(self, trainer: Any, place: Place) -> None:
        self._trainer = trainer
        self._place = place

    @property
    def strategy(self) -> str:
        """`single` or `ddp`; the callback refuses others."""
        return "ddp" if self._place.world_size > 1 else "single"

    @property
    def zero_stage(self) -> int | None:
        """None: the callback refuses DeepSpeed."""
        return None

    @property
    def written_fraction(self) -> float:
        """The first rank writes everything."""
        return 1.0 if self._place.is_first else 0.0

    def modules(self) -> list[torch.nn.Module]:
        """The LightningModule."""
        return [self._trainer.lightning_module]

    def base(self, peers: Peers) -> Mapping[str, str] | None:
        """None: models with adapters are saved whole, with their base."""
        return None

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those of the LightningModule."""
        return list(self._trainer.optimizers)

    def write(self, folder: Path) -> None:
        """Write a file that `Trainer.fit(ckpt_path=…)` can read, too."""
        self._write(folder / STATE, weights_only=False)

    def write_final(self, folder: Path) -> None:
        """Write a file that `LightningModule.load_from_checkpoint` can read."""
        self._write(folder / _MODEL, weights_only=True)

    def _write(self, path: Path, *, weights_only: bool) -> None:
        # `Trainer.save_checkpoint` would end with a barrier, where all ranks wait for one whose save has failed.
        with self._direct_io():
            checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only)
            self._trainer.strategy.save_checkpoint(checkpoint, path)

    def load(self, folder: Path) -> None:
        """Nothing: Lightning loads through `restore`, earlier."""

    def restore(self, folder: Path, weights_only: bool | None, restore: Callable[[Path, bool | None], None]) -> None:
        """Restore modules and callbacks from a checkpoint; Lightning keeps the rest for later.

        Args:
            folder: the checkpoint.
            weights_only: see `DirectCheckpointIO.load_checkpoint`.
            restore: Lightning's own method, given a file.

        Raises:
            UsageError: Lightning did not write the checkpoint, or it contains objects that were not allowed.
        """
        if not (folder / STATE).exists():
            raise UsageError(
                f"{folder.name} has no {STATE}: it was not written by a Lightning Trainer",
                hint="resume with the script that wrote it, or start from the beginning with --from-scratch",
            )
        with self._direct_io():
            restore(folder / STATE, weights_only)

    def _direct_io(self) -> contextlib.AbstractContextManager[None]:
        return temporarily(self._trainer.strategy, checkpoint_io=DirectCheckpointIO())
