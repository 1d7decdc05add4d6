"""How Lightning's files are written and read: by `torch.save`, to a path.

Lightning's own way serializes into memory first, twice the size of the state, and nobody could hand that to a keeper.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import CheckpointIO

from safepoint.errors import UsageError


class DirectCheckpointIO(CheckpointIO):
    """See `lightning.pytorch.plugins.CheckpointIO`; for any strategy that writes by it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file, in a folder that is made."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, path)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file, as much of it as is used.

        Args:
            path: of the file.
            map_location: ignored; Lightning brings what it needs to the device.
            weights_only: what the script has told Lightning. Only where that is False objects are made of what the
                file says, which can run anything.

        Raises:
            UsageError: the file holds objects, and making them was not allowed.
        """
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only is not False)
        except pickle.UnpicklingError as error:
            if weights_only is False:
                raise
            raise UsageError(
                f"{Path(path).parent.name} is not loaded: {Path(path).name} is damaged or holds objects of Python, "
                "as hyperparameters may be, and loading these can run code; nothing of it was run",
                hint="if nobody hostile can write there, call Trainer.fit(…, weights_only=False), or name their "
                "classes with torch.serialization.add_safe_globals",
            ) from error

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file."""
        Path(path).unlink(missing_ok=True)
