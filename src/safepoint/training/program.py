"""Finds the user's program, and runs it in this process as Python would run it."""

import builtins
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from safepoint.errors import UsageError

_LAUNCHERS = ("torchrun", "deepspeed", "mpirun", "horovodrun", "srun")
"""Programs that start ranks by themselves, in processes that Safepoint does not supervise."""
_OTHER_FILES = {
    ".ipynb": ("a notebook", "export it, and name the exported script: jupyter nbconvert --to script {}"),
    ".sh": ("a shell script", "name the Python script that {} starts"),
}
"""Files that people pass in place of a Python script: what they are, and what to do."""


def find_script(name: str) -> Path:
    """The script that a command line names: a file, or a command of this Python environment.

    Commands such as `accelerate` and `trl` are small Python scripts, which pip has installed beside Python.

    Raises:
        UsageError: there is no such script, the file is not a Python script, or the script starts ranks by itself.
    """
    path = Path(name)
    if path.name in _LAUNCHERS:
        raise UsageError(
            f"{path.name} starts processes that Safepoint does not supervise",
            hint="name the training script: safepoint run --nproc-per-node N SCRIPT [ARGS…]",
        )
    if path.is_file():
        if path.suffix in _OTHER_FILES:
            what, hint = _OTHER_FILES[path.suffix]
            raise UsageError(f"{name} is {what}, not a Python script", hint=hint.format(name))
        return path
    if path.name == name:
        command = Path(sys.executable).parent / name
        if _is_python(command):
            return command
        if name.startswith("python"):
            raise UsageError(f"{name} is not a script", hint=f"leave out {name}: safepoint run SCRIPT [ARGS…]")
    raise UsageError(f"there is no script {name}", hint="check the path; it is relative to the current folder")


def _is_python(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            lines = file.readline(1024), file.readline(1024)
    except OSError:
        return False
    # If the path of Python has a space or is long, pip writes `#!/bin/sh`, and the path is in the second line.
    return lines[0].startswith(b"#!") and any(b"python" in line for line in lines)


def run_program(program: Sequence[str], *, is_module: bool) -> None:
    """Run a script or a module with its arguments as the program of this process.

    Args:
        program: the path of the script, or the name of the module, and the arguments.
        is_module: run it as `python -m` does.
    """
    sys.argv = list(program)
    sys.modules["__mp_main__"] = _ProgramByAnotherName("__mp_main__")
    if is_module:
        _search_first(os.getcwd())  # as `python -m` does
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        _search_first(str(Path(program[0]).resolve().parent))
        _run_file(program[0])


def _run_file(name: str) -> None:
    """Run a file as Python does: `__file__` is its absolute path, and `sys.argv[0]` is the path as it was given.

    So the program finds its file after it has changed the current folder. `runpy.run_path` uses the same path for
    both values.
    """
    path = os.path.abspath(name)
    is_archive = pkgutil.get_importer(path) is not None  # with a `__main__.py`
    if is_archive or path.endswith(".pyc"):
        runpy.run_path(name, run_name="__main__")
        return
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main = ModuleType("__main__")
    names: dict[str, Any] = vars(main)
    names.update(__file__=path, __loader__=SourceFileLoader("__main__", path), __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(code, names)


class _ProgramByAnotherName(ModuleType):
    """The module of the user's program, under the name `__mp_main__`.

    Processes that `multiprocessing` starts import the program under this name, and return objects of its classes
    under this name. When `multiprocessing` is imported, it gives this name to the current module `__main__`. At that
    time, `__main__` is not the user's program yet.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["__main__"], name)


def _search_first(folder: str) -> None:
    """Look for modules in `folder` first, as Python does for a program that it starts itself."""
    if sys.flags.safe_path:  # as in the launcher's ranks: `sys.path` has no entry for the current folder
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder
