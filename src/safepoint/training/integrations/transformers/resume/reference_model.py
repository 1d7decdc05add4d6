"""TRL's reference model where it follows the one that is trained (`sync_ref_model`), and which nobody saves.

Without it a resume would begin with the reference of the first step. One file, written by the rank that writes the
model, and read by all.
"""

import logging
from pathlib import Path
from typing import Any

import torch

_NAME = "safepoint_reference.pt"
_log = logging.getLogger("safepoint")


class ReferenceModel:
    """The reference of one trainer, if it has one that changes.

    Args:
        trainer: about to train.
        is_sharded: whether no rank has all of a model; the reference is not saved then, and the log says so.
    """

    def __init__(self, trainer: Any, *, is_sharded: bool) -> None:
        model = getattr(trainer, "ref_model", None) if getattr(trainer.args, "sync_ref_model", False) else None
        self._model: torch.nn.Module | None = None if is_sharded else model
        if model is not None and is_sharded:
            _log.warning(
                "sync_ref_model=True: the reference is in shards and in no checkpoint; a resume begins with that of "
                "the first step"
            )

    def write(self, folder: Path) -> None:
        """Into a checkpoint in the making."""
        if self._model is not None:
            torch.save(self._model.state_dict(), folder / _NAME)

    def read(self, folder: Path) -> None:
        """From a verified checkpoint; one that has none, because the script asks for it since, changes nothing."""
        if self._model is not None and (folder / _NAME).is_file():
            self._model.load_state_dict(torch.load(folder / _NAME, map_location="cpu", weights_only=True))
