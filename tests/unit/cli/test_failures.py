"""How commands end that fail: what a person reads, what a program reads, and the exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from safepoint.cli import main as cli
from safepoint.errors import AccessDeniedError
from safepoint.foundation.events import console
from tests.support.checkpoints import commit, prepared
from tests.support.commands import safepoint
from tests.support.stores import flip


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = prepared(tmp_path / "out")
    for step in (10, 20):
        commit(folder, step)
    return folder.root


def run(*arguments: str, prelude: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    child = f"{prelude}\nfrom safepoint.cli.main import main\nmain()"
    command = [sys.executable, "-c", child, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["nope", "--json"], 2, "No such command 'nope'"),
        (["--json"], 2, "No such option: --json"),
        (["checkpoints", "--json"], 2, "No such option: --json"),
        (["checkpoints", "lst", "--json"], 2, "No such command 'lst'"),
        (["checkpoints", "list", "--json"], 2, "Missing argument"),
        (["checkpoints", "list", "x", "--json", "--nope"], 2, "No such option: --nope"),
        (["checkpoints", "repair", "x", "--json", "--idle", "soon"], 2, "--idle"),
        (["checkpoints", "list", "ftp://host/x", "--json"], 2, "ftp"),
        (["checkpoints", "list", "nowhere", "--json"], 10, "no folder"),
        (["checkpoints", "show", "nowhere/checkpoint-3", "--json"], 10, "no folder"),
        (["run", "--json", "train.py"], 2, "there is no script"),
        (["config", "show", "--json", "too", "much"], 2, "unexpected extra"),
        (["doctor", "--grace", "-1", "--json"], 2, "--grace -1"),
    ],
)
def test_the_last_line_is_for_the_program(arguments: list[str], code: int, word: str) -> None:
    """For every command and every failure, usage errors included."""
    outcome = safepoint(*arguments)
    assert outcome.code == code
    assert outcome.exit_error.keys() == {"type", "code", "message", "hint"}
    assert (outcome.exit_error["type"], outcome.exit_error["code"]) == ("exit_error", code)
    assert word in outcome.exit_error["message"]
    assert outcome.stdout == ""


def test_without_json_it_is_for_a_person(output: Path) -> None:
    """A usage error comes with the usage, another one is one line with what to do."""
    assert safepoint("checkpoints", "list").stderr.startswith("Usage: safepoint checkpoints list")
    line = safepoint("checkpoints", "show", str(output / "checkpoint-9")).stderr
    hint = "`safepoint checkpoints list` lists the checkpoints"
    assert line == f"safepoint: error: there is no checkpoint-9 in {output} — {hint}\n"


def test_what_the_script_is_told_is_not_told_to_us(project: Path) -> None:
    """`--json` behind SCRIPT belongs to the script."""
    line = safepoint("run", "missing.py", "--json").stderr
    assert line.startswith("safepoint: error: there is no script missing.py")


def test_an_answer_and_a_failure_go_to_two_places(output: Path) -> None:
    """The document is whole on stdout, and stderr says that it is bad news."""
    flip(output / "checkpoint-20" / "model.safetensors")
    outcome = safepoint("checkpoints", "verify", output, "--deep", "--json")
    assert [entry["valid"] for entry in outcome.document] == [False, True]
    assert outcome.exit_error["code"] == outcome.code == 14
    assert "1 of 2 checkpoints" in outcome.exit_error["message"]
    outcome = safepoint("checkpoints", "repair", output, "--deep", "--json")
    assert outcome.document["damaged"]
    assert "--drop-damaged" in outcome.exit_error["hint"]


def test_partly_done_is_neither_done_nor_failed(output: Path, tmp_path: Path) -> None:
    """3 where some checkpoints were copied, 14 where none was."""
    flip(output / "checkpoint-20" / "model.safetensors")
    outcome = safepoint("checkpoints", "copy", output, tmp_path / "copy", "--json")
    assert outcome.exit_error["code"] == outcome.code == 3
    assert sorted(entry["copied"] for entry in outcome.document) == [False, True]
    assert safepoint("checkpoints", "copy", output / "checkpoint-20", tmp_path / "other").code == 14


def test_refused_keys_have_a_code_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 for a command, while a training says 13 as for anything about the store."""

    def refuse(text: str) -> None:
        raise AccessDeniedError("the key is wrong", hint="check it")

    monkeypatch.setattr("safepoint.cli.location_argument.open_inventory", refuse)
    outcome = safepoint("checkpoints", "list", "s3://bucket", "--json")
    assert outcome.code == 12
    assert outcome.exit_error == {"type": "exit_error", "code": 12, "message": "the key is wrong", "hint": "check it"}
    assert AccessDeniedError("").exit_code == 13


