"""Reads a pickle without importing or calling anything that it names.

Containers, numbers and texts come as they are. Every object of a class becomes an `Inert`, which remembers what it
was made of and does nothing.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

from safepoint.errors import CheckpointError


class Inert:
    """An object of a class that is not loaded.

    Its attributes are those of the pickled state; `args` is what it was made from.
    """

    module = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any, **_: Any) -> "Inert":
        """Whatever it is made from."""
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:  # items of a dictionary's subclass
        pass

    def append(self, value: Any) -> None:
        """Items of a list's subclass are forgotten."""

    def extend(self, values: Any) -> None:
        """Likewise."""

    def get(self, name: str, *default: Any) -> Any:
        """An attribute of the pickled state.

        Args:
            name: of it.
            default: what it is where it is missing.

        Raises:
            CheckpointError: it is missing.
        """
        state: Any = self.state
        if isinstance(state, dict) and name in state:
            return cast("dict[str, Any]", state)[name]
        if not default:
            raise CheckpointError(f"{type(self).__name__} has no {name}")
        return default[0]


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, known: Mapping[tuple[str, str], Any], storage: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known
        self._storage = storage
        self._classes: dict[tuple[str, str], type[Inert]] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        key = module_name, global_name
        if key in self._known:
            return self._known[key]
        if key == ("collections", "OrderedDict"):
            return OrderedDict
        if key not in self._classes:
            self._classes[key] = type(global_name.rpartition(".")[2], (Inert,), {"module": module_name})
        return self._classes[key]

    def persistent_load(self, pid: Any) -> Any:
        return self._storage(pid)


def read_inert(
    data: bytes, known: Mapping[tuple[str, str], Any] | None = None, storage: Callable[[Any], Any] = Inert
) -> Any:
    """What a pickle holds.

    Args:
        data: the pickle.
        known: (module, name) → what stands for it; called where the pickle calls it.
        storage: makes something of a persistent id.

    Raises:
        CheckpointError: it is no pickle, or a damaged one.
    """
    try:
        return _Unpickler(data, known or {}, storage).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever hostile content makes of it
        raise CheckpointError(f"it cannot be read: {type(error).__name__}: {error}") from error
