"""Replaces methods of one object for the time of a call, and puts everything back."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, cast


class Takeover:
    """Methods replaced on one object, not on its class: other trainers in the script are not touched.

    Args:
        target: the object.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._before: dict[str, Any] = {}
        self._added: set[str] = set()

    def replace(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let `make(original)` answer to `name`; `original` is bound and includes every subclass's version."""
        own = cast("dict[str, Any]", self._target.__dict__)
        if name in self._before or name in self._added:
            pass  # replaced before: what stood there first is what comes back
        elif name in own:
            self._before[name] = own[name]
        else:
            self._added.add(name)
        setattr(self._target, name, make(getattr(self._target, name)))

    def __enter__(self) -> "Takeover":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name in self._added:
            delattr(self._target, name)
        for name, value in self._before.items():
            setattr(self._target, name, value)
