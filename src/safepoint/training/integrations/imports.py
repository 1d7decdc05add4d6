"""Runs a function right after the program has imported a module. The module is not imported for this purpose."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Hook = Callable[[ModuleType], None]


class _HookedLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, hooks: dict[str, list[Hook]]) -> None:
        self._loader = loader
        self._hooks = hooks

    def exec_module(self, module: ModuleType) -> None:
        # The module must look as if it were not hooked: pickling and `inspect` use its loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # Remove the hooks only after a successful import. After a call of `find_spec`, or a failed import, the hooks
        # must still run at the next import.
        for hook in self._hooks.pop(module.__name__, []):
            hook(module)


class _HookFinder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.hooks:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _HookedLoader(spec.loader, self.hooks)
                return spec
        return None


_finder = _HookFinder()


def after_import(name: str, hook: Hook) -> None:
    """Call `hook(module)` as soon as the module `name` is imported; at once, if it is imported already."""
    module = sys.modules.get(name)
    if module is not None:
        hook(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.hooks.setdefault(name, []).append(hook)
