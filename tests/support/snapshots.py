"""Turns images into the files that they describe, and into memory."""

import ctypes
from pathlib import Path
from typing import Any

import torch

from safepoint.snapshot.images.image import Image, Piece
from safepoint.snapshot.keeper.persist.file_writer import Source, seal_archive
from safepoint.snapshot.memory.block import Block

ENDLESS = 1 << 62
LARGE_STATE_ELEMENTS = 1 << 20
"""Of a model whose 4 MB are copied beside the training, and written as a large file."""


def fill(image: Image, block: Block, offset: int = 0) -> None:
    """Copy the image's literals and pieces to their places, the pieces by their addresses."""
    for place, content in (*image.fixed, *image.literals):
        block.write(offset + place, content)
    for piece in image.pieces:
        ctypes.memmove(block.address + offset + piece.offset, piece.address, piece.num_bytes)


def source_of(image: Image, block: Block, offset: int = 0, **changed: Any) -> Source:
    fields: dict[str, Any] = {
        "path": image.path,
        "block": block,
        "offset": offset,
        "size_bytes": image.size_bytes,
        "archives": image.archives,
        "has_block_alone": True,
        "available": lambda: ENDLESS,
    }
    return Source(**{**fields, **changed})


def render(image: Image) -> bytes:
    """The finished file, with an archive's checksums."""
    block = Block.allocate(1, image.size_bytes)
    fill(image, block)
    seal_archive(source_of(image, block))
    content = bytes(block.view(0, image.size_bytes))
    block.close()
    return content


def same(ours: Any, theirs: Any) -> bool:
    """Whether two states are equal bit for bit, with types, strides and shared storage of tensors."""
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
    if not _same(ours, theirs, tensors):
        return False
    pairs = {(one.untyped_storage().data_ptr(), other.untyped_storage().data_ptr()) for one, other in tensors}
    pairs -= {pair for pair in pairs if not all(pair)}
    return len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs})


def _same(ours: Any, theirs: Any, tensors: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        tensors.append((ours, theirs))
        return _same_tensor(ours, theirs)
    if isinstance(ours, dict):
        attributes = getattr(ours, "__dict__", {}), getattr(theirs, "__dict__", {})
        keys = [_same(one, other, tensors) for one, other in zip(ours, theirs, strict=False)]
        return (
            len(ours) == len(theirs)
            and all(keys)
            and (not any(attributes) or _same(*attributes, tensors))
            and all(_same(one, other, tensors) for one, other in zip(ours.values(), theirs.values(), strict=True))
        )
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(_same(a, b, tensors) for a, b in zip(ours, theirs, strict=True))
    return repr(ours) == repr(theirs)


def _same_tensor(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return (
        (ours.dtype, ours.shape, ours.stride(), ours.requires_grad)
        == (theirs.dtype, theirs.shape, theirs.stride(), theirs.requires_grad)
        and ours.storage_offset() == theirs.storage_offset()
        and bytes_of(ours) == bytes_of(theirs)
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of its storage that the tensor shows."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def saved_and_loaded(state: Any, folder: Path, *, weights_only: bool = True) -> Any:
    """The state after `torch.save` and `torch.load`."""
    torch.save(state, folder / "by_torch.pt")
    return torch.load(folder / "by_torch.pt", weights_only=weights_only)


def piece_of(tensor: torch.Tensor) -> Piece:
    """The whole storage of a tensor as a piece."""
    storage = tensor.untyped_storage()
    return Piece(0, storage.nbytes(), storage.data_ptr(), storage.data_ptr(), storage, "cpu")
