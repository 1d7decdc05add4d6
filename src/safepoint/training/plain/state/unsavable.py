"""Parts of a session that have `state_dict`, and whose state one rank alone cannot save or load.

They are known by the names of their classes, so that nothing is imported for those who do not use them.
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
    "FullyShardedDataParallel gathers its state on all ranks together, and a session lets the first one write it",
    "use torch.distributed.fsdp.fully_shard instead: each rank then saves its own shards",
)
_OF_DEEPSPEED = _Obstacle(
    "DeepSpeed's partitions are saved by its engine on all ranks together",
    "let an Accelerator prepare model and optimizer and call session(accelerator=…), or use Hugging Face's Trainer",
)
_OF_ZERO_REDUNDANCY = _Obstacle(
    "ZeroRedundancyOptimizer has a part of the state on each rank, and no rank has all of it",
    "use a usual optimizer under DistributedDataParallel, or torch.distributed.fsdp.fully_shard to share its state",
)


_OF_SHARDS = _Obstacle(
    "its state has sharded tensors, and of what is neither a module nor a torch optimizer the first rank writes all",
    "make it of whole tensors, or a torch.nn.Module",
)


def check_savable(parts: Mapping[str, Any]) -> None:
    """Refuse what a session cannot save.

    Args:
        parts: by name, as the script has given them.

    Raises:
        UsageError: one of them is shared between the ranks in a way that only it knows.
    """
    for name, part in parts.items():
        obstacle = _obstacle(part)
        if obstacle is not None:
            raise UsageError(f"a session cannot save {name}: {obstacle.reason}", hint=obstacle.hint)


def check_whole(name: str, state: Any) -> None:
    """Refuse the state of a part that the first rank writes, when it has its own shard of something only.

    Raises:
        UsageError: it has a sharded tensor.
    """
    if _has_shards(state):
        raise UsageError(f"a session cannot save {name}: {_OF_SHARDS.reason}", hint=_OF_SHARDS.hint)


def _has_shards(state: Any) -> bool:
    if isinstance(state, Mapping):
        state = list(cast("Mapping[Any, Any]", state).values())
    if isinstance(state, list | tuple):
        return any(map(_has_shards, cast("Iterable[Any]", state)))
    return isinstance(state, DTensor)


def _obstacle(part: Any) -> _Obstacle | None:
    if _DEEPSPEED & _kinds(part):
        return _OF_DEEPSPEED
    if _ZERO_REDUNDANCY in _kinds(part):
        return _OF_ZERO_REDUNDANCY
    if isinstance(part, torch.nn.Module):
        if any(hasattr(parameter, "ds_id") for parameter in part.parameters()):  # what an engine has partitioned
            return _OF_DEEPSPEED
        if any(_FSDP1 in _kinds(module) for module in part.modules()):
            return _OF_FSDP1
    return None


def _kinds(part: Any) -> set[str]:
    """The full names of its class and of all above it."""
    kinds: Iterable[type] = type(part).__mro__
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
