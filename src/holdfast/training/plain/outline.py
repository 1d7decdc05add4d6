"""What a state looks like without its values: by that it is told from the state of another model."""

from collections.abc import Mapping
from typing import Any

import torch

Outline = Mapping[str, tuple[int, ...] | None]
"""The shapes of a state's tensors, by name; None for what is no tensor."""


def outline_of(state: Mapping[str, Any]) -> Outline:
    """The outline of a flat state."""
    return {name: tuple(one.shape) if isinstance(one, torch.Tensor) else None for name, one in state.items()}


def difference_of(then: Outline, now: Outline) -> str:
    """What is in one of the two only, or in another shape; empty when they are alike.

    Args:
        then: of a checkpoint ("there").
        now: of the script ("here").
    """
    for name in dict.fromkeys([*then, *now]):
        if name not in then or name not in now:
            return f"{name} is missing {'there' if name in now else 'here'}"
        before, after = then[name], now[name]
        if before != after:
            return f"{name} is {before or ()} there and {after or ()} here"
    return ""


__all__ = ["Outline", "difference_of", "outline_of"]
