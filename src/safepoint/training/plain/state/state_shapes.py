"""The shapes of a state's tensors, by which a checkpoint of another model is recognized."""

from collections.abc import Mapping
from typing import Any

Shapes = Mapping[str, tuple[int, ...] | None]
"""The shapes of a state's tensors and arrays, by name; None for a value without a shape."""


def shapes_of(state: Mapping[str, Any]) -> Shapes:
    """The shapes in a flat state."""
    shapes = {name: getattr(one, "shape", None) for name, one in state.items()}
    return {name: None if shape is None else tuple(shape) for name, shape in shapes.items()}


def first_difference(then: Shapes, now: Shapes) -> str:
    """The first name, in alphabetical order, that differs between two states; empty when they agree.

    Args:
        then: of a checkpoint, called "there".
        now: of the script, called "here".
    """
    for name in sorted(then.keys() | now.keys()):
        if name not in then or name not in now:
            return f"{name} is missing {'there' if name in now else 'here'}"
        before, after = then[name], now[name]
        if before != after:
            before, after = ("no tensor" if shape is None else shape for shape in (before, after))
            return f"{name} is {before} there and {after} here"
    return ""
