"""Reads what `torch.save` has written, and runs nothing of it."""

from pathlib import Path
from typing import Any

import torch


def load_plain(path: Path, *, is_copied: bool = False) -> dict[str, Any]:
    """Read a file of plain values, tensors and numpy's random number states; anything else in it is never run.

    Args:
        path: of the file.
        is_copied: whether the caller copies the tensors and lets go of them: then they are left in the file, and
            nothing but the pages that are being copied takes memory.
    """
    import numpy as np

    allowed: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), np._core.multiarray._reconstruct]  # pyright: ignore
    with torch.serialization.safe_globals(allowed):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_copied)
