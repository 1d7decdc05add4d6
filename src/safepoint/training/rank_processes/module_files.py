"""The files of the loaded modules: whether they are installed, and whether they have changed on disk."""

import os
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

from safepoint.training.rank_processes.preload_list import installed_folders, is_below, standard_folders

_State = tuple[int, int, int]


class ModuleFiles:
    """The files from which the modules of this process were loaded, as they were on disk at that time."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, _State | None]] = {}

    def remember(self) -> None:
        """Read the state of the files of modules that were loaded since the last call."""
        for name, module in list(sys.modules.items()):
            path = _file_of(module)
            if path is not None and path not in self._known:
                self._known[path] = (name, _state_of(path))

    def changed(self) -> str | None:
        """The name of a module whose file was replaced, changed or deleted after the load; None if no file was."""
        for path, (name, state) in self._known.items():
            if _state_of(path) != state:
                return name
        return None


def module_of_project(besides: Collection[str]) -> str | None:
    """The name of a loaded module of the project; None if there is no such module.

    Modules of Python, of installed packages and of Safepoint are not modules of the project.

    Args:
        besides: modules to leave out, because every rank loads them before the program begins.
    """
    own = os.path.realpath(Path(__file__).parents[2])  # the package of Safepoint
    folders = (*installed_folders(), *standard_folders(), own)
    for name, module in list(sys.modules.items()):
        path = _file_of(module)
        if path is not None and name not in besides and not is_below(path, folders):
            return name
    return None


def _file_of(module: ModuleType | None) -> str | None:
    path = getattr(module, "__dict__", {}).get("__file__")
    return path if isinstance(path, str) and os.path.isabs(path) else None


def _state_of(path: str) -> _State | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
