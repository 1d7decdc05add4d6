"""The list of modules that a rank has loaded by its first step. The rank leaves the list for its launcher.

The template then imports these modules too, so that the next start has nothing left to import.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any, cast

from safepoint.foundation.bounded_json import read_object
from safepoint.foundation.files import write_atomic

_NAME = "loaded-modules.json"
_MOST_MODULES = 50_000


def write_loaded_modules(folder: str) -> None:
    """Write the names of all modules that this process has loaded. If the folder has no room, write nothing."""
    names = [name for name in list(sys.modules) if not name.startswith("__")]
    with contextlib.suppress(OSError):
        write_atomic(Path(folder, _NAME), json.dumps({"modules": names}).encode(), durable=False)


def read_loaded_modules(folder: Path) -> tuple[str, ...]:
    """The names that a rank has left in the launcher's folder; empty if there is no valid list."""
    with contextlib.suppress(OSError, ValueError):
        names: Any = read_object(folder / _NAME).get("modules")
        if isinstance(names, list):
            listed = cast("list[Any]", names)
            return tuple(name for name in listed[:_MOST_MODULES] if isinstance(name, str))
    return ()
