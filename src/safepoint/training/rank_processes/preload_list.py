"""Finds the packages that a program will import. The source files of the program are read, but not executed.

The list has only installed packages (in site-packages). These packages change rarely, and each start of ranks checks
whether a file of these packages has changed. Files of the project are searched for further imports, but are never
imported.
"""

import ast
import importlib.machinery
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOST_FILES = 200
"""At most this many files of a project are searched."""
_MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One import statement of a program.

    Args:
        module: the module, with dots.
        names: the attributes that are imported from the module. Empty for `import module` and
            `from module import *`.
    """

    module: str
    names: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """The top-level package."""
        return self.module.partition(".")[0]


def installed_folders() -> tuple[str, ...]:
    """The folders that contain installed packages, as absolute paths in which links are resolved."""
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    if site.ENABLE_USER_SITE:
        folders.add(site.getusersitepackages())
    return tuple(sorted(os.path.realpath(folder) for folder in folders if folder))


def standard_folders() -> tuple[str, ...]:
    """The folders of the standard library. Installed packages may be in folders below them."""
    return tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})


def is_below(path: str, folders: tuple[str, ...]) -> bool:
    """Whether a file is in one of the folders, or in a folder below them."""
    return any(os.path.realpath(path).startswith(folder + os.sep) for folder in folders)


def search_folder(program: tuple[str, ...], *, is_module: bool) -> str:
    """The folder in which the program's own modules are looked for first; see `run_program`."""
    return os.getcwd() if is_module else str(Path(program[0]).resolve().parent)


def wanted_imports(program: tuple[str, ...], *, is_module: bool) -> list[Wanted]:
    """Search the source files of a program and of its project for imports of installed packages.

    Args:
        program: the path of a script or the name of a module, and arguments.
        is_module: whether the program is a module.

    Returns:
        The imports, in the order in which they were found.
    """
    folder = search_folder(program, is_module=is_module)
    first = _source_of_module(program[0], folder) if is_module else Path(program[0])
    found: dict[tuple[str, tuple[str, ...]], Wanted] = {}
    waiting, seen = [first] if first is not None else [], set[Path]()
    while waiting and len(seen) < _MOST_FILES:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        for wanted in _imports_of(path):
            own = _own_source(wanted.module, folder)
            if own is not None:
                waiting.append(own)
                waiting += [
                    source for name in wanted.names if (source := _own_source(f"{wanted.module}.{name}", folder))
                ]
            elif _is_installed(wanted.package):
                found.setdefault((wanted.module, wanted.names), wanted)
    return list(found.values())


def own_names(folder: str) -> set[str]:
    """The names of all modules and packages that may be importable from a folder; empty if it cannot be read."""
    try:
        entries = os.listdir(folder)
    except OSError:
        return set()
    return {entry.partition(".")[0] for entry in entries}


def _imports_of(path: Path) -> Iterator[Wanted]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            return
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # the rank reports the error when it runs the program
    yield from _imports_in(tree.body)


def _imports_in(statements: list[ast.stmt]) -> Iterator[Wanted]:
    """The imports that Python may execute when it loads a module, including those in `if`, `try` and `with`.

    Three kinds of imports are left out: relative imports; imports in an `if TYPE_CHECKING` statement, or in its
    `else`; and imports in all other blocks, such as `except`.
    """
    for statement in statements:
        match statement:
            case ast.Import():
                for alias in statement.names:
                    yield Wanted(module=alias.name)
            case ast.ImportFrom(module=str(module), level=0):
                yield Wanted(module=module, names=tuple(one.name for one in statement.names if one.name != "*"))
            case ast.If() if not _is_for_type_checkers(statement.test):
                yield from _imports_in([*statement.body, *statement.orelse])
            case ast.Try() | ast.TryStar():
                yield from _imports_in([*statement.body, *statement.orelse, *statement.finalbody])
            case ast.With():
                yield from _imports_in(statement.body)
            case _:
                pass


def _is_for_type_checkers(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    return name == "TYPE_CHECKING"


def _own_source(module: str, folder: str) -> Path | None:
    """The source file of a module of the project, or None."""
    base = Path(folder, *module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _source_of_module(name: str, folder: str) -> Path | None:
    own = _own_source(f"{name}.__main__", folder) or _own_source(name, folder)
    if own is not None:
        return own
    for base in installed_folders():
        found = _own_source(f"{name}.__main__", base) or _own_source(name, base)
        if found is not None:
            return found
    return None


def _is_installed(package: str) -> bool:
    if package in sys.builtin_module_names or package in sys.stdlib_module_names:
        return False
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and any(is_below(place, installed_folders()) for place in _places_of(spec))


def _places_of(spec: importlib.machinery.ModuleSpec) -> list[str]:
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return [place for place in places if os.path.isabs(place)]
