"""Weights in a folder of torch.distributed.checkpoint, written by Safepoint or by another tool."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from safepoint.checkpoint.format.manifest import path_fault
from safepoint.checkpoint.weights.budget import Budget, Cost
from safepoint.checkpoint.weights.parts import make_whole
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
_MODEL = ("model", "state_dict", "module")
_NOT_MODEL = {"optim", "optimizer", "optimizers", "scheduler", "lr_scheduler", "rng", "rng_state", "trainer_state"}
_KNOWN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): numbers_of,
    **{("torch", dtype): dtype for dtype in ITEM_BYTES},
}


class Place(NamedTuple):
    """Where an archive is. An archive holds one part of a tensor, or a value that is not a tensor.

    Args:
        file: the name of the file in the folder.
        begin: where the archive begins in the file.
        length: the size of the archive in bytes.
    """

    file: str
    begin: int
    length: int


def check_apart(places: Iterable[Place]) -> None:
    """Check that no two archives overlap, so that reading all archives reads no byte twice. The archives that torch
    writes never overlap.

    Raises:
        CheckpointError: two places overlap.
    """
    last = Place("", 0, 0)
    for place in sorted(places):
        if place.file == last.file and place.begin < last.begin + last.length:
            raise CheckpointError(f"{METADATA} lists two parts that overlap at byte {place.begin} of {place.file}")
        if place.length:
            last = place


def dcp_weights(folder: ReadablePath, budget: Budget | None = None) -> list[StoredWeight]:
    """The model's weights.

    These are the tensors below a key `model`, `state_dict` or `module`. If there is no such key, they are all tensors
    that are not below a key of an optimizer, a scheduler, random numbers or the trainer (`_NOT_MODEL`).

    Args:
        folder: the folder that contains `.metadata`.
        budget: the budget of the checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, holds no weights or several models, or costs more than `budget`
            allows.
        OSError: a file cannot be read.
    """
    budget = budget or Budget()
    with (folder / METADATA).open("rb") as file:
        metadata = read_inert(file.read(MAX_PICKLE_BYTES + 1), _KNOWN, budget=budget)
    if not isinstance(metadata, Inert):
        raise CheckpointError(f"{folder.name}/{METADATA} does not describe a checkpoint")
    described: dict[str, Any] = metadata.get("state_dict_metadata")
    places = _places(metadata.get("storage_data"), budget)
    names = _names(described, metadata.state.get("planner_data") or {}, budget)
    if not names:
        raise CheckpointError(f"{folder.name} holds no weights of a model")
    chosen: list[Place] = []
    for key in names:
        parts = list(_parts(described[key], budget))
        if not make_whole(numbers_of(described[key].get("size")), parts):
            raise CheckpointError(f"the parts of {key} do not make the whole tensor")
        for offsets, _ in parts:
            place = places.get((key, offsets))
            if place is None:
                raise CheckpointError(f"{METADATA} does not say where a part of {key} is")
            chosen.append(place)
    check_apart(chosen)
    # Each chunk is an archive of its own. Only a few bytes of each archive are read, and most of the time is spent
    # waiting for the store. So several archives are read in parallel.
    tensors = iter(map_reads(lambda place: _tensor(folder, place, budget), chosen))
    weights: list[StoredWeight] = []
    for key, name in names.items():
        entry = described[key]
        dtype = entry.get("properties").state[0]
        sizes = numbers_of(entry.get("size"))
        if type(dtype) is not str or dtype not in ITEM_BYTES:
            raise CheckpointError(f"{name} is of an unknown type")
        runs: list[Run] = []
        for offsets, counts in _parts(entry):
            tensor = next(tensors)
            if (tensor.dtype, tensor.sizes) != (dtype, counts):
                raise CheckpointError(f"the type or size of a part of {name} differs from {METADATA}")
            runs += runs_of(tensor, offsets, sizes, budget)
        weights.append(StoredWeight.of(name, dtype, sizes, runs))
    return weights


def _parts(entry: Any, budget: Budget | None = None) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The offsets and sizes of the parts of a tensor. Parts without elements, which several ranks may write at the
    same offsets, are left out."""
    chunks = entry.get("chunks")
    if budget is not None:
        budget.spend(Cost.CHUNKS, len(chunks))  # counted for each key, because many keys may share one list
    for chunk in chunks:
        offsets, sizes = numbers_of(chunk.get("offsets")), numbers_of(chunk.get("sizes"))
        if math.prod(sizes):
            yield offsets, sizes


def _places(storage: Any, budget: Budget) -> dict[tuple[str, tuple[int, ...]], Place]:
    """(key, offsets) of each chunk → its place."""
    found: dict[tuple[str, tuple[int, ...]], Place] = {}
    budget.spend(Cost.PLACES, len(storage))
    for index, info in storage.items():
        name, key = info.get("relative_path"), index.get("fqn")
        if type(name) is not str or type(key) is not str:
            raise CheckpointError(f"{METADATA} has names that are not strings")
        fault = path_fault(name)
        if fault:
            raise CheckpointError(f"{METADATA} names a file {name!r}, which {fault}")
        if info.get("transform_descriptors", None):
            raise CheckpointError(f"{METADATA} names compressed parts; load them with torch")
        offsets = index.get("offset", None)
        begin, length = numbers_of([info.get("offset"), info.get("length")])
        found[key, numbers_of(offsets) if offsets is not None else ()] = Place(name, begin, length)
    return found


def _names(described: dict[str, Any], paths: dict[str, Any], budget: Budget) -> dict[str, str]:
    """Keys of the model's tensors → their names in the model.

    Raises:
        CheckpointError: there are several models, or more or longer names than `budget` allows.
    """
    tensors = [key for key, entry in described.items() if type(entry).__name__ == "TensorStorageMetadata"]
    split: dict[str, tuple[str, ...]] = {}
    for key in tensors:
        path = paths.get(key) or (key,)
        budget.spend(Cost.PATH_PARTS, len(path))  # counted for each key, because many keys may share one path
        if not all(type(part) in {str, int} for part in path):
            raise CheckpointError(f"{METADATA} has names that are not strings")
        if _NOT_MODEL.isdisjoint(path):
            split[key] = tuple(map(str, path))
    budget.spend(Cost.WEIGHTS, len(split))
    parts: dict[tuple[str, ...], dict[str, str]] = {}
    for key, path in split.items():
        depth = next((number for number, name in enumerate(path[:-1], start=1) if name in _MODEL), 0)
        budget.spend(Cost.LETTERS, sum(map(len, path)) + len(path))
        parts.setdefault(path[:depth], {})[key] = ".".join(path[depth:])
    named = [names for prefix, names in parts.items() if prefix]
    if len(named) > 1:
        raise CheckpointError(f"the checkpoint holds {len(named)} models; one is expected")
    return named[0] if named else parts.get((), {})


def _tensor(folder: ReadablePath, place: Place, budget: Budget) -> StoredTensor:
    tensor = read_torch_file(folder / place.file, begin=place.begin, length=place.length, budget=budget)
    if not isinstance(tensor, StoredTensor):
        raise CheckpointError(f"{place.file} has no tensor at byte {place.begin}, where {METADATA} lists a tensor")
    return tensor
