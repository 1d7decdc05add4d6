"""Weights in one file of `torch.save`, as sessions, Accelerate and Lightning write them."""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

from safepoint.checkpoint.weights.budget import Budget, Cost
from safepoint.checkpoint.weights.stored_weight import StoredWeight
from safepoint.checkpoint.weights.torch_file import StoredTensor, read_torch_file, runs_of
from safepoint.errors import CheckpointError
from safepoint.storage.browsing import ReadablePath

_STATE_DICTS = ("model.pt", "pytorch_model_fsdp.bin", "lightning.ckpt", "model.ckpt")
"""The files in which weights are looked for, in this order: a session's model; Accelerate's model under FSDP, in one
file; Lightning's checkpoint; Lightning's final model."""
_Path = TypeVar("_Path", bound=ReadablePath)


def state_dict_file(folder: _Path) -> _Path | None:
    """The file in `folder` that has the model's weights; None if there is none."""
    return next((folder / name for name in _STATE_DICTS if (folder / name).is_file()), None)


def state_dict_weights(path: ReadablePath, budget: Budget | None = None) -> list[StoredWeight]:
    """The model's weights; no code of the file is run.

    Args:
        path: see `state_dict_file`.
        budget: the budget of the checkpoint.

    Raises:
        CheckpointError: the file is damaged, holds something besides tensors, or costs more than `budget` allows.
        OSError: the file cannot be read.
    """
    budget = budget or Budget()
    content = _mapping(read_torch_file(path, budget=budget))
    content = _mapping(content.get("state_dict")) or content
    if not content:
        raise CheckpointError(f"{path.name} holds no weights of a model")
    budget.spend(Cost.WEIGHTS, len(content))
    weights: list[StoredWeight] = []
    for name, tensor in content.items():
        if not isinstance(tensor, StoredTensor):
            raise CheckpointError(
                f"{name} in {path.name} is not a tensor, so the weights cannot be read; load the file with torch"
            )
        runs = runs_of(tensor, [0] * len(tensor.sizes), tensor.sizes, budget)
        weights.append(StoredWeight.of(name, tensor.dtype, tensor.sizes, runs))
    return weights


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
