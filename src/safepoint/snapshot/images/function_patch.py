"""Replaces functions of libraries for a while, under every name by which a module has imported them."""

import contextlib
import os
import sys
from collections.abc import Callable, Generator, Mapping
from typing import Any

Function = Callable[..., Any]


class FunctionPatch:
    """Remembers under which names modules have imported the functions to replace, because a search takes longer than
    a save."""

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, Any], str, Function]] = []
        self._seen: dict[int, int] = {}
        """The modules that were searched, by `id`, with the number of names that each had."""
        self._searched: tuple[int, str] | None = None
        """The number of modules after the last search, and the newest module; None if a module was left out."""

    def look_again(self) -> None:
        """Let the next search include modules that have got names since the last search."""
        self._searched = None
        for module in list(sys.modules.values()):
            if isinstance(module, type(os)) and self._seen.get(id(module)) != len(vars(module)):
                self._seen.pop(id(module), None)

    def find(self, originals: list[Function]) -> None:
        """Search the modules that were imported since the last call, and whose import has ended."""
        modules = list(sys.modules.values())
        newest = (len(modules), next(reversed(sys.modules)))
        if newest == self._searched:
            return
        wanted, is_complete = {id(function): function for function in originals}, True
        for module in modules:
            if id(module) in self._seen or not isinstance(module, type(os)):
                continue
            if _is_being_imported(module):
                is_complete = False
            else:
                self._seen[id(module)] = len(vars(module))
                self._places += [
                    (vars(module), name, wanted[id(value)])
                    for name, value in list(vars(module).items())
                    if id(value) in wanted
                ]
        self._searched = newest if is_complete else None

    @contextlib.contextmanager
    def exchanged(self, replacements: Mapping[Function, Function]) -> Generator[None]:
        """Replace each key of `replacements` by its value, while the `with` block runs."""
        self.find(list(replacements))
        replaced: list[tuple[dict[str, Any], str, Function]] = []
        for namespace, name, function in self._places:
            if function in replacements and namespace.get(name) is function:  # the name still refers to the original
                namespace[name] = replacements[function]
                replaced.append((namespace, name, function))
        try:
            yield
        finally:
            for namespace, name, function in replaced:
                namespace[name] = function


def _is_being_imported(module: Any) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
