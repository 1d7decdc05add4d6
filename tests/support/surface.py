"""What users and their programs rely on, written down: commands, options, variables, exit codes, JSON, Python names.

`make surface` writes it anew into `tests/unit/surface.json`; the diff of that file is what a change does to others.
New commands are found by themselves; to hold one to the keys of its JSON, give it a line in `documents`.
"""

import json
import os
import re
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

from typer.core import TyperArgument, TyperCommand, TyperOption

import holdfast as package
from holdfast.cli.lazy import walk
from holdfast.cli.main import root
from holdfast.doctor import examination
from holdfast.doctor.software import TOO_SLOW
from holdfast.errors import ExitCode
from holdfast.training.settings import RunSettings, variable
from tests.support.checkpoints import commit, prepared
from tests.support.commands import holdfast

SNAPSHOT = Path(__file__).parents[1] / "unit" / "surface.json"
_SOURCES = Path(package.__file__).parent
_VARIABLE = re.compile(r"\b(?:HOLDFAST|PET|AWS)_[A-Z0-9_]*[A-Z0-9]\b")
_BETWEEN_PROCESSES = {"record_folder", "launcher_pid", "keeper", "has_begun"}
"""Settings that the launcher makes for its ranks; nobody else sets them."""
_OPEN = {"libraries", "metrics", "base", "local", "pvc"}
"""Objects whose keys are data."""


def surface() -> dict[str, Any]:
    """All of it, in an order of its own."""
    return {
        "commands": {" ".join(path): _parameters(command) for path, command in walk(root())},
        "variables": sorted(_variables()),
        "exit_codes": {code.name: int(code) for code in ExitCode},
        "python": sorted(package.__all__),
        "json": {name: _shape(document) for name, document in sorted(_documents().items())},
    }


def _parameters(command: TyperCommand) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for param in command.params:
        if isinstance(param, TyperArgument):
            found[param.metavar or param.name] = {"argument": "required" if param.required else "optional"}
        elif isinstance(param, TyperOption):
            facts = {
                "also": [*param.opts[1:], *param.secondary_opts],
                "takes": None if param.is_flag or param.count else param.metavar or "text",
                "repeated": bool(param.multiple or param.count),
                "required": param.required,
                "default": param.default if isinstance(param.default, bool | int | float | str) else None,
                "variables": [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or []),
            }
            found[param.opts[0]] = {
                name: value
                for name, value in facts.items()
                if value is not None and value is not False and value != []
            }
    return found


def _variables() -> set[str]:
    found = {variable(item.name) for item in fields(RunSettings) if item.name not in _BETWEEN_PROCESSES}
    for path in _SOURCES.rglob("*.py"):
        found.update(_VARIABLE.findall(path.read_text()))
    return found - {variable(name) for name in _BETWEEN_PROCESSES}


def _documents() -> dict[str, Any]:
    """What every command prints with `--json`, made in a folder of its own."""
    with tempfile.TemporaryDirectory() as text, mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(("HOLDFAST_", "PET_", "AWS_"))]:
            del os.environ[name]
        os.environ["XDG_CONFIG_HOME"] = text
        here = os.getcwd()
        os.chdir(text)
        try:
            return _asked(Path(text))
        finally:
            os.chdir(here)


def _asked(folder: Path) -> dict[str, Any]:
    output = prepared(folder / "out")
    for step in (10, 20, 30):
        commit(output, step)
    (output.root / "checkpoint-20" / "model.safetensors").unlink()
    (folder / "holdfast.toml").write_text("[run]\ngrace = 40\n")
    documents: dict[str, tuple[str, ...]] = {
        "checkpoints list": ("out",),
        "checkpoints show": ("out",),
        "checkpoints verify": ("out",),
        "checkpoints prune": ("out", "--keep", "newest=1", "--dry-run"),
        "checkpoints copy": ("out/checkpoint-10", "copy"),
        "checkpoints export": ("out", "model"),
        "checkpoints diff": ("out/checkpoint-10", "out/checkpoint-30"),
        "checkpoints repair": ("out", "--dry-run"),
        "config show": ("--all",),
        "doctor": ("--output-dir", "out"),
    }
    found: dict[str, Any] = {}
    with mock.patch.object(examination, "look_at_torch", return_value=TOO_SLOW):
        for name, arguments in documents.items():
            found[name] = holdfast(*name.split(), *arguments, "--json").document
    found["every failure, on stderr"] = holdfast("checkpoints", "list", "nowhere", "--json").exit_error
    return found


def _shape(*documents: Any) -> Any:
    """Keys and types: those of everything that stands in one place, together."""
    objects = [document for document in documents if isinstance(document, dict)]
    lists = [document for document in documents if isinstance(document, list)]
    kinds = {_kind(document) for document in documents if not isinstance(document, dict | list)}
    if objects:
        keys = dict.fromkeys(key for document in objects for key in document)
        shape: Any = {
            key: "object" if key in _OPEN else _shape(*(one[key] for one in objects if key in one)) for key in keys
        }
    elif lists:
        items = [item for document in lists for item in document]
        shape = [_shape(*items)] if items else []
    else:
        return "|".join(sorted(kinds))
    return [*sorted(kinds), shape] if kinds else shape


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return "text" if isinstance(value, str) else "number"


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(surface(), indent=1, ensure_ascii=False) + "\n")
    sys.stdout.write(f"{SNAPSHOT} is written\n")
