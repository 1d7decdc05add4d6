"""Checks which parts of tensors the metadata of a DCP checkpoint list. An attacker may have written the metadata.

While DCP loads a tensor, it reads each listed part from its place in a file, even if the part is listed a million
times, or if a thousand parts are at one place. If elements are in no part, DCP leaves them as they are in memory. If
parts overlap, the part that is read last counts.
"""

from collections.abc import Mapping
from typing import Any, cast

from torch.distributed.checkpoint import metadata

from safepoint.checkpoint.weights.dcp_weights import Place, check_apart
from safepoint.checkpoint.weights.parts import make_whole
from safepoint.checkpoint.weights.torch_file import numbers_of
from safepoint.errors import CheckpointError

_MOST_PARTS = 1 << 21
"""The limit of the number of parts that all tensors have together. In a pickle, many tensors can refer to one list of
parts, so a small file can list many parts."""


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
    num_parts = 0
    for name, entry in cast("Mapping[Any, Any]", found.state_dict_metadata).items():
        if type(entry) is not metadata.TensorStorageMetadata:
            continue
        num_parts += len(entry.chunks)
        if num_parts > _MOST_PARTS:
            raise CheckpointError(f"it lists more than {_MOST_PARTS} parts of tensors")
        parts = ((numbers_of(one.offsets), numbers_of(one.sizes)) for one in entry.chunks)
        if not make_whole(numbers_of(entry.size), parts):
            raise CheckpointError(f"the parts of {name!r:.200} that it lists do not make the whole tensor")
