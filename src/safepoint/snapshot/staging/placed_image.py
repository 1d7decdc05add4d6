"""Where in memory an image goes."""

from dataclasses import dataclass

from safepoint.snapshot.images.image import Image
from safepoint.snapshot.memory.block import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An image and the place that its bytes are copied to.

    Args:
        image: of one file.
        block: the memory.
        offset: of the image's first byte in the block.
    """

    image: Image
    block: Block
    offset: int
