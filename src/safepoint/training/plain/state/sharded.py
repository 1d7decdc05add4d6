"""Modules whose parameters are sharded over the ranks (`fully_shard`), and their optimizers, through DCP.

Each rank writes its shards; with another number of ranks DCP reads from all of them what each needs.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from safepoint.errors import ConflictError, UsageError
from safepoint.training.plain.state.adapters import without
from safepoint.training.plain.state.outline import Outline, difference_of, outline_of
from safepoint.training.state.base_model import plain_key

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
        """Load what any number of ranks has written; all ranks call it.

        Raises:
            ConflictError: it is the state of another module, or of other optimizers.
        """
        state = self._state()
        then = _outline_in(folder)
        unused = _unused(then, state)
        for name in unused:
            del state["optimizer"]["state"][name]
        difference = difference_of(then, _outline_of(state))
        if difference:
            name = folder.parent.name
            raise ConflictError(
                f"{self.names[0]} of {name} is not this script's: {difference}; training was not started",
                hint="make it and its optimizers as they were then, or begin anew with --from-scratch",
            )
        _dcp.load(state, checkpoint_id=str(folder))
        # What DCP had to find is all there: only the base of adapters, and what was never stepped, may be missing.
        options = StateDictOptions(strict=not self.left_out)
        set_model_state_dict(self._module, state["model"], options=options)
        options = StateDictOptions(strict=not unused)
        set_optimizer_state_dict(self._module, self._optimizers, state["optimizer"], options=options)
        self._forget(unused)

    def _forget(self, unused: Collection[str]) -> None:
        """Take back the state that DCP has given to parameters that had none."""
        for name, parameter in self._module.named_parameters():
            if plain_key(name) in unused:
                for optimizer in self._optimizers:
                    optimizer.state.pop(parameter, None)


_MOMENTS = "optimizer.state."


def _outline_in(folder: Path) -> Outline:
    metadata: Any = _dcp.FileSystemReader(str(folder)).read_metadata()
    return {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(("model.", _MOMENTS))
    }


def _outline_of(state: Mapping[str, Any]) -> Outline:
    moments = state["optimizer"].get("state", {})
    tensors = {f"model.{key}": value for key, value in state["model"].items()}
    tensors |= {f"{_MOMENTS}{key}.{name}": one for key, of in moments.items() for name, one in of.items()}
    return outline_of({name: one for name, one in tensors.items() if isinstance(one, torch.Tensor)})


def _unused(then: Outline, state: Mapping[str, Any]) -> list[str]:
    """Parameters that had no gradient before the save, and so no state; none of them when all have none."""
    names: list[str] = list(state["optimizer"].get("state", {}))
    found = [name for name in names if not any(key.startswith(f"{_MOMENTS}{name}.") for key in then)]
    return found if len(found) < len(names) else []


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
