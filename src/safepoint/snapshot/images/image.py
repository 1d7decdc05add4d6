"""Images of files: what a file will hold, byte for byte, before the tensors in it have been copied."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from safepoint.snapshot.images.torch_archive import Archive
from safepoint.snapshot.memory.block import Block


class Piece(NamedTuple):
    """Bytes of a tensor's storage and their place in a file.

    Args:
        offset: where the bytes begin in the file.
        num_bytes: how many bytes. The bytes are contiguous in memory.
        address: the address of the first byte, on the device.
        base: the address where the storage begins; tensors that share memory have the same base.
        owner: the storage or tensor that holds the bytes. While the owner is referenced, the address stays valid.
        device: `cpu`, `cuda`, …
    """

    offset: int
    num_bytes: int
    address: int
    base: int
    owner: Any
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The image of one file.

    Args:
        path: the path of the file, relative to the checkpoint, with `/`.
        size_bytes: the size of the finished file.
        literals: (offset, content) of the bytes that are known already.
        fixed: more literals; the same object as in the last image of the file if none of them has changed.
        pieces: the bytes that are still to be copied, in the order of their offsets; the same object as in the last
            image of the file if nothing but the content of the pieces has changed.
        archives: the archives in the file, in their order.
    """

    path: str
    size_bytes: int
    literals: tuple[tuple[int, bytes], ...]
    fixed: tuple[tuple[int, bytes], ...] = ()
    pieces: tuple[Piece, ...] = ()
    archives: tuple[Archive, ...] = ()

    @classmethod
    def of_bytes(cls, path: str, content: bytes) -> "Image":
        """The image of a file whose content is known."""
        return cls(path=path, size_bytes=len(content), literals=((0, content),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An image and the place that its bytes are copied to.

    Args:
        image: the image of one file.
        block: the piece of shared memory that will hold the bytes.
        offset: where the image begins in the block.
    """

    image: Image
    block: Block
    offset: int


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the storage of a tensor holds the values of the elements, and is on a CPU or a CUDA device.

    This is False for quantized tensors, and for tensors that torch conjugates or negates when it reads them.
    """
    return (
        tensor.layout is torch.strided
        and tensor.device.type in {"cpu", "cuda"}
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
