"""docs/architecture.md names what exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import safepoint

_SOURCE = Path(safepoint.__file__).parent
_PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def _defined(node: ast.AST, prefix: str = "") -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield prefix + child.name
            yield from _defined(child, f"{prefix}{child.name}.")


def test_the_paths_name_modules_and_functions_that_exist() -> None:
    """Each step of a path begins with a module, and with what to look for in it."""
    text = _PAGE.read_text()
    modules = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text)) - {"storage/test_contract.py"}
    missing = {name for name in modules if not (_SOURCE / name).is_file() and not (_PAGE.parents[1] / name).is_file()}
    assert len(modules) > 30
    assert not missing
    for module, names in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)` ((?:`\w+(?:\.\w+)?`(?:, )?)+)", text):
        defined = set(_defined(ast.parse((_SOURCE / module).read_text())))
        assert set(re.findall(r"`([\w.]+)`", names)) <= defined, module


def test_a_path_has_at_most_eight_steps() -> None:
    """A longer one is a second path."""
    assert not re.findall(r"^9\. ", _PAGE.read_text(), re.MULTILINE)
