"""Replaces attributes and methods of one object while a `with` block runs."""

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any, cast


@contextlib.contextmanager
def temporarily(target: Any, **values: Any) -> Generator[None]:
    """Set attributes of `target`, and restore their earlier values when the block ends.

    If `target` had an attribute only from its class, the attribute is deleted when the block ends. Then the attribute
    of the class is used again.

    Args:
        target: an object, a class or a module; no other object is changed.
        values: the name of each attribute → its temporary value.
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
    """Overrides methods until the block ends. A method can be overridden several times."""

    def override(self, target: Any, name: str, replacement: Callable[..., Any]) -> None:
        """From now on, a call of `name` on `target` calls `replacement` instead: with the original, then the
        arguments.

        Args:
            target: the object or module; other objects of its class do not change.
            name: the name of the method or function.
            replacement: called with the original as its first argument: the bound method or function, or an earlier
                override.
        """
        self.enter_context(temporarily(target, **{name: functools.partial(replacement, getattr(target, name))}))
