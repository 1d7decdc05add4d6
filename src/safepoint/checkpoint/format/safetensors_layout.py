"""Computes the layout of a safetensors file from the names, types and shapes of its tensors.

The format: 8 bytes with the length of a JSON header, the header, the tensors without gaps. As in the library's own
files, tensors are sorted by type, the types with the largest elements first (see `SIZES`), and then by name. The
header is padded to a multiple of 8 bytes, so that every tensor is aligned.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

KINDS = {
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
"""Torch's name of a type → its name in safetensors."""
# The order of these types is the order of the tensors in a file. The library sorts types by the size of an element,
# and types of equal size by their position in the library's own list.
SIZES = {
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
    **dict.fromkeys(("F32", "U32", "I32"), 4),
    **dict.fromkeys(("BF16", "F16", "U16", "I16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
_ORDER = {kind: number for number, kind in enumerate(SIZES)}
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
LENGTH_BYTES = 8
"""A file begins with the length of its header, in this many bytes, little-endian."""


class Shape(NamedTuple):
    """A tensor of the file.

    Args:
        name: its name in the file.
        kind: the type of its elements, one of the values of KINDS.
        sizes: the sizes of its dimensions.
    """

    name: str
    kind: str
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of its data."""
        return math.prod(self.sizes) * SIZES[self.kind]


class Layout(NamedTuple):
    """The layout of a file.

    Args:
        header: everything before the first tensor.
        places: the tensors in the order of the file, each with the position of its data in the file.
        size_bytes: the size of the file.
    """

    header: bytes
    places: list[tuple[Shape, int]]
    size_bytes: int


def lay_out(shapes: Iterable[Shape], metadata: Mapping[str, str] | None) -> Layout:
    """Compute the header of a file and the positions of its tensors.

    Args:
        shapes: the name, the type and the shape of each tensor.
        metadata: strings for the header's `__metadata__`; None for a header without `__metadata__`.

    Raises:
        ValueError: a name or a metadata string cannot be encoded as UTF-8.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    begins: list[tuple[Shape, int]] = []
    for shape in sorted(shapes, key=lambda shape: (_ORDER[shape.kind], shape.name)):
        begin, end = end, end + shape.num_bytes
        header[shape.name] = {"dtype": shape.kind, "shape": list(shape.sizes), "data_offsets": [begin, end]}
        begins.append((shape, begin))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return Layout(head, [(shape, len(head) + begin) for shape, begin in begins], len(head) + end)
