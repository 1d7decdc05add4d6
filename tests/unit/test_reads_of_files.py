"""Files of an output folder are read within limits.

Another person may have put a pipe there, which hangs a reader, or a sparse file of any size. `opening.read_regular`,
`opening.open_regular` and `verify.read_manifest` refuse both. This test finds other ways to read a file in the
packages that read output folders.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import safepoint

_SOURCE = Path(safepoint.__file__).parent
_PACKAGES = ("checkpoint", "dashboard", "progress", "snapshot", "storage", "training")
_STORED = "reads an object of a `Store`, in which a folder has only regular files, and within limits"
_KERNEL = "reads a file of the kernel"
_OWN = "reads a file of a private folder of this process or its launcher"
_PROGRAM = "reads the script, or a module of Python"
_ALLOWED = {
    "checkpoint/foreign/contents.py": _STORED,
    "checkpoint/pickles/restricted_load.py": "opens the file that the caller of torch.load has named",
    "checkpoint/tools/export.py": _STORED,
    "checkpoint/tools/model_files.py": _STORED,
    "checkpoint/weights/dcp_weights.py": _STORED,
    "checkpoint/weights/torch_file.py": _STORED,
    "checkpoint/weights/zero_weights.py": _STORED,
    "snapshot/images/capture.py": _OWN,
    "snapshot/memory/host_memory.py": _KERNEL,
    "training/context/keeper_connection.py": _KERNEL,
    "training/outcome/launcher_folder.py": _OWN,
    "training/program.py": _PROGRAM,
    "training/rank_processes/birth.py": _KERNEL,
    "training/rank_processes/fitness.py": _KERNEL,
    "training/rank_processes/preload_list.py": _PROGRAM,
}
"""Why a module reads files in another way."""


def _reads(tree: ast.AST) -> Iterator[int]:
    """The lines with `path.read_bytes()`, `path.read_text()`, `path.open("r…")` and `open(…)`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        named = getattr(node.func, "attr", "")
        mode = getattr(node.args[0], "value", "") if node.args else "r"
        is_open = named == "open" and isinstance(mode, str) and mode.startswith("r") and not node.keywords
        if named in {"read_bytes", "read_text"} or is_open or getattr(node.func, "id", "") == "open":
            yield node.lineno


def test_no_file_is_read_without_a_limit() -> None:
    """`_ALLOWED` states the reason of each other read."""
    found = {
        path.relative_to(_SOURCE).as_posix(): lines
        for package in _PACKAGES
        for path in sorted((_SOURCE / package).rglob("*.py"))
        if (lines := sorted(set(_reads(ast.parse(path.read_bytes())))))
    }
    assert {name: lines for name, lines in found.items() if name not in _ALLOWED} == {}
    assert found.keys() == _ALLOWED.keys(), "an exception that is not needed"
