"""Functions as source: letter by letter, or refused with what to do."""

import functools
import importlib
import linecache
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from safepoint.errors import UsageError
from safepoint.jobs.model.function_source import take_function
from tests.unit.jobs import hostile


def run(tmp_path: Path, script: str, *options: str) -> str:
    file = tmp_path / "shipped.py"
    file.write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-I", *options, str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_letter_arrives(tmp_path: Path) -> None:
    """Quotes, dollars, back-ticks, escapes, other scripts, and the end marks of here documents."""
    quote = 'it\'s "$PATH" `id` \\n \r\n 💾 EOM\n${x}'
    run(tmp_path, take_function(hostile.letters, {"out": str(tmp_path / "shipped"), "quote": quote}).script())
    hostile.letters(tmp_path / "here", quote=quote)
    assert (tmp_path / "shipped").read_bytes() == (tmp_path / "here").read_bytes()


def test_a_nested_function_keeps_its_texts(tmp_path: Path) -> None:
    """Its lines are not moved: what stands in a text of several lines is data."""
    nested = hostile.inner()
    run(tmp_path, take_function(nested, {"out": str(tmp_path / "shipped"), "twice": 3}).script())
    nested(tmp_path / "here", twice=3)
    assert (tmp_path / "shipped").read_bytes() == (tmp_path / "here").read_bytes()


def test_what_it_defines_itself_is_no_matter(tmp_path: Path) -> None:
    """Imports under a name, globals that it sets, functions, classes, comprehensions, annotations of locals."""
    script = take_function(hostile.defines_everything, {"values": [0, 2, 3]}).script()
    script = script.replace("    defines_everything(", "    print(defines_everything(").rstrip() + ")\n"
    assert run(tmp_path, script) == "9\n"
    assert hostile.defines_everything([0, 2, 3]) == 9


def test_annotations_stay_as_the_module_has_them() -> None:
    """Of a module that does not evaluate them, nothing needs to be there for them."""
    assert take_function(hostile.annotated, {"model": 1}).definition.startswith(
        "from __future__ import annotations\n"
    )
    assert "__future__" not in take_function(plain).definition


def plain() -> None:
    """Of a module that evaluates annotations."""


def test_processes_that_import_it_do_not_train(tmp_path: Path) -> None:
    """As those that a rank spawns for its data do, under another name."""
    script = take_function(hostile.letters, {"out": str(tmp_path / "trained")}).script()
    file = tmp_path / "shipped.py"
    file.write_text(script)
    code = f"import runpy; runpy.run_path({str(file)!r}, run_name='__mp_main__')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert not (tmp_path / "trained").exists()


def test_imports_are_found_in_the_working_folder_last(tmp_path: Path) -> None:
    """It shadows nothing."""
    folder = tmp_path / "it's $HOME"
    folder.mkdir()
    (folder / "json.py").write_text("raise SystemExit('shadowed')")
    (folder / "only_there.py").write_text("value = 4")

    def looks() -> None:
        import json

        import only_there  # pyright: ignore[reportMissingImports]

        print(json.dumps(only_there.value))

    assert run(tmp_path, take_function(looks).script(look_in=str(folder))) == "4\n"


CASES: list[tuple[Any, str]] = [
    (hostile.nameless, "a lambda cannot be sent to a job"),
    (hostile.closure(), r"needs uses variables of the enclosing function \(other, secret\)"),
    (hostile.registered, r"registered is decorated with @register"),
    (hostile.wrapping, r"is decorated"),
    (hostile.cached, r"cached is not a function written in Python|is decorated"),
    (functools.partial(hostile.letters, out=1), r"functools.partial cannot be sent to a job.*func_args"),
    (hostile.Owner().method, r"Owner.method is a method"),
    (hostile.Owner.method, r"Owner.method is defined in a class"),
    (hostile.Owner.static, r"Owner.static is defined in a class"),
    (hostile.Owner(), r"Owner is not a function"),
    (hostile.Owner, r"the class Owner is not a function"),
    (print, r"print is not a function written in Python"),
    (hostile.coroutine, r"coroutine is a coroutine or a generator"),
    (hostile.generator, r"generator is a coroutine or a generator"),
    (hostile.made_by_exec["sourceless"], r"the source of sourceless was not found"),
    (
        hostile.uses_globals,
        r"uses_globals uses names that are not defined in the function: LEARNING_RATE, js, letters, os, "
        r"undefined_anywhere; only the function itself is sent to the job — write `import json as js; import os` "
        r"inside the function; import or define LEARNING_RATE, letters, undefined_anywhere inside the function, or "
        r"pass values as func_args",
    ),
    (hostile.uses_in_a_nested_class, r"uses names that are not defined in the function: LEARNING_RATE, Numbers, js;"),
]


@pytest.mark.parametrize(("function", "message"), CASES, ids=[message[:30] for _, message in CASES])
def test_what_cannot_be_shipped_says_why(function: Any, message: str) -> None:
    """And what to do; nothing is left for the training to stumble over."""
    with pytest.raises(UsageError, match=message) as error:
        take_function(function)
    assert error.value.hint


def test_defaults_are_looked_at_too() -> None:
    """They are evaluated where the function is defined."""

    def train(rate: float = hostile.LEARNING_RATE) -> None:
        pass

    with pytest.raises(UsageError, match="train uses names that are not defined in the function: hostile;"):
        take_function(train)


def test_what_a_notebook_adds_to_the_builtins_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """`display` works in a notebook's cell and nowhere else."""
    import builtins

    def display() -> None:
        pass

    display.__module__ = "IPython.core.display_functions"
    monkeypatch.setattr(builtins, "display", display, raising=False)

    def train() -> None:
        display()

    train = _rebuilt(train)
    with pytest.raises(UsageError, match="train uses names that are not defined in the function: display;"):
        take_function(train)


def _rebuilt(function: Any) -> Any:
    """The same source without this test's closure."""
    import inspect
    import textwrap

    source = textwrap.dedent(inspect.getsource(function))
    file = f"cell-{id(function)}"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {}
    exec(compile(source, file, "exec"), names)
    return names[function.__name__]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "missing a required argument: 'out'"),
        ({"out": "x", "rate": 1}, "unexpected keyword argument 'rate'"),
        ({"out": Path("x")}, r"func_args\['out'\] is of type PosixPath"),
    ],
)
def test_arguments_must_fit(arguments: dict[str, Any], message: str) -> None:
    """Before anything is started."""
    with pytest.raises(UsageError, match=message):
        take_function(hostile.letters, arguments)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that is edited after it was loaded."""
    (tmp_path / "edited_later.py").write_text("def first(a):\n    return a\n\n\ndef second(b):\n    return b\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "edited_later", raising=False)
    return importlib.import_module("edited_later")


@pytest.mark.parametrize(
    "edited",
    [
        "import os\n\n\ndef first(a):\n    return a\n\n\ndef second(b):\n    return b\n",
        "def first(a, more):\n    return a\n",
        "    half of a line",
        "def other(a):\n    return a\n",
        "",
    ],
)
def test_a_file_that_was_edited_is_noticed(tmp_path: Path, module: ModuleType, edited: str) -> None:
    """What would be shipped is not what was loaded."""
    (tmp_path / "edited_later.py").write_text(edited)
    linecache.clearcache()
    with pytest.raises(UsageError, match=r"has changed since it was loaded|was not found"):
        take_function(module.first, {"a": 1})
