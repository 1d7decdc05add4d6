"""The image of a safetensors file.

The format: 8 bytes with the length of a JSON header, the header, the tensors without gaps. As in the library's own
files, tensors are sorted by the size of their elements, largest first, and then by name, and the header is padded to
8 bytes, so that every tensor is aligned.
"""

import itertools
import json
import os
from collections.abc import Mapping

import torch

from holdfast.snapshot.image import Image, Piece, is_plain

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
# The order of the library: by the size of an element, and within one size by its own list of types.
_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
_RANKS = {name: rank for rank, name in enumerate(_ORDER)}


def compose_safetensors(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> Image | None:
    """The image of what `safetensors.torch.save_file(tensors, path, metadata)` writes.

    Args:
        path: see `Image`.
        tensors: by name; none of them is read.
        metadata: text for the header.

    Returns:
        The image, or None where the library itself has to decide: it refuses some tensors, and knows further types.
    """
    if metadata is not None and not all(type(k) is str and type(v) is str for k, v in metadata.items()):
        return None
    areas: list[tuple[int, int]] = []
    rows: list[tuple[int, str, str, torch.Tensor]] = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or name == "__metadata__":  # pyright: ignore[reportUnnecessaryIsInstance]
            return None
        kind = _NAMES.get(str(tensor.dtype).removeprefix("torch."))
        if kind is None or not is_plain(tensor) or not tensor.is_contiguous():
            return None
        if tensor.numel():
            areas.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        rows.append((_RANKS[kind], name, kind, tensor))
    areas.sort()
    if any(end > start for (_, end), (start, _) in itertools.pairwise(areas)):
        return None
    rows.sort(key=lambda row: row[:2])
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    places: list[tuple[int, torch.Tensor]] = []
    end = 0
    for _, name, kind, tensor in rows:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        places.append((begin, tensor))
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return None
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    pieces = tuple(
        Piece(start + begin, tensor.nbytes, tensor.data_ptr(), _base_of(tensor), tensor, tensor.device.type)
        for begin, tensor in places
        if tensor.numel()
    )
    literals = ((0, len(text).to_bytes(8, "little") + text),)
    return Image(path=os.fspath(path), size_bytes=start + end, literals=literals, pieces=pieces)


def _base_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


__all__ = ["compose_safetensors"]
