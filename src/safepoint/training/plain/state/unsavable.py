"""Refuses parts of a session whose state a single rank cannot save or load.

Their classes are compared by name, so that nothing is imported for scripts that do not use them.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor

from safepoint.errors import UsageError

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
_ZERO_REDUNDANCY = "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer"
_DEEPSPEED = {"deepspeed.runtime.engine.DeepSpeedEngine", "deepspeed.runtime.base_optimizer.DeepSpeedOptimizer"}


class _Obstacle(NamedTuple):
    reason: str
    hint: str


_OF_FSDP1 = _Obstacle(
    "FullyShardedDataParallel needs all ranks to gather its state, and in a session only the first rank writes it",
    "use torch.distributed.fsdp.fully_shard instead: each rank then saves its own shards",
)
_OF_DEEPSPEED = _Obstacle(
    "DeepSpeed's engine saves its partitions on all ranks together",
    "let an Accelerator prepare model and optimizer and call session(accelerator=…), or use Hugging Face's Trainer",
)
_OF_ZERO_REDUNDANCY = _Obstacle(
    "ZeroRedundancyOptimizer has a part of the state on each rank, and no rank has all of it",
    "use a usual optimizer under DistributedDataParallel, or torch.distributed.fsdp.fully_shard to share its state",
)
_OF_SHARDS = _Obstacle(
    "its state has sharded tensors, and only modules and torch optimizers can be saved in shards",
    "make it of whole tensors, or a torch.nn.Module",
)


def check_savable(parts: Mapping[str, Any]) -> None:
    """Refuse what a session cannot save.

    Args:
        parts: by name, as the script has given them.

    Raises:
        UsageError: the ranks share one of them in a way that only its library can save.
    """
    for name, part in parts.items():
        obstacle = _obstacle(part)
        if obstacle is not None:
            raise _refusal(name, obstacle)


def check_whole(name: str, state: Any) -> None:
    """Refuse a state with sharded tensors, for a part that the first rank writes alone.

    Raises:
        UsageError: it has a sharded tensor.
    """
    if _has_shards(state):
        raise _refusal(name, _OF_SHARDS)


def _refusal(name: str, obstacle: _Obstacle) -> UsageError:
    return UsageError(f"a session cannot save {name}: {obstacle.reason}", hint=obstacle.hint)


def _has_shards(state: Any) -> bool:
    if isinstance(state, Mapping):
        state = list(cast("Mapping[Any, Any]", state).values())
    if isinstance(state, list | tuple):
        return any(map(_has_shards, cast("Iterable[Any]", state)))
    return isinstance(state, DTensor)


def _obstacle(part: Any) -> _Obstacle | None:
    if _DEEPSPEED & _class_names(part):
        return _OF_DEEPSPEED
    if _ZERO_REDUNDANCY in _class_names(part):
        return _OF_ZERO_REDUNDANCY
    if isinstance(part, torch.nn.Module):
        if any(hasattr(parameter, "ds_id") for parameter in part.parameters()):  # partitioned by DeepSpeed's engine
            return _OF_DEEPSPEED
        if any(_FSDP1 in _class_names(module) for module in part.modules()):
            return _OF_FSDP1
    return None


def _class_names(part: Any) -> set[str]:
    """The full names of its class and of all base classes."""
    kinds: Iterable[type] = type(part).__mro__
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
