"""Attributes and methods that are replaced on one object for the time of a `with` block."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, cast


@contextlib.contextmanager
def temporarily(target: Any, **values: Any) -> Generator[None]:
    """Set attributes of `target`, and restore what was there before when the block ends.

    An attribute that `target` had from its class is deleted again, so that the class decides as before.

    Args:
        target: an object, a class or a module; only this one is changed.
        values: by the attribute's name.
    """
    kind = cast("Any", type(target))
    from_class = [
        name for name in values if name not in vars(target) and not hasattr(getattr(kind, name, None), "__set__")
    ]
    before = {name: getattr(target, name) for name in values if name not in from_class}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in from_class:
            delattr(target, name)
        for name, value in before.items():
            setattr(target, name, value)


class Overrides(contextlib.ExitStack):
    """Methods that are overridden until the block ends; overrides of one method nest."""

    def override(self, target: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let `target` call `make(original)` where `name` is called.

        Args:
            target: the object; others of its class are not touched.
            name: of the method.
            make: given the bound original, with every subclass's version, or with an earlier override.
        """
        self.enter_context(temporarily(target, **{name: make(getattr(target, name))}))
