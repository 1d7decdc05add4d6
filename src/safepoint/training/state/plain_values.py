"""Files of plain values: written by `torch.save`, and read without running anything that they contain."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from safepoint.foundation.field_types import Kind
from safepoint.training.state.data_only import load_data

_PLAIN = (str, int, float, bool, bytes, type(None), torch.Tensor, np.ndarray)


def _are_tensors(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, torch.Tensor) for one in cast("list[Any]", value))


TENSORS = Kind(words="a list of tensors", fits=_are_tensors)


def load_plain(path: Path, *, is_copied: bool = False) -> dict[str, Any]:
    """Read a file of plain values, tensors and numpy arrays; any other object in it is refused.

    Args:
        path: the path of the file.
        is_copied: whether the caller copies the tensors and releases them. If so, the tensors are mapped from the
            file, and only the pages that are being copied take memory.

    Raises:
        CheckpointError: the file contains another kind of object.
        OSError: the file cannot be read.
    """
    return load_data(path, mmap=is_copied)


def is_plain(value: Any) -> bool:
    """Whether `load_plain` can read `value` back."""
    if isinstance(value, dict):
        mapping = cast("dict[Any, Any]", value)
        return all(type(key) in {str, int} for key in mapping) and all(map(is_plain, mapping.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, cast("list[Any]", value)))
    return type(value) in _PLAIN
