"""Copies of files end, even if the owner of a file lets it grow while it is copied.

`opening.copy_at_most` copies a file up to its stated size. This test finds other ways to copy a file in the source.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import safepoint

_SOURCE = Path(safepoint.__file__).parent
_WITHOUT_LIMIT = {"copyfileobj", "copyfile", "copy2", "copytree", "move"}
_READS = {"read", "read1", "pread", "preadv", "readinto", "sendfile"}
_ALLOWED = {
    "jobs/local/attempt/logs.py": "follows the output of a job, as it grows; nothing is copied",
    "jobs/local/images/output_copy.py": "copies the output of a job to the terminal, as it grows",
    "jobs/cluster/suspension/websocket.py": "reads from a connection",
    "snapshot/keeper/__main__.py": "waits for the end of a pipe",
    "training/rendezvous/store_protocol.py": "reads from a connection",
    "training/rendezvous/store_server.py": "reads from a connection",
    "training/integrations/transformers/own_save.py": "renames files that the script has just written",
    "transparent/pages/forked.py": "reads a pipe to a process that this process has started",
    "transparent/pages/writer.py": "reads files without a name, which only this process has open",
}
"""Loops that read to the end of something else than a file of another owner, by module."""


def _is_limited(call: ast.Call) -> bool:
    """Whether the number of bytes is computed from what is left, as in `file.read(min(_BLOCK_BYTES, left))`."""
    within = [part for number in call.args for part in ast.walk(number)]
    is_minimum = any(isinstance(one, ast.Call) and getattr(one.func, "id", "") == "min" for one in within)
    return is_minimum or any(isinstance(one, ast.BinOp) and isinstance(one.op, ast.Sub) for one in within)


def _reads(node: ast.AST) -> Iterator[ast.Call]:
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in _READS:
            yield one


def _unlimited(tree: ast.AST) -> Iterator[int]:
    """The lines of copies without a limit: functions of shutil, `while ... read()`, `iter(lambda: read(), b"")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "shutil":
            if node.attr in {"copy", *_WITHOUT_LIMIT}:
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "shutil":
            yield from (node.lineno for name in node.names if name.name in {"copy", *_WITHOUT_LIMIT})
        elif isinstance(node, ast.While):
            yield from (call.lineno for call in _reads(node.test) if not _is_limited(call))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "iter" and len(node.args) == 2:
            yield from (call.lineno for call in _reads(node.args[0]) if not _is_limited(call))


def test_no_copy_reads_a_file_without_a_limit() -> None:
    """Use `copy_at_most`. `_ALLOWED` states the reason of each other loop."""
    found = {
        path.relative_to(_SOURCE).as_posix(): lines
        for path in sorted(_SOURCE.rglob("*.py"))
        if (lines := sorted(set(_unlimited(ast.parse(path.read_bytes())))))
    }
    assert {name: lines for name, lines in found.items() if name not in _ALLOWED} == {}
    assert found.keys() == _ALLOWED.keys(), "an exception that is not needed"


def test_what_it_finds() -> None:
    """And what it accepts."""
    for text in (
        "shutil.copyfileobj(a, b)",
        "from shutil import copyfile",
        "while piece := file.read(_BLOCK): pass",
        "while True and (count := os.sendfile(a, b, 0, 5)): pass",
        "for piece in iter(lambda: file.read(5), b''): pass",
    ):
        assert list(_unlimited(ast.parse(text))) == [1]
    for text in ("while piece := file.read(min(5, left)): pass", "shutil.which('x')", "while file.read: pass"):
        assert list(_unlimited(ast.parse(text))) == []
