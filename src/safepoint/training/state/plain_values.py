"""Files of plain values: written by `torch.save`, and read without running anything that they contain."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

_PLAIN = (str, int, float, bool, bytes, type(None), torch.Tensor, np.ndarray)
_ALLOWED: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), np._core.multiarray._reconstruct]  # pyright: ignore
"""What the states of numpy's random number generators are made of."""


def load_plain(path: Path, *, is_copied: bool = False) -> dict[str, Any]:
    """Read a file of plain values, tensors and numpy arrays; any other object in it is refused.

    Args:
        path: of the file.
        is_copied: whether the caller copies the tensors and releases them. They then stay in the file, and only the
            pages that are being copied take memory.

    Raises:
        pickle.UnpicklingError: the file contains another kind of object.
    """
    with torch.serialization.safe_globals(_ALLOWED):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_copied)


def is_plain(value: Any) -> bool:
    """Whether `load_plain` can read `value` back."""
    if isinstance(value, dict):
        mapping = cast("dict[Any, Any]", value)
        return all(type(key) in {str, int} for key in mapping) and all(map(is_plain, mapping.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, cast("list[Any]", value)))
    return type(value) in _PLAIN
