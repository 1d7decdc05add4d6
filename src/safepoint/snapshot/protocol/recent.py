"""A dictionary of what happened lately."""

from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_MOST = 256


class Recent(dict[_Key, _Value]):
    """Forgets what was set longest ago when it holds more than a few hundred: a training has millions of steps."""

    def __setitem__(self, key: _Key, value: _Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > _MOST:
            del self[next(iter(self))]
