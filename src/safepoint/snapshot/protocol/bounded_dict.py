"""A dictionary that drops its oldest entries."""

from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_MAX_ENTRIES = 256


class BoundedDict(dict[_Key, _Value]):
    """Holds the 256 entries that were set last, so that a dictionary by step does not grow for the whole training."""

    def __setitem__(self, key: _Key, value: _Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > _MAX_ENTRIES:
            del self[next(iter(self))]
