"""`safepoint run --freeze-as-last-resort` ends at the start where it cannot keep its promise."""

from pathlib import Path

import pytest

from safepoint.cli.commands import run as run_command
from safepoint.errors import ExitCode, SafepointError
from safepoint.transparent import self_test
from safepoint.transparent.criu import program
from safepoint.transparent.criu.program import VARIABLE, Criu
from tests.support.commands import safepoint

OUTPUT = ("--output-dir", "out")
REFUSED = [
    pytest.param((), {}, ExitCode.USAGE, "needs --output-dir", id="no output folder"),
    pytest.param(
        (*OUTPUT, "--nnodes", "2", "--master-addr", "a"), {}, ExitCode.NOT_SUPPORTED, "nodes", id="several nodes"
    ),
    pytest.param(OUTPUT, {VARIABLE: "/no/criu"}, ExitCode.NOT_SUPPORTED, "/no/criu", id="no CRIU"),
]


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('begun', 'w')")


@pytest.mark.parametrize(("options", "variables", "code", "text"), REFUSED)
def test_it_is_refused_before_anything_starts(
    options: tuple[str, ...],
    variables: dict[str, str],
    code: ExitCode,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the option's exit code, and a message that says why."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    outcome = safepoint("run", "--freeze-as-last-resort", *options, "train.py")
    assert (outcome.code, text in outcome.stderr) == (code, True), outcome.stderr
    assert not (tmp_path / "begun").exists()


def test_a_machine_on_which_the_trial_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 16, whatever has failed, and with its hint."""

    def fail(*_: object) -> None:
        raise SafepointError("the kernel says no", hint="update it")

    monkeypatch.setattr(self_test, "find_criu", lambda: Criu(path="criu", version="4.2.1"))
    monkeypatch.setattr(self_test, "try_out", fail)
    with pytest.raises(SafepointError, match="the kernel says no") as caught:
        self_test.find_working_criu()
    assert (caught.value.exit_code, caught.value.hint) == (ExitCode.NOT_SUPPORTED, "update it")


def test_a_pod_has_no_such_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive for most pods lacks the module."""
    import sys

    monkeypatch.setitem(sys.modules, "safepoint.jobs.local.images.watched_run", None)  # pyright: ignore
    with pytest.raises(SafepointError, match="no modules for process images") as caught:
        run_command._run_watched()
    assert caught.value.exit_code == ExitCode.NOT_SUPPORTED


def test_the_trial_needs_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CRIU, the reason is that of every other command."""
    monkeypatch.setenv(VARIABLE, "/no/criu")
    with pytest.raises(SafepointError, match="/no/criu"):
        program.find_criu()
