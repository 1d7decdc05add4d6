"""The shape of the source tree: rooms that a newcomer can take in, and imports without cycles."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

import safepoint

_SOURCE = Path(safepoint.__file__).parent
_MOST_MODULES = 12
_MOST_LINES = 500
_ROW = re.compile(r"(?:- `(\w+)`: |(\w+(?:\.py)?(?:, \w+(?:\.py)?)*)  +)\S")


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("safepoint", cache_dir=None)


def _cycle(nodes: Iterable[str], imported: Callable[[str], Iterable[str]]) -> list[str]:
    try:
        TopologicalSorter({node: set(imported(node)) for node in nodes}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_through_others(graph: grimp.ImportGraph) -> None:
    """Imports inside functions and those for types count too."""
    assert not _cycle(graph.modules, graph.find_modules_directly_imported_by)


def test_no_package_imports_itself_through_its_siblings(graph: grimp.ImportGraph) -> None:
    """Within each package, its modules and sub-packages import each other in one direction only."""
    cycles: dict[str, list[str]] = {}
    for package in graph.modules:
        children = graph.find_children(package)
        child_of = {module: child for child in children for module in graph.find_descendants(child) | {child}}
        imported: dict[str, set[str]] = defaultdict(set)
        for module, child in child_of.items():
            targets = {child_of.get(target, child) for target in graph.find_modules_directly_imported_by(module)}
            imported[child] |= targets - {child}
        if cycle := _cycle(children, imported.__getitem__):
            cycles[package] = cycle
    assert not cycles


def _folders() -> Iterator[Path]:
    return (path.parent for path in sorted(_SOURCE.rglob("__init__.py")))


def test_a_room_has_a_dozen_modules() -> None:
    """`__init__.py` does not count, sub-packages have their own dozen."""
    modules = {folder: [path for path in folder.glob("*.py") if path.stem != "__init__"] for folder in _folders()}
    assert {str(folder): len(found) for folder, found in modules.items() if len(found) > _MOST_MODULES} == {}


def test_a_module_fits_into_one_sitting() -> None:
    """One idea a module: at most 500 lines."""
    lines = {str(path): len(path.read_text().splitlines()) for path in _SOURCE.rglob("*.py")}
    assert {path: count for path, count in lines.items() if count > _MOST_LINES} == {}


def test_every_folder_is_a_package_with_a_docstring() -> None:
    """A newcomer reads in its first line what a room holds."""
    for folder in {path.parent for path in _SOURCE.rglob("*.py")}:
        assert (folder / "__init__.py").read_text().startswith('"""'), folder


def _listed(docstring: str) -> set[str]:
    """The names in the first column of the list in a docstring; empty if it has no list."""
    rows = [row[1] or row[2] for line in docstring.splitlines() if (row := _ROW.match(line))]
    return (
        {name.strip().removesuffix(".py") for names in rows for name in names.split(",")} if len(rows) > 1 else set()
    )


def test_a_list_of_a_rooms_modules_is_complete() -> None:
    """A newcomer finds each module in the list of its `__init__.py`; `__main__` needs no row."""
    missing: dict[str, set[str]] = {}
    for folder in _folders():
        listed = _listed(ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "")
        present = {path.stem for path in folder.glob("*.py")} | {
            path.parent.name for path in folder.glob("*/__init__.py")
        }
        if listed and (left_out := present - listed - {"__init__", "__main__"}):
            missing[str(folder)] = left_out
    assert missing == {}
