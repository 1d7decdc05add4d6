"""What a state looks like without its values: by which it is distinguished from the state of another model."""

from collections.abc import Mapping
from typing import Any

Outline = Mapping[str, tuple[int, ...] | None]
"""The shapes of a state's tensors and arrays, by name; None for what has none."""


def outline_of(state: Mapping[str, Any]) -> Outline:
    """The outline of a flat state."""
    shapes = {name: getattr(one, "shape", None) for name, one in state.items()}
    return {name: None if shape is None else tuple(shape) for name, shape in shapes.items()}


def difference_of(then: Outline, now: Outline) -> str:
    """What is in one of the two only, or in another shape; empty when they are alike.

    Args:
        then: of a checkpoint ("there").
        now: of the script ("here").
    """
    for name in sorted(then.keys() | now.keys()):
        if name not in then or name not in now:
            return f"{name} is missing {'there' if name in now else 'here'}"
        before, after = then[name], now[name]
        if before != after:
            before, after = ("no tensor" if shape is None else shape for shape in (before, after))
            return f"{name} is {before} there and {after} here"
    return ""
