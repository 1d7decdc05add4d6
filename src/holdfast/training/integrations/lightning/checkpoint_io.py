"""How Lightning's files are written and read: by `torch.save`, to a path.

Lightning's own way serializes into memory first, twice the size of the state, and nobody could hand that to a keeper.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import CheckpointIO


class DirectCheckpointIO(CheckpointIO):
    """See `lightning.pytorch.plugins.CheckpointIO`; for any strategy that writes by it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file, in a folder that is made."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, path)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file, as much of it as is used; objects of the script's own only where there are any."""
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError:  # hyperparameters may be anything
            return torch.load(path, map_location="cpu", mmap=True, weights_only=False)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file."""
        Path(path).unlink(missing_ok=True)


__all__ = ["DirectCheckpointIO"]
