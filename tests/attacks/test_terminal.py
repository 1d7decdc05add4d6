"""Escape sequences in names that strangers choose: none reaches a terminal or a line of a log as it is."""

import io
import json
import logging
import os
import pty
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.cli.output import print_answer, print_warning, table
from safepoint.errors import CheckpointError, SafepointError, printable_lines
from safepoint.foundation.events import console
from safepoint.foundation.events.run_events import CheckpointRejected, Failed, Interrupted, SaveFailed, StepAbandoned
from safepoint.foundation.events.stream import Event
from safepoint.training.rank import _print_user_traceback
from tests.support.checkpoints import commit, prepared, sealed
from tests.support.commands import Outcome, safepoint

HOSTILE = {
    "a title": "\x1b]0;owned\x07",
    "a clipboard": "\x1b]52;c;cm0gLXJm\x1b\\",
    "a colour": "\x1b[31m",
    "a cursor": "\x1b[2J\x1b[1;1H",
    "one byte": "\x9b31m",
    "backspaces": "a\b\b\b",
    "a carriage return": "a\rsafepoint: saved",
    "a deletion": "\x7f",
    "a right-to-left mark": "\u202egnp.exe",
    "a line separator": "a\u2028safepoint: saved",
    "a form feed": "a\x0cb\x0bc\x85d",
    "half a character": "\udc9b31m",
}
_ALLOWED = {"\n"}


def is_harmless(text: str) -> bool:
    return all(letter.isprintable() or letter in _ALLOWED for letter in text)


@pytest.fixture(params=HOSTILE)
def name(request: pytest.FixtureRequest) -> str:
    return HOSTILE[request.param]


def record(folder: Path, **changes: object) -> None:
    path = folder / MANIFEST_NAME
    path.write_bytes(sealed(json.loads(path.read_bytes()) | changes))


def harmless(outcome: Outcome) -> Outcome:
    assert is_harmless(outcome.stdout), repr(outcome.stdout)
    assert is_harmless(outcome.stderr), repr(outcome.stderr)
    return outcome


def test_checkpoints_with_hostile_names(tmp_path: Path, name: str) -> None:
    """Metrics, libraries, runs and weights, in every command that reads them."""
    output = prepared(tmp_path)
    weights = name.encode(errors="replace").decode()
    first = commit(output, 4, {0: {"model.safetensors": save({weights: torch.ones(2), "b": torch.ones(2)})}})
    second = commit(output, 8, {0: {"model.safetensors": save({f"{weights}2": torch.ones(2), "b": torch.zeros(2)})}})
    record(first, libraries={name: name}, strategy=name, metrics={name: 1.0})
    for command in ("list", "show", "verify", "repair", "prune"):
        extra = ["--keep", "5"] if command == "prune" else []
        harmless(safepoint("checkpoints", command, first if command == "show" else tmp_path, *extra))
        harmless(safepoint("checkpoints", command, tmp_path / name.replace("/", "_"), *extra))
    found = harmless(safepoint("checkpoints", "diff", first, second, "--deep"))
    assert "tensors: " in found.stdout
    (second / "model.safetensors").write_bytes(b"{" + name.encode(errors="replace"))
    harmless(safepoint("checkpoints", "verify", tmp_path, "--deep"))
    harmless(safepoint("checkpoints", "export", second, tmp_path / "to"))
    record(first, run_id=name)
    assert "run_id must be" in harmless(safepoint("checkpoints", "verify", tmp_path)).stdout


def test_files_with_hostile_names(tmp_path: Path, name: str) -> None:
    folder = commit(prepared(tmp_path), 4)
    (folder / name.replace("/", "_").encode(errors="replace").decode()).write_bytes(b"x")
    assert "not in the manifest" in harmless(safepoint("checkpoints", "verify", tmp_path)).stdout
    harmless(safepoint("checkpoints", "repair", tmp_path, "--drop-damaged"))


def events(name: str) -> list[Event]:
    return [
        CheckpointRejected(path=name, file=name, reason=name),
        SaveFailed(step=1, trigger=name, reason=name, consequence=name),
        Failed(rank=0, exit_code=1, reason=name, error=name),
        StepAbandoned(step=1, snapshot_step=None, reason=name),
        Interrupted(step=1, saved=False, reason=name),
    ]


@pytest.mark.parametrize("colour", [False, True])
def test_lines_of_the_log(name: str, colour: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of events and of exceptions; also where they have colours of their own."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(console, "is_interactive", lambda: colour)
    monkeypatch.delenv("NO_COLOR", raising=False)
    logger = logging.getLogger("safepoint")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        logger = console.set_up(1)
        for event in events(name):
            logger.warning("%s", event.line)
        try:
            int(name)
        except ValueError:
            logger.exception("it failed: %s", name)
        logger.info("%s\nsafepoint: saved step 9", name)
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    text = stream.getvalue()
    for own in ("\033[33m", "\033[31m", "\033[2m", "\033[0m") if colour else ():
        text = text.replace(own, "")
    assert is_harmless(text), repr(text)
    assert "\nsafepoint: saved" not in text


def open_nothing(name: str) -> None:
    raise ValueError(name)


def test_exceptions_and_the_traceback_of_a_program(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = SafepointError(name, hint=name)
    assert is_harmless(f"{error} {error.message} {error.hint} {error.args[0]}")
    assert is_harmless(str(CheckpointError(f"{name} is no tensor")))
    try:
        open_nothing(name)
    except ValueError as caught:
        _print_user_traceback(caught)
    assert is_harmless(capsys.readouterr().err)


def test_answers_warnings_and_tables(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_answer(False, {}, [name, *table([name], [[name]])], {"ok": "green"})
    print_answer(True, {"name": name, name: [name]}, [])
    print_answer(True, [{"name": name}], [])
    print_warning(name)
    found = capsys.readouterr()
    assert is_harmless(found.out)
    assert is_harmless(found.err)


def test_progress_lines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(console, "is_interactive", lambda: True)
    console.ProgressLine(name, least_bytes=0).update(1, 2)
    assert is_harmless(stream.getvalue().removeprefix("\r"))


def test_own_colours_stay_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a finding that begins like a status has none of them."""
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        print_answer(False, {}, ["ok       python", "okay", "\x1b[31mfailure"], {"ok": "green", "failure": "red"})
        terminal.flush()
        text = os.read(leader, 4096).decode()
    os.close(leader)
    assert text.splitlines() == ["\x1b[32mok\x1b[0m       python", "okay", "\\x1b[31mfailure"]


def test_lines_stay_lines() -> None:
    assert printable_lines("a\n\tb\r\n") == "a\n        b\\r\n"
