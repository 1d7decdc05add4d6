"""Functions are replaced under every name by which a module has imported them, and each module is searched once."""

import sys
from types import ModuleType

import pytest

from safepoint.snapshot.images.function_patch import FunctionPatch


def original() -> str:
    return "original"


def replacement() -> str:
    return "replacement"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that has imported the function under another name."""
    made = ModuleType("module_of_a_test")
    vars(made)["save"] = original
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_a_function_is_replaced_while_the_block_runs(module: ModuleType) -> None:
    """Under all its names, and not where a name has got another value since."""
    patch = FunctionPatch()
    patch.find([original])
    with patch.exchanged({original: replacement}):
        assert vars(module)["save"]() == "replacement"
        assert original() == "replacement"
    assert vars(module)["save"]() == "original"
    vars(module)["save"] = None
    with patch.exchanged({original: replacement}):
        assert vars(module)["save"] is None


def test_a_module_with_new_names_is_searched_again(module: ModuleType) -> None:
    """A search may be made before a copy of the process runs its program, and modules may get names after that."""
    patch = FunctionPatch()
    patch.find([original])
    vars(module)["later"] = original
    with patch.exchanged({original: replacement}):
        assert vars(module)["later"]() == "original", "each module is searched once"
    patch.look_again()
    with patch.exchanged({original: replacement}):
        assert vars(module)["later"]() == "replacement"
        assert vars(module)["save"]() == "replacement"
    assert vars(module)["later"]() == vars(module)["save"]() == "original"
