"""Replaces attributes and methods of one object while a `with` block runs."""

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any, cast


@contextlib.contextmanager
def temporarily(target: Any, **values: Any) -> Generator[None]:
    """Set attributes of `target`, and restore their earlier values when the block ends.

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

    def override(self, target: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Let a call of `name` on `target` call `replacement`, with the original before the caller's arguments.

        Args:
            target: the object or module; others of its class do not change.
            name: of the method or function.
            replacement: receives the bound method of the object's class, or an earlier override, as first argument.
        """
        self.enter_context(temporarily(target, **{name: functools.partial(replacement, getattr(target, name))}))
