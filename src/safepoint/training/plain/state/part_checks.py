"""Checks of a session's parts: whether a rank can save their state, and whether a saved state fits the script.

A part is an object of the loop that has a state, such as the model or the optimizer. Classes are compared by name, so
that no library is imported only for the check.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from safepoint.errors import UsageError

Shapes = Mapping[str, tuple[int, ...] | None]
"""The shapes of a state's tensors and arrays, by name; None for a value without a shape."""

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
_ZERO_REDUNDANCY = "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer"
_DEEPSPEED = {"deepspeed.runtime.engine.DeepSpeedEngine", "deepspeed.runtime.base_optimizer.DeepSpeedOptimizer"}
_FSDP1_OBSTACLE = (
    "FullyShardedDataParallel needs all ranks to gather its state, and in a session only the first rank writes it",
    "use torch.distributed.fsdp.fully_shard instead: each rank then saves its own shards",
)
_DEEPSPEED_OBSTACLE = (
    "the state of DeepSpeed's engine is divided among the ranks, and only the engine can save it",
    "let an Accelerator prepare model and optimizer and call session(accelerator=…), or use Hugging Face's Trainer",
)
_ZERO_REDUNDANCY_OBSTACLE = (
    "ZeroRedundancyOptimizer has a part of the state on each rank, and no rank has all of it",
    "use an ordinary optimizer with DistributedDataParallel; to divide its state among the ranks, use "
    "torch.distributed.fsdp.fully_shard",
)
_SHARDS_OBSTACLE = (
    "its state has sharded tensors, and only modules and torch optimizers can be saved in shards",
    "keep whole tensors in it, or make it a torch.nn.Module",
)


def check_savable(parts: Mapping[str, Any]) -> None:
    """Refuse parts that a session cannot save.

    Args:
        parts: the parts, by name, as the script has given them.

    Raises:
        UsageError: the state of a part is divided among the ranks, and only the part's library can save it.
    """
    for name, part in parts.items():
        obstacle = _obstacle(part)
        if obstacle is not None:
            raise _refusal(name, obstacle)


def check_whole(name: str, state: Any) -> None:
    """Refuse a state with sharded tensors, for a part that the first rank writes alone.

    Raises:
        UsageError: the state has a sharded tensor.
    """
    if _has_shards(state):
        raise _refusal(name, _SHARDS_OBSTACLE)


def shapes_of(state: Mapping[str, Any]) -> Shapes:
    """The shapes in a flat state."""
    shapes = {name: getattr(one, "shape", None) for name, one in state.items()}
    return {name: None if shape is None else tuple(shape) for name, shape in shapes.items()}


def first_difference(saved: Shapes, now: Shapes) -> str:
    """The first difference of two states, in the alphabetical order of the names; empty if there is none.

    Args:
        saved: the shapes in a checkpoint.
        now: the shapes in the script.
    """
    for name in sorted(saved.keys() | now.keys()):
        if name not in saved or name not in now:
            return f"{name} is missing in {'the checkpoint' if name in now else 'the script'}"
        if saved[name] != now[name]:
            before, after = ("no tensor" if shape is None else shape for shape in (saved[name], now[name]))
            return f"{name} is {before} in the checkpoint and {after} in the script"
    return ""


def optimizer_difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Like `first_difference`, for the states of two optimizers: their groups, and the names of their settings."""
    before, after = ([len(group["params"]) for group in state["param_groups"]] for state in (saved, now))
    if before != after:
        return f"it has groups of {before} parameters in the checkpoint and of {after} in the script"
    for group, other in zip(saved["param_groups"], now["param_groups"], strict=True):
        gone, new = sorted(group.keys() - other.keys()), sorted(other.keys() - group.keys())
        # If settings are only missing, or only added, another release of torch has written the checkpoint.
        if gone and new:
            return f"it has {gone[0]!r} in the checkpoint and {new[0]!r} in the script"
    return ""


def _refusal(name: str, obstacle: tuple[str, str]) -> UsageError:
    reason, hint = obstacle
    return UsageError(f"a session cannot save {name}: {reason}", hint=hint)


def _has_shards(state: Any) -> bool:
    if isinstance(state, Mapping):
        state = list(cast("Mapping[Any, Any]", state).values())
    if isinstance(state, list | tuple):
        return any(map(_has_shards, cast("Iterable[Any]", state)))
    return isinstance(state, DTensor)


def _obstacle(part: Any) -> tuple[str, str] | None:
    """Why a session cannot save a part, and a hint; None when it can."""
    if _DEEPSPEED & _class_names(part):
        return _DEEPSPEED_OBSTACLE
    if _ZERO_REDUNDANCY in _class_names(part):
        return _ZERO_REDUNDANCY_OBSTACLE
    if isinstance(part, torch.nn.Module):
        if any(hasattr(parameter, "ds_id") for parameter in part.parameters()):  # partitioned by DeepSpeed's engine
            return _DEEPSPEED_OBSTACLE
        if any(_FSDP1 in _class_names(module) for module in part.modules()):
            return _FSDP1_OBSTACLE
    return None


def _class_names(part: Any) -> set[str]:
    """The full names of the part's class and of all base classes."""
    kinds: Iterable[type] = type(part).__mro__
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
