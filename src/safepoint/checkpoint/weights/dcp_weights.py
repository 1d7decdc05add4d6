"""Weights in a folder of torch.distributed.checkpoint, written by Safepoint or by another tool."""

import math
from typing import Any

from safepoint.checkpoint.format.manifest import path_fault
from safepoint.checkpoint.weights.stored_weight import Run, StoredWeight
from safepoint.checkpoint.weights.torch_file import (
    ITEM_BYTES,
    MAX_PICKLE_BYTES,
    Inert,
    StoredTensor,
    numbers_of,
    read_inert,
    read_torch_file,
    runs_of,
)
from safepoint.errors import CheckpointError
from safepoint.storage.browsing import ReadablePath
from safepoint.storage.read_ahead import map_reads

METADATA = ".metadata"
_MOST_RUNS = 1 << 24
"""The largest number of runs of all weights together. That many take about 3 GB of memory."""
_MODEL = ("model", "state_dict", "module")
_NOT_MODEL = {"optim", "optimizer", "optimizers", "scheduler", "lr_scheduler", "rng", "rng_state", "trainer_state"}
_KNOWN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): numbers_of,
    **{("torch", dtype): dtype for dtype in ITEM_BYTES},
}


def dcp_weights(folder: ReadablePath) -> list[StoredWeight]:
    """The model's weights.

    These are the tensors below a key `model`, `state_dict` or `module`. Without such a key, they are all tensors that
    are not below a key of an optimizer, a scheduler, random numbers or the trainer (`_NOT_MODEL`).

    Args:
        folder: the folder that contains `.metadata`.

    Raises:
        CheckpointError: the checkpoint is damaged, or holds no weights, or several models.
        OSError: a file cannot be read.
    """
    with (folder / METADATA).open("rb") as file:
        metadata = read_inert(file.read(MAX_PICKLE_BYTES + 1), _KNOWN)
    if not isinstance(metadata, Inert):
        raise CheckpointError(f"{folder.name}/{METADATA} does not describe a checkpoint")
    described: dict[str, Any] = metadata.get("state_dict_metadata")
    places = _places(metadata.get("storage_data"))
    names = _names(described, metadata.state.get("planner_data") or {})
    if not names:
        raise CheckpointError(f"{folder.name} holds no weights of a model")
    chunks = [(key, numbers_of(chunk.get("offsets"))) for key in names for chunk in described[key].get("chunks")]

    def tensor_of(chunk: tuple[str, tuple[int, ...]]) -> StoredTensor:
        return _tensor(folder, places.get(chunk), chunk[0])

    # Each chunk is an archive of its own. Only a few bytes of each are read, so several are read at once.
    tensors = dict(zip(chunks, map_reads(tensor_of, chunks), strict=True))
    weights: list[StoredWeight] = []
    num_runs = 0
    for key, name in names.items():
        entry = described[key]
        dtype = entry.get("properties").state[0]
        sizes = numbers_of(entry.get("size"))
        if type(dtype) is not str or dtype not in ITEM_BYTES:
            raise CheckpointError(f"{name} is of an unknown type")
        runs: list[Run] = []
        stated = sum(math.prod(numbers_of(chunk.get("sizes"))) for chunk in entry.get("chunks"))
        if stated > math.prod(sizes):  # such as one part that is listed a million times
            raise CheckpointError(f"the parts of {name} have {stated} elements, but {name} has {math.prod(sizes)}")
        for chunk in entry.get("chunks"):
            offsets, counts = numbers_of(chunk.get("offsets")), numbers_of(chunk.get("sizes"))
            tensor = tensors[key, offsets]
            if (tensor.dtype, tensor.sizes) != (dtype, counts):
                raise CheckpointError(f"the type or size of a part of {name} differs from {METADATA}")
            runs += runs_of(tensor, offsets, sizes)
            if num_runs + len(runs) > _MOST_RUNS:
                raise CheckpointError("the weights are stored in too many pieces; load them with torch")
        weights.append(StoredWeight.of(name, dtype, sizes, runs))
        num_runs += len(runs)
    return weights


def _places(storage: Any) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
    """(key, offsets) of each chunk → its file, where it begins in the file, and its length."""
    found: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for index, info in storage.items():
        name, key = info.get("relative_path"), index.get("fqn")
        if type(name) is not str or type(key) is not str:
            raise CheckpointError(f"{METADATA} has names that are no strings")
        fault = path_fault(name)
        if fault:
            raise CheckpointError(f"{METADATA} names a file {name!r}, which {fault}")
        offsets = index.get("offset", None)
        found[key, numbers_of(offsets) if offsets is not None else ()] = (
            name,
            int(info.get("offset")),
            int(info.get("length")),
        )
    return found


def _names(described: dict[str, Any], paths: dict[str, Any]) -> dict[str, str]:
    """Keys of the model's tensors → their names in the model.

    Raises:
        CheckpointError: there are several models.
    """
    tensors = [key for key, entry in described.items() if type(entry).__name__ == "TensorStorageMetadata"]
    split = {key: tuple(paths.get(key) or (key,)) for key in tensors}
    if not all(type(part) in {str, int} for path in split.values() for part in path):
        raise CheckpointError(f"{METADATA} has names that are no strings")
    split = {key: tuple(map(str, path)) for key, path in split.items()}
    split = {key: path for key, path in split.items() if not _NOT_MODEL & set(path)}
    parts: dict[tuple[str, ...], dict[str, str]] = {}
    for key, path in split.items():
        depth = next((number for number, name in enumerate(path[:-1], start=1) if name in _MODEL), 0)
        parts.setdefault(path[:depth], {})[key] = ".".join(path[depth:])
    named = [names for prefix, names in parts.items() if prefix]
    if len(named) > 1:
        raise CheckpointError(f"the checkpoint holds {len(named)} models; one is expected")
    return named[0] if named else parts.get((), {})


def _tensor(folder: ReadablePath, place: tuple[str, int, int] | None, key: str) -> StoredTensor:
    if place is None:
        raise CheckpointError(f"{METADATA} does not say where a part of {key} is")
    name, begin, length = place
    tensor = read_torch_file(folder / name, begin=begin, length=length)
    if not isinstance(tensor, StoredTensor):
        raise CheckpointError(f"{key} is not a tensor in {name}")
    return tensor
