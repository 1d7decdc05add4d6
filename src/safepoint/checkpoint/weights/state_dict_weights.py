"""Weights in one file of `torch.save`: a state dict, as sessions and Accelerate write it, or within Lightning's."""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

from safepoint.checkpoint.weights.torch_file import StoredTensor, read_torch_file, runs_of
from safepoint.checkpoint.weights.weight import StoredWeight
from safepoint.errors import CheckpointError
from safepoint.storage.browsing import ReadablePath

NAMES = ("model.pt", "pytorch_model_fsdp.bin", "lightning.ckpt", "model.ckpt")
"""A session's model, Accelerate's under FSDP in one piece, and Lightning's, in a checkpoint and in `final/`."""
_STATE = "state_dict"
_Path = TypeVar("_Path", bound=ReadablePath)


def state_dict_file(folder: _Path) -> _Path | None:
    """The file of the model; None when there is none."""
    return next((folder / name for name in NAMES if (folder / name).is_file()), None)


def state_dict_weights(path: ReadablePath) -> list[StoredWeight]:
    """The model's weights; nothing of the file is run.

    Raises:
        CheckpointError: it is damaged, or holds something besides tensors.
        OSError: it cannot be read.
    """
    content = _mapping(read_torch_file(path))
    content = _mapping(content.get(_STATE)) or content
    if not content:
        raise CheckpointError(f"{path.name} holds no weights of a model")
    weights: list[StoredWeight] = []
    for name, tensor in content.items():
        if not isinstance(tensor, StoredTensor):
            raise CheckpointError(f"{name} in {path.name} is no tensor; load it with torch")
        runs = runs_of(tensor, [0] * len(tensor.sizes), tensor.sizes)
        weights.append(StoredWeight.of(name, tensor.dtype, tensor.sizes, runs))
    return weights


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
