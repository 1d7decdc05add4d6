"""Checks which parts of tensors the metadata of a DCP checkpoint list. An attacker may have written the metadata.

While DCP loads a tensor, it reads each listed part from its place in a file, even if the part is listed a million
times, or if a thousand parts are at one place. If elements are in no part, DCP leaves them as they are in memory. If
parts overlap, the part that is read last counts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint import metadata

from safepoint.checkpoint.weights.dcp_weights import Place, check_apart
from safepoint.checkpoint.weights.parts import make_whole
from safepoint.checkpoint.weights.torch_file import numbers_of
from safepoint.errors import CheckpointError

_MOST_PARTS = 1 << 21
"""All tensors together may have this many parts, or as many as the metadata list places in files if that is more. In
a pickle, many tensors can refer to one list of parts, so a small file can list many parts. Each place takes bytes."""


def check_parts(found: Any) -> None:
    """Check that the listed parts of each tensor make the whole tensor, and that no two places in files overlap.

    Each element of a tensor must be in exactly one part, and no part may be outside of the tensor; see `make_whole`.

    Args:
        found: the metadata; anything else is ignored, because DCP refuses it.

    Raises:
        CheckpointError: the parts do not make a tensor, or overlap in a file.
        Exception: a value is of another kind than in metadata that torch writes.
    """
    if type(found) is not metadata.Metadata:
        return
    stored = cast("Mapping[Any, Any]", found.storage_data or {})
    check_apart(Place(one.relative_path, *numbers_of([one.offset, one.length])) for one in stored.values())
    num_parts, most_parts = 0, max(_MOST_PARTS, len(stored))
    for name, entry in cast("Mapping[Any, Any]", found.state_dict_metadata).items():
        if type(entry) is not metadata.TensorStorageMetadata:
            continue
        num_parts += len(entry.chunks)
        if num_parts > most_parts:
            raise CheckpointError(f"it lists more than {most_parts} parts of tensors")
        parts = ((numbers_of(one.offsets), numbers_of(one.sizes)) for one in entry.chunks)
        if not make_whole(numbers_of(entry.size), parts):
            raise CheckpointError(f"the parts of {name!r:.200} that it lists do not make the whole tensor")


def check_places(found: Any, folder: Path) -> None:
    """Check that each part of a tensor and each other value has a place, and that each place is inside of its file.

    Args:
        found: the metadata, after `check_parts`; anything else is refused, because DCP refuses it.
        folder: the folder that contains the metadata.

    Raises:
        CheckpointError: a place is missing, or outside of its file.
        Exception: a value is of another kind than in metadata that torch writes.
    """
    if type(found) is not metadata.Metadata:
        raise CheckpointError("it does not describe a checkpoint")
    stored = cast("Mapping[Any, Any]", found.storage_data or {})
    sizes: dict[str, int] = {}
    for one in stored.values():
        name = one.relative_path
        if name not in sizes:
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"it names the file {name!r:.200}, which is missing")
            sizes[name] = path.stat().st_size
        if one.offset + one.length > sizes[name]:
            raise CheckpointError(f"it names bytes of {name!r:.200} that are after the end of this file")
    for key, entry in cast("Mapping[Any, Any]", found.state_dict_metadata).items():
        is_tensor = type(entry) is metadata.TensorStorageMetadata
        offsets = [one.offsets for one in entry.chunks] if is_tensor else [None]
        if any(metadata.MetadataIndex(key, offset) not in stored for offset in offsets):
            raise CheckpointError(f"it does not say where {key!r:.200} is")
