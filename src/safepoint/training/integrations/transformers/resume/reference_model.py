"""TRL's reference model where it follows the trained model (`sync_ref_model`), because TRL does not save it.

Without it a resume would start with the reference of the first step. The rank that writes the model writes it into
one file, and all ranks read it.
"""

import logging
from pathlib import Path
from typing import Any

import torch

_NAME = "safepoint_reference.pt"
_log = logging.getLogger("safepoint")


class ReferenceModel:
    """The reference model of one trainer, if it has one that changes.

    Args:
        trainer: about to train.
        is_sharded: whether no rank has a whole model. The reference is then not saved, and a warning says so.
    """

    def __init__(self, trainer: Any, *, is_sharded: bool) -> None:
        model = getattr(trainer, "ref_model", None) if getattr(trainer.args, "sync_ref_model", False) else None
        self._model: torch.nn.Module | None = None if is_sharded else model
        if model is not None and is_sharded:
            _log.warning(
                "sync_ref_model=True: the reference model is sharded, so checkpoints do not contain it; a resume "
                "starts with the reference of the first step"
            )

    def write(self, folder: Path) -> None:
        """Write it into the folder of a checkpoint."""
        if self._model is not None:
            torch.save(self._model.state_dict(), folder / _NAME)

    def read(self, folder: Path) -> None:
        """Read it from a verified checkpoint; nothing where the checkpoint has none."""
        if self._model is not None and (folder / _NAME).is_file():
            self._model.load_state_dict(torch.load(folder / _NAME, map_location="cpu", weights_only=True))
