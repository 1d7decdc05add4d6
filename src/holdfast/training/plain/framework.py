"""A hand-written loop as the engine sees it; each part of its state is a file that `torch.save` writes."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import UsageError
from holdfast.foundation.environment import Place
from holdfast.training.engine.framework import Write
from holdfast.training.plain.data import Data, Position
from holdfast.training.plain.sharded import sharded_parts
from holdfast.training.rng import capture_rng

_RANK_FILE = "rank_{rank}.pt"
_SHARDS = "sharded"


class PlainFramework:
    """See `engine.framework.Framework`.

    Args:
        parts: name → model, optimizer, scheduler, and whatever else has `state_dict` and `load_state_dict`.
        data: what is trained on.
        place: this rank.
    """

    def __init__(self, parts: Mapping[str, Any], data: Data, place: Place) -> None:
        self._parts = {name: _unwrapped(part) for name, part in parts.items()}
        self._data = data
        self._place = place
        self.handed_step: int | None = None
        self.step = 0
        """Optimizer steps done."""
        self.batches_per_step = 1
        """Batches of this rank between two of them."""
        self._sharded = sharded_parts(self._parts)

    @property
    def strategy(self) -> str:
        """How the ranks share the model."""
        if self._sharded is not None:
            return "fsdp"
        return "ddp" if self._place.world_size > 1 else "single"

    @property
    def has_large_files(self) -> bool:
        """The first rank has what all of them have; of what is sharded each has its own."""
        return self._place.is_first or self._sharded is not None

    def parameters(self) -> Iterable[torch.Tensor]:
        """Of all modules."""
        modules = [part for part in self._parts.values() if isinstance(part, torch.nn.Module)]
        return [parameter for module in modules for parameter in module.parameters()]

    def moments_per_parameter(self) -> int:
        """Two, as the usual optimizers have."""
        return 2

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All that were named."""
        return [part for part in self._parts.values() if isinstance(part, torch.optim.Optimizer)]

    def manifest_fields(self, step: int) -> dict[str, Any]:
        """Where the data stands."""
        data, world_size, accumulation = self._data, self._place.world_size, self.batches_per_step
        in_epoch = data.num_batches
        samples = data.batch_size * world_size
        return {
            "epoch": data.epoch + (data.batches / in_epoch if in_epoch else 0.0),
            "world_size": world_size,
            "global_batch": samples * accumulation,
            "gradient_accumulation": accumulation,
            "samples_seen": (data.epoch * (in_epoch or 0) + data.batches) * samples,
        }

    def retention(self) -> tuple[int | None, set[int]]:
        """What the options say, and nothing besides."""
        return None, set()

    def write_again(self) -> Write:
        """Everything, as it is now."""

        def write(_: Path, folder: Path) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            if self._sharded is not None:
                self._sharded.save(folder / _SHARDS)
            if self._place.is_first:
                for name, part in self._whole_parts():
                    torch.save(part.state_dict(), folder / f"{name}.pt")
            position = self._data.position()
            place = {field.name: getattr(position, field.name) for field in dataclasses.fields(position)}
            mine = {"rng": capture_rng(), "position": place}
            torch.save(mine, folder / _RANK_FILE.format(rank=self._place.rank))

        return write

    def _whole_parts(self) -> list[tuple[str, Any]]:
        sharded = self._sharded.names if self._sharded is not None else []
        return [(name, part) for name, part in self._parts.items() if name not in sharded]

    def write_final(self, folder: Path) -> None:
        """The modules alone; what is sharded as it is in a checkpoint."""
        if self._sharded is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._sharded.save(folder / _SHARDS)
        if self._place.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            for name, part in self._whole_parts():
                if isinstance(part, torch.nn.Module):
                    torch.save(part.state_dict(), folder / f"{name}.pt")

    def load(self, folder: Path, *, ranks_before: int) -> tuple[Position, dict[str, Any]]:
        """Load what `write_again` has written.

        Args:
            folder: a verified checkpoint.
            ranks_before: how many ranks wrote it.

        Returns:
            This rank's place in the data, and its random number states.

        Raises:
            UsageError: the checkpoint has no such part.
        """
        missing = [name for name, _ in self._whole_parts() if not (folder / f"{name}.pt").exists()]
        if self._sharded is not None and not (folder / _SHARDS).exists():
            missing += self._sharded.names
        if missing:
            raise UsageError(
                f"{folder.name} has no {missing[0]}: it was written by a session with other parts",
                hint="give the session what it was given then, or begin anew with --from-scratch",
            )
        if self._sharded is not None:
            self._sharded.load(folder / _SHARDS)
        for name, part in self._whole_parts():
            part.load_state_dict(load_plain(folder / f"{name}.pt"))
        mine = load_plain(folder / _RANK_FILE.format(rank=self._place.rank % ranks_before))
        return Position(**mine["position"]), mine["rng"]


def load_plain(path: Path) -> dict[str, Any]:
    """Read a file of plain values, tensors and numpy's random number states; anything else in it is never run."""
    import numpy as np

    allowed: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), np._core.multiarray._reconstruct]  # pyright: ignore
    with torch.serialization.safe_globals(allowed):
        return torch.load(path, map_location="cpu", weights_only=True)


def _unwrapped(part: Any) -> Any:
    """What DistributedDataParallel and torch.compile have wrapped: names of parameters stay those of the model."""
    for wrapper in ("_orig_mod", "module", "_orig_mod"):
        if wrapper != "module" or isinstance(part, torch.nn.parallel.DistributedDataParallel):
            part = getattr(part, wrapper, part)
    return part


__all__ = ["PlainFramework", "load_plain"]
