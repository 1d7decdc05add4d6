"""The image of a safetensors file: the bytes that the file will have, in memory."""

import itertools
import os
from collections.abc import Mapping

import torch

from safepoint.checkpoint.format.safetensors_layout import KINDS, Shape, lay_out
from safepoint.snapshot.images.image import Image, Piece, is_plain


def compose_safetensors(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> Image | None:
    """The image of what `safetensors.torch.save_file(tensors, path, metadata)` writes.

    Args:
        path: see `Image`.
        tensors: by name; their content is not read.
        metadata: strings for the header.

    Returns:
        The image. None if the library itself must write the file or raise its error, because this function does not
        support a tensor's type or layout, because tensors share memory, or because a name or the metadata are
        invalid.
    """
    if metadata is not None and not all(type(k) is str and type(v) is str for k, v in metadata.items()):
        return None
    areas: list[tuple[int, int]] = []
    shapes: list[Shape] = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or name == "__metadata__":  # pyright: ignore[reportUnnecessaryIsInstance]
            return None
        kind = KINDS.get(str(tensor.dtype).removeprefix("torch."))
        if kind is None or not is_plain(tensor) or not tensor.is_contiguous():
            return None
        if tensor.numel():
            areas.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        shapes.append(Shape(name, kind, tuple(tensor.shape)))
    areas.sort()
    if any(end > start for (_, end), (start, _) in itertools.pairwise(areas)):
        return None
    try:
        layout = lay_out(shapes, metadata)
    except UnicodeEncodeError:
        return None
    pieces: list[Piece] = []
    for shape, place in layout.places:
        tensor = tensors[shape.name]
        if tensor.numel():
            base = tensor.untyped_storage().data_ptr()
            pieces.append(Piece(place, tensor.nbytes, tensor.data_ptr(), base, tensor, tensor.device.type))
    literals = ((0, layout.header),)
    return Image(path=os.fspath(path), size_bytes=layout.size_bytes, literals=literals, pieces=tuple(pieces))
