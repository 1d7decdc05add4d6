"""Modules whose parameters are sharded over the ranks (`fully_shard`), and their optimizers, through DCP.

Each rank writes its shards; with another number of ranks DCP reads from all of them what each needs.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from holdfast.errors import UsageError
from holdfast.training.plain.adapters import without

_dcp: Any = dcp


class ShardedParts:
    """One module and its optimizers.

    Args:
        names: of the module and of each optimizer, among the session's parts.
        module: with sharded parameters.
        optimizers: over them.
    """

    def __init__(self, names: list[str], module: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.names = names
        self._module = module
        self._optimizers = optimizers
        self.left_out: Collection[str] = ()
        """See `left_to_base`; empty without adapters."""

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._module, self._optimizers)
        return {"model": without(model, self.left_out), "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        """Write this rank's shards; all ranks call it, each with a folder of its own."""
        # DCP makes the folder, between its collective calls: a rank that cannot tells the others.
        _dcp.save(self._state(), checkpoint_id=str(folder))

    def load(self, folder: Path) -> None:
        """Load what any number of ranks has written; all ranks call it."""
        state = self._state()
        _dcp.load(state, checkpoint_id=str(folder))
        # What DCP had to find is all there: only the base of adapters may be missing.
        options = StateDictOptions(strict=not self.left_out)
        set_model_state_dict(self._module, state["model"], options=options)
        set_optimizer_state_dict(self._module, self._optimizers, state["optimizer"])


def sharded_parts(parts: Mapping[str, Any]) -> ShardedParts | None:
    """What of a session's parts is sharded; None when nothing is.

    Raises:
        UsageError: several modules are.
    """
    modules = [
        name for name, part in parts.items() if isinstance(part, torch.nn.Module) and _has_shards(part.parameters())
    ]
    if not modules:
        return None
    if len(modules) > 1:
        raise UsageError(
            f"{modules[0]} and {modules[1]} are both sharded, and a session saves one sharded module",
            hint="put them into one torch.nn.Module",
        )
    optimizers = {
        name: part
        for name, part in parts.items()
        if isinstance(part, torch.optim.Optimizer)
        and _has_shards(parameter for group in part.param_groups for parameter in group["params"])
    }
    return ShardedParts([modules[0], *optimizers], parts[modules[0]], list(optimizers.values()))


def _has_shards(parameters: Any) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in parameters)


__all__ = ["ShardedParts", "sharded_parts"]