def test_a_fault_of_ours_has_its_traceback_and_the_line(output: Path) -> None:
    """The traceback helps us, the last line the program that called."""
    prelude = (
        "import safepoint.cli.commands.checkpoints as c\n"
        "def fail(text): raise ZeroDivisionError('by zero')\nc.open_place = fail"
    )
    done = run("checkpoints", "list", str(output), "--json", prelude=prelude)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    said = json.loads(done.stderr.splitlines()[-1])
    assert (said["code"], said["message"]) == (1, "ZeroDivisionError: by zero")
    assert "report it" in said["hint"]
    plain = run("checkpoints", "list", str(output), prelude=prelude)
    assert plain.returncode == 1
    assert plain.stderr.splitlines()[-1] == "ZeroDivisionError: by zero"


def test_an_interrupt_ends_with_130(output: Path) -> None:
    prelude = (
        "import safepoint.cli.commands.checkpoints as c\ndef fail(text): raise KeyboardInterrupt\nc.open_place = fail"
    )
    done = run("checkpoints", "list", str(output), "--json", prelude=prelude)
    assert done.returncode == 130
    assert json.loads(done.stderr.splitlines()[-1])["code"] == 130


@pytest.mark.parametrize("arguments", [["--help"], ["checkpoints", "show", "OUT"], ["checkpoints", "show", "--help"]])
@pytest.mark.parametrize("what", ["stdout", "both"])
def test_a_reader_that_leaves_ends_it_quietly(arguments: list[str], what: str, output: Path) -> None:
    """As `safepoint … | head -0` does: no traceback, no complaint of the interpreter."""
    reader, writer = os.pipe()
    os.close(reader)
    child = "from safepoint.cli.main import main\nmain()"
    command = [sys.executable, "-c", child, *(str(output) if word == "OUT" else word for word in arguments)]
    process = subprocess.Popen(
        command, stdout=writer, stderr=writer if what == "both" else subprocess.PIPE, text=True
    )
    os.close(writer)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 141
    assert not said


@pytest.mark.parametrize("arguments", [["--help"], ["checkpoints", "show", "OUT"], ["list"]])
@pytest.mark.parametrize(("stdout", "words"), [("/dev/full", "No space left on device"), ("&-", "stdout is closed")])
def test_an_answer_that_cannot_be_written(
    arguments: list[str], stdout: str, words: str, output: Path, tmp_path: Path
) -> None:
    """It is said in one line, and the code is no success."""
    arguments = [str(output) if word == "OUT" else word for word in arguments]
    shell = f'"$0" -c "from safepoint.cli.main import main; main()" "$@" >{stdout}'
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr


def test_a_closed_stderr_hides_no_code(tmp_path: Path) -> None:
    """The error cannot be printed, and the command does not hang or claim success."""
    reader, writer = os.pipe()
    os.close(reader)
    child = "from safepoint.cli.main import main\nmain()"
    command = [sys.executable, "-c", child, "checkpoints", "list", str(tmp_path / "nowhere")]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, timeout=60, check=False)
    os.close(writer)
    assert process.returncode != 0


@pytest.mark.parametrize(("name", "is_plain"), [("NO_COLOR", True), ("CI", True), ("OTHER", False)])
def test_colours_are_for_people(name: str, is_plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR and CI reach Typer's own lines too."""
    for variable in ("NO_COLOR", "CI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "1")
    seen: list[object] = []
    monkeypatch.setattr(type(cli.root()), "invoke", lambda self, context: seen.append(context.color))
    safepoint("config", "show")
    assert seen == [False if is_plain else None]
    assert console.is_interactive() is False
