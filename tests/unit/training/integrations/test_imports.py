"""Hooks that run right after an import."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from safepoint.training.integrations import imports
from safepoint.training.integrations.imports import after_import

NAME = "hooked_by_a_test"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / f"{NAME}.py"
    path.write_text("VALUE = 1\n\n\ndef function():\n    return VALUE\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield path
    sys.modules.pop(NAME, None)
    imports._finder.hooks.pop(NAME, None)
    sys.meta_path[:] = before


def test_a_hook_runs_once_after_the_module_is_whole(module: Path) -> None:
    """It sees everything that the module defines, before the importing module does; asking imports nothing."""
    seen: list[int] = []
    after_import(NAME, lambda module: seen.append(module.VALUE))
    assert NAME not in sys.modules
    imported = importlib.import_module(NAME)
    importlib.import_module(NAME)
    assert seen == [1]
    assert imported.function() == 1


def test_several_hooks_of_one_module(module: Path) -> None:
    """They run in the order in which they were given."""
    seen: list[int] = []
    after_import(NAME, lambda module: seen.append(1))
    after_import(NAME, lambda module: seen.append(2))
    importlib.import_module(NAME)
    assert seen == [1, 2]


def test_a_module_that_is_there_is_hooked_at_once(module: Path) -> None:
    """Late is not never."""
    imported = importlib.import_module(NAME)
    seen: list[ModuleType] = []
    after_import(NAME, seen.append)
    assert seen == [imported]


def test_a_hooked_module_looks_like_any_other(module: Path) -> None:
    """Its loader, spec and source are those of an ordinary import."""
    after_import(NAME, lambda module: None)
    imported = importlib.import_module(NAME)
    assert type(imported.__loader__).__module__ != imports.__name__
    assert imported.__spec__ is not None
    assert imported.__spec__.loader is imported.__loader__
    assert "return VALUE" in inspect.getsource(imported.function)


def test_a_probe_does_not_use_up_the_hook(module: Path) -> None:
    """Libraries ask `find_spec` whether another is installed: the import that follows is still hooked."""
    seen: list[ModuleType] = []
    after_import(NAME, seen.append)
    assert importlib.util.find_spec(NAME) is not None
    assert seen == []
    imported = importlib.import_module(NAME)
    assert seen == [imported]


def test_a_failed_import_does_not_use_up_the_hook(module: Path) -> None:
    """A script that catches the error and imports again gets a hooked module."""
    seen: list[ModuleType] = []
    after_import(NAME, seen.append)
    whole = module.read_text()
    module.write_text("raise RuntimeError('not now')\n")
    with pytest.raises(RuntimeError, match="not now"):
        importlib.import_module(NAME)
    assert seen == []
    module.write_text(whole + "# another size, so that no cached bytecode is taken\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert len(seen) == 1


def test_a_missing_module_is_missing_as_ever() -> None:
    """A hook invents nothing."""
    after_import("no_such_module_anywhere", lambda module: None)
    try:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_such_module_anywhere")
    finally:
        imports._finder.hooks.pop("no_such_module_anywhere", None)
