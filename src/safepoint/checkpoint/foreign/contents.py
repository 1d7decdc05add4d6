"""Checks one file of a checkpoint, or one folder of torch.distributed.checkpoint (DCP), without loading a tensor.

No code of a file is run. If a file is damaged, a function raises CheckpointError or ValueError. The message completes
a sentence that begins with the name of the file. The functions read a bounded amount, whatever a file states. The
`Budget` of a checkpoint limits what all its files cost together.
"""

import io
import math
import re
from collections.abc import Collection
from typing import Any, NamedTuple, cast

from safepoint.checkpoint.foreign.names import AllowedNames
from safepoint.checkpoint.format.manifest import MAX_MANIFEST_BYTES, path_fault
from safepoint.checkpoint.format.safetensors_layout import LENGTH_BYTES, MAX_HEADER_BYTES, SIZES
from safepoint.checkpoint.weights.budget import Budget, Cost
from safepoint.checkpoint.weights.dcp_weights import METADATA, Place, check_apart
from safepoint.checkpoint.weights.parts import make_whole
from safepoint.checkpoint.weights.torch_file import (
    ITEM_BYTES,
    MAX_PICKLE_BYTES,
    Inert,
    numbers_of,
    read_inert,
    read_torch_file,
)
from safepoint.errors import CheckpointError
from safepoint.foundation.bounded_json import parse_object
from safepoint.foundation.field_types import VARIABLES
from safepoint.storage.browsing import ReadablePath

_SHARD = re.compile(r"__([0-9]{1,9})_[0-9]+\.distcp")
_KNOWN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): numbers_of,
    **{("torch", dtype): dtype for dtype in ITEM_BYTES},
}


def read_json(path: ReadablePath) -> dict[str, Any]:
    """The object in a JSON file, in which Python's `NaN` and `Infinity` may occur."""
    with path.open("rb") as file:
        return parse_object(file.read(MAX_MANIFEST_BYTES + 1), max_bytes=MAX_MANIFEST_BYTES, constant=float)


def tensors_of(path: ReadablePath) -> set[str]:
    """Compare the header of a safetensors file with the size of the file, and return the names of its tensors."""
    with path.open("rb") as file:
        size_bytes = file.seek(0, io.SEEK_END)
        file.seek(0)
        length = int.from_bytes(file.read(LENGTH_BYTES), "little") if size_bytes >= LENGTH_BYTES else -1
        data_bytes = size_bytes - LENGTH_BYTES - length
        if length < 0 or data_bytes < 0 or length > MAX_HEADER_BYTES:
            raise CheckpointError("not a safetensors file, or truncated: the file is shorter than its header says")
        header: dict[str, Any] = parse_object(file.read(length), max_bytes=MAX_HEADER_BYTES)
    described: Any = header.pop("__metadata__", None)
    if described is not None and not VARIABLES.fits(described):  # the library refuses such a file
        raise CheckpointError("its __metadata__ is not a mapping of names to texts")
    places = sorted(_place_of(name, record) for name, record in header.items())
    end = 0
    for begin, after, name in places:
        if begin != end:
            raise CheckpointError(f"the bytes of the tensor {name!r} do not follow the bytes of the tensor before it")
        end = after
    if end != data_bytes:
        raise CheckpointError(f"its header describes {end} bytes of tensors, and the file has {data_bytes}")
    return set(header)


def _place_of(name: str, record: Any) -> tuple[int, int, str]:
    """Where the bytes of a tensor begin and end, and the tensor's name.

    Raises:
        CheckpointError: the header does not describe the tensor, or states a wrong number of bytes.
    """
    if not isinstance(record, dict):
        raise CheckpointError(f"its header does not describe the tensor {name!r}")
    described = cast("dict[str, Any]", record)
    offsets, sizes, kind = (described.get(field) for field in ("data_offsets", "shape", "dtype"))
    if not isinstance(offsets, list) or not isinstance(sizes, list) or not isinstance(kind, str):
        raise CheckpointError(f"its header does not describe the tensor {name!r}")
    begin, end = numbers_of(offsets)
    size_bytes = math.prod(numbers_of(sizes)) * SIZES[kind] if kind in SIZES else end - begin
    if end < begin or end - begin != size_bytes:
        raise CheckpointError(
            f"the tensor {name!r} has {end - begin} bytes, and its type and shape need {size_bytes}"
        )
    return begin, end, name


def check_pickles(path: ReadablePath, names: AllowedNames, budget: Budget) -> Any:
    """Check a file of `torch.save`: it is whole, it holds data only, and every tensor is inside it.

    Returns:
        The content of the file; see `read_torch_file`.
    """
    return read_torch_file(path, check_name=names.check, budget=budget)


