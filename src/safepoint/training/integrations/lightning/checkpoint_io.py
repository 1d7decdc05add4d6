"""Writes and reads Lightning's files with `torch.save` and `torch.load`, directly to and from a path.

Lightning's own plugin serializes into memory first. That takes twice the size of the state, and the keeper could not
take over the write.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import CheckpointIO

from safepoint.errors import UsageError


class DirectCheckpointIO(CheckpointIO):
    """See `lightning.pytorch.plugins.CheckpointIO`; for any strategy that writes through it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file, and make its folder."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, path)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file; tensors are mapped and read when they are used.

        Args:
            path: of the file.
            map_location: ignored; Lightning copies what it needs to the device.
            weights_only: the script's argument to Lightning. Only False allows objects other than tensors and plain
                values, whose loading can run code.

        Raises:
            UsageError: the file contains such objects, and they were not allowed.
        """
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only is not False)
        except pickle.UnpicklingError as error:
            if weights_only is False:
                raise
            raise UsageError(
                f"{Path(path).parent.name} was not loaded: {Path(path).name} is damaged, or it contains Python "
                "objects (such as hyperparameters), whose loading can run code",
                hint="if you trust everyone who can write to that folder, call Trainer.fit(…, weights_only=False), "
                "or allow the classes with torch.serialization.add_safe_globals",
            ) from error

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file."""
        Path(path).unlink(missing_ok=True)
