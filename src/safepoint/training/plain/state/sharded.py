"""Saves and loads a module whose parameters are sharded over the ranks (`fully_shard`), and its optimizers.

This is done with DCP, torch.distributed.checkpoint. Each rank writes its shards. If the number of ranks has changed,
each rank reads the ranges that it needs from the shards of all ranks.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from safepoint.checkpoint.pickles.loading import states_of
from safepoint.checkpoint.pickles.module_states import checked_modules
from safepoint.checkpoint.pickles.optimizer_states import checked_optimizers
from safepoint.errors import ConflictError, UsageError
from safepoint.training.plain.state.part_checks import Shapes, first_difference, shapes_of
from safepoint.training.state.base_model import plain_key, without
from safepoint.training.state.data_only import only_data

_dcp: Any = dcp


class ShardedParts:
    """One module and its optimizers.

    Args:
        names: the names of these parts in the session: first the module's name, then the optimizers' names.
        module: the module, whose parameters are sharded.
        optimizers: the optimizers of these parameters.
    """

    def __init__(self, names: list[str], module: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.names = names
        self._module = module
        self._optimizers = optimizers
        self.left_out: Collection[str] = ()
        """The names of the entries that belong to the base model of adapters, and are not saved. Empty if there are
        no adapters."""

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._module, self._optimizers)
        return {"model": without(model, self.left_out), "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        """Write this rank's shards of the module and of the optimizers' state.

        All ranks call this method, each with a separate folder.
        """
        self._save(self._state(), folder)

    def save_model(self, folder: Path) -> None:
        """Like `save`, without the optimizers' state."""
        model = get_model_state_dict(self._module)
        self._save({"model": without(model, self.left_out)}, folder)

    def _save(self, state: dict[str, Any], folder: Path) -> None:
        # DCP makes the folder itself. If a rank cannot make it, all ranks receive the error in a collective call.
        _dcp.save(state, checkpoint_id=str(folder))

    def load(self, folder: Path) -> None:
        """Load the shards of a checkpoint that any number of ranks wrote; all ranks call this method.

        Raises:
            ConflictError: the checkpoint belongs to another module, or to other optimizers.
        """
        state = self._state()
        with only_data(folder):
            saved = _shapes_in(folder)
        unused = _unused(saved, state)
        for name in unused:
            del state["optimizer"]["state"][name]
        difference = first_difference(saved, _shapes_of_state(state))
        if difference:
            name = folder.parent.name
            raise ConflictError(
                f"{self.names[0]} of {name} differs from this script's: {difference}; training was not started",
                hint="create the module and its optimizers as in the run that wrote the checkpoint, or start from "
                "the beginning with --from-scratch",
            )
        with only_data(folder):
            _dcp.load(state, checkpoint_id=str(folder))
        # `state` has no entries for the base model of adapters, and no optimizer state of unused parameters. Strict
        # loading would raise an error for both. All other entries were loaded: `dcp.load` fails if an entry is
        # missing.
        options = StateDictOptions(strict=not self.left_out)
        with checked_modules(folder):
            set_model_state_dict(self._module, state["model"], options=options)
        options = StateDictOptions(strict=not unused)
        with states_of(folder), checked_optimizers(folder, *self._optimizers):
            set_optimizer_state_dict(self._module, self._optimizers, state["optimizer"], options=options)
        # DCP has created optimizer state for the unused parameters. Remove this state again.
        for name, parameter in self._module.named_parameters():
            if plain_key(name) in unused:
                for optimizer in self._optimizers:
                    optimizer.state.pop(parameter, None)


_MOMENTS = "optimizer.state."


def _shapes_in(folder: Path) -> Shapes:
    metadata: Any = _dcp.FileSystemReader(str(folder)).read_metadata()
    return {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(("model.", _MOMENTS))
    }


def _shapes_of_state(state: Mapping[str, Any]) -> Shapes:
    moments = state["optimizer"].get("state", {})
    tensors = {f"model.{key}": value for key, value in state["model"].items()}
    tensors |= {f"{_MOMENTS}{key}.{name}": one for key, entries in moments.items() for name, one in entries.items()}
    return shapes_of({name: one for name, one in tensors.items() if isinstance(one, torch.Tensor)})


def _unused(saved: Shapes, state: Mapping[str, Any]) -> list[str]:
    """The parameters that have no optimizer state in the checkpoint, because they had no gradient.

    Empty if the checkpoint has no optimizer state at all, as with plain SGD.
    """
    names: list[str] = list(state["optimizer"].get("state", {}))
    found = [name for name in names if not any(key.startswith(f"{_MOMENTS}{name}.") for key in saved)]
    return found if len(found) < len(names) else []


def sharded_parts(parts: Mapping[str, Any]) -> ShardedParts | None:
    """The sharded module and its optimizers among a session's parts; None when no module is sharded.

    Raises:
        UsageError: several modules are sharded.
    """
    modules = [
        name for name, part in parts.items() if isinstance(part, torch.nn.Module) and _has_shards(part.parameters())
    ]
    if not modules:
        return None
    if len(modules) > 1:
        raise UsageError(
            f"{modules[0]} and {modules[1]} are both sharded, but a session can save only one sharded module",
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