def shards_named_by(path: ReadablePath) -> dict[str, set[str]]:
    """The files that the index of a sharded model names, each with the names of its weights."""
    named: Any = read_json(path).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise CheckpointError("it has no weight_map")
    found: dict[str, set[str]] = {}
    for weight, file in cast("dict[str, Any]", named).items():
        fault = path_fault(file) if isinstance(file, str) else "is not a string"
        if fault or "/" in file:
            raise CheckpointError(f"it names the file {file!r}, which {fault or 'is in another folder'}")
        found.setdefault(file, set()).add(weight)
    return found


def check_index(folder: ReadablePath, path: str, files: Collection[str]) -> None:
    """Check that the index of a sharded model names files of the checkpoint, and weights that these files have.

    Args:
        folder: the folder of the checkpoint.
        path: the path of the index in the folder.
        files: the paths of all files in the folder.
    """
    for shard, weights in shards_named_by(folder / path).items():
        if shard not in files:
            raise CheckpointError(f"it names the file {shard}, which is missing")
        if shard.endswith(".safetensors") and not weights <= tensors_of(folder / shard):
            raise CheckpointError(f"it names a weight that {shard} does not have")


class DcpFolder(NamedTuple):
    """The facts that the metadata of torch.distributed.checkpoint states.

    Args:
        num_ranks: a lower bound of the number of ranks that wrote the checkpoint.
        keys: the names of the checkpoint's tensors and values.
    """

    num_ranks: int
    keys: frozenset[str]


def check_dcp(folder: ReadablePath, names: AllowedNames, budget: Budget) -> DcpFolder:
    """Compare the metadata of torch.distributed.checkpoint with the files of the folder.

    Values that are not tensors are read too. No byte of a file is read twice, because parts that overlap are refused.
    """
    with (folder / METADATA).open("rb") as file:
        pickled = file.read(MAX_PICKLE_BYTES + 1)
    metadata = read_inert(pickled, _KNOWN, check_name=names.check_in_metadata, budget=budget)
    storage = metadata.get("storage_data") if isinstance(metadata, Inert) else None
    described = metadata.get("state_dict_metadata") if isinstance(metadata, Inert) else None
    if not isinstance(storage, dict) or not isinstance(described, dict):
        raise CheckpointError("it does not describe a checkpoint")
    budget.spend(Cost.PLACES, len(cast("dict[Any, Any]", storage)))
    sizes: dict[str, int] = {}
    places: dict[tuple[str, tuple[int, ...]], Place] = {}
    for index, info in cast("dict[Any, Any]", storage).items():
        name, key = info.get("relative_path"), index.get("fqn")
        (begin, length), offsets = numbers_of([info.get("offset"), info.get("length")]), index.get("offset", None)
        # The message does not quote these values: to print nested tuples, for example, can take very long.
        if type(name) is not str or type(key) is not str:
            raise CheckpointError("it has names that are not strings")
        fault = path_fault(name)
        if fault or "/" in name:
            raise CheckpointError(f"it names the file {name!r}, which {fault or 'is in another folder'}")
        if info.get("transform_descriptors", None):
            raise CheckpointError("it names compressed parts, which are not loaded")
        if name not in sizes:
            if not (folder / name).is_file():
                raise CheckpointError(f"it names the file {name}, which is missing")
            with (folder / name).open("rb") as file:
                sizes[name] = file.seek(0, io.SEEK_END)
        if begin + length > sizes[name]:
            raise CheckpointError(f"{name} has {sizes[name]} bytes, and a part of {key} ends at {begin + length}")
        part = key, numbers_of(offsets) if offsets is not None else ()
        if part in places:
            raise CheckpointError(f"it lists one part of {key} twice")
        places[part] = Place(name, begin, length)
    check_apart(places.values())
    _check_parts(cast("dict[str, Any]", described), places, budget)
    for (key, _), (name, begin, length) in places.items():
        if type(cast("dict[str, Any]", described).get(key)).__name__ == "BytesStorageMetadata":
            read_torch_file(folder / name, begin=begin, length=length, check_name=names.check, budget=budget)
    last = max((int(match[1]) for name in sizes if (match := _SHARD.fullmatch(name))), default=0)
    return DcpFolder(last + 1, frozenset(key for key in cast("dict[Any, Any]", described) if isinstance(key, str)))


def _check_parts(described: dict[str, Any], places: Collection[tuple[str, tuple[int, ...]]], budget: Budget) -> None:
    """Check that each part of each tensor has a place, and that the parts make the whole tensor."""
    for key, entry in described.items():
        if type(entry).__name__ != "TensorStorageMetadata":
            if (key, ()) not in places:
                raise CheckpointError(f"it does not say where {key} is")
            continue
        # Counted for each entry, because many entries may share one list.
        budget.spend(Cost.CHUNKS, len(entry.get("chunks")))
        parts = [(numbers_of(one.get("offsets")), numbers_of(one.get("sizes"))) for one in entry.get("chunks")]
        if any((key, offsets) not in places for offsets, _ in parts):
            raise CheckpointError(f"it does not say where a part of {key} is")
        if not make_whole(numbers_of(entry.get("size")), parts):
            raise CheckpointError(f"the parts of {key} do not make the whole tensor")
