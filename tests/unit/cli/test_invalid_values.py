"""A value of the wrong type is refused with Safepoint's own words: the option, the value, and what is allowed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperOption

from safepoint.cli.defaults import requirement
from safepoint.cli.lazy import walk
from safepoint.cli.main import root
from tests.support.commands import safepoint

FOREIGN = ("Input should", "valid integer", "valid number", "Invalid value", "unable to parse", "Usage:")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a script, and no settings."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def typed() -> Iterator[tuple[tuple[str, ...], TyperOption, str]]:
    """Every option of every command that does not take any text."""
    for names, command in walk(root()):
        for option in command.params:
            if isinstance(option, TyperOption) and (what := requirement(option)):
                yield names, option, what


@pytest.mark.usefixtures("project")
def test_every_typed_option_says_what_is_allowed() -> None:
    """On the command line: with the value and the way to the help."""
    seen: set[str] = set()
    for names, option, what in typed():
        if option.is_flag or option.count:
            continue
        outcome = safepoint(*names, option.opts[0], "abc")
        line = f"safepoint: error: {option.opts[0]} 'abc' {what} — see `safepoint {' '.join(names)} --help`\n"
        assert (outcome.code, outcome.stderr) == (2, line)
        seen.add(what)
    assert {"must be a whole number", "must be a number", "must be a whole number of at least 1"} <= seen


@pytest.mark.usefixtures("project")
def test_every_variable_says_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is named in place of the option, also for flags."""
    flags = 0
    for names, option, what in typed():
        for variable in [option.envvar] if isinstance(option.envvar, str) else option.envvar or []:
            with monkeypatch.context() as environment:
                environment.setenv(variable, "abc")
                outcome = safepoint(*names, "train.py")
            line = f"safepoint: error: {variable}='abc' {what} — correct or unset the variable\n"
            assert (outcome.code, outcome.stderr) == (2, line)
            flags += option.is_flag
    assert flags > 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("logs", "--rank", "-1", "job"), "--rank '-1' must be a whole number of at least 0"),
        (("watch", "--interval=0"), "--interval '0' must be a number of at least 0.1"),
        (("scale", "job", "--nnodes", "1.5"), "--nnodes '1.5' must be a whole number of at least 1"),
        (("run", "--save-steps=", "train.py"), "--save-steps '' must be a whole number"),
    ],
)
@pytest.mark.usefixtures("project")
def test_limits_are_named(arguments: tuple[str, ...], line: str) -> None:
    """Of a number that is too small, or of another kind; with `--json` as one document."""
    outcome = safepoint(*arguments)
    assert (outcome.code, outcome.stderr.startswith(f"safepoint: error: {line} — see ")) == (2, True), outcome.stderr
    assert not any(text in outcome.stderr for text in FOREIGN)
    error = safepoint(arguments[0], "--json", *arguments[1:]).exit_error
    assert (error["code"], error["message"]) == (2, line)


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ("[run]\nsave-steps = 'abc'\n", 'safepoint.toml, line 2: [run] save-steps = "abc": must be a whole number'),
        ("[run]\ngrace = 'long'\n", 'safepoint.toml, line 2: [run] grace = "long": must be a number'),
        ("[dashboard]\nport = 70000\n", "[dashboard] port = 70000: must be a whole number from 0 to 65535"),
    ],
)
def test_a_settings_file_says_what_is_allowed(table: str, line: str, project: Path) -> None:
    """With the line of the file."""
    (project / "safepoint.toml").write_text(table)
    command = table.partition("]")[0][1:]
    outcome = safepoint(command, *(["train.py"] if command == "run" else []))
    assert (outcome.code, line in outcome.stderr) == (2, True), outcome.stderr
    assert not any(text in outcome.stderr for text in FOREIGN)


def test_config_shows_a_variable_that_is_invalid(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`safepoint config` reads the variables by itself."""
    monkeypatch.setenv("SAFEPOINT_SAVE_STEPS", "abc")
    outcome = safepoint("config", "show")
    assert "SAFEPOINT_SAVE_STEPS='abc' must be a whole number — correct or unset" in outcome.stderr
    assert not any(text in outcome.stderr for text in FOREIGN)
