"""Which of flag, variable, files and default is used, and the message about an invalid setting."""

import enum
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
import typer.main

from safepoint.cli.lazy import LazyCommand, LazyGroup
from safepoint.errors import UsageError
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.model.spec import JobSpec
from safepoint.settings.run_settings import RunSettings
from tests.support.checkpoints import commit, prepared
from tests.support.commands import Outcome, safepoint


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, project: Path) -> list[RunSettings]:
    """The settings with which `run` would have launched ranks; it ends with 7 instead."""
    seen: list[RunSettings] = []

    class LeftError(SystemExit):
        pass

    def leave(code: int) -> None:
        raise LeftError(code)

    def launch(plan: Any, settings: RunSettings, **_: Any) -> int:
        seen.append(settings)
        return 7

    monkeypatch.setattr("safepoint.training.launcher.launch.launch", launch)
    monkeypatch.setattr("safepoint.cli.commands.run.os._exit", leave)
    (project / "train.py").touch()
    return seen


def user_file(project: Path, text: str) -> None:
    folder = project.parent / "config" / "safepoint"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(text)


def test_flag_then_variable_then_project_then_user_then_default(
    project: Path, started: list[RunSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is taken away in turn, and the next one counts."""
    user_file(project, "[run]\nsave-steps = 5\n")
    (project / "pyproject.toml").write_text("[tool.safepoint.run]\nsave-steps = 4\n")
    (project / "safepoint.toml").write_text("[run]\nsave_steps = 3\n")
    monkeypatch.setenv("SAFEPOINT_SAVE_STEPS", "2")
    assert safepoint("run", "--save-steps", "1", "train.py").code == 7
    safepoint("run", "train.py")
    monkeypatch.delenv("SAFEPOINT_SAVE_STEPS")
    safepoint("run", "train.py")
    (project / "safepoint.toml").unlink()
    safepoint("run", "train.py")
    (project / "pyproject.toml").unlink()
    safepoint("run", "train.py")
    (project.parent / "config" / "safepoint" / "config.toml").unlink()
    safepoint("run", "train.py")
    assert [settings.save_steps for settings in started] == [1, 2, 3, 4, 5, None]


def test_every_type_of_option(project: Path, started: list[RunSettings], monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, numbers, a number for an option that also takes a word, flags, and counted ones."""
    (project / "safepoint.toml").write_text(
        "[run]\noutput-dir = 'out'\ngrace = 45\nsnapshot-steps = 2\nfrom-scratch = true\nverbose = 2\n"
    )
    safepoint("run", "train.py")
    (settings,) = started
    assert (settings.output_dir, settings.grace_s, settings.snapshot_steps) == ("out", 45.0, "2")
    assert (settings.from_scratch, settings.verbosity) == (True, 2)
    monkeypatch.setenv("SAFEPOINT_FROM_SCRATCH", "0")  # what a file says can be taken back
    safepoint("run", "train.py")
    assert not started[-1].from_scratch


class Level(enum.Enum):
    LOW = "low"
    HIGH = "high"


def attempt(
    env: Annotated[list[str] | None, typer.Option("--env")] = None,
    level: Annotated[Level, typer.Option("--level")] = Level.LOW,
    is_followed: Annotated[bool, typer.Option("--follow/--no-follow")] = True,
    ports: Annotated[list[int] | None, typer.Option("--port")] = None,
) -> None:
    """Try."""
    typer.echo(f"{env} {level.value} {is_followed} {ports}")


def other(*arguments: str) -> Outcome:
    app = typer.Typer(cls=LazyGroup, rich_markup_mode=None)
    app.callback()(lambda: None)
    group = typer.main.get_group(app)
    group.add_command(LazyCommand("try", f"{__name__}:attempt", "Try."))
    return safepoint(*arguments, command=group)


@pytest.mark.parametrize(
    ("text", "arguments", "answer"),
    [
        ("", [], "None low True None"),
        (
            "env = ['A=1', 'B=2']\nlevel = 'high'\nfollow = false\nport = [1, 2]",
            [],
            "['A=1', 'B=2'] high False [1, 2]",
        ),
        ("env = ['A=1']\nfollow = false\n", ["--follow", "--env", "C=3"], "['C=3'] low True None"),
        ("level = 'middle'", [], '[try] level = "middle": '),
        ("env = 'A=1'", [], "write a list"),
        ("env = [['A=1']]", [], "wrong type"),
        ("port = ['1']", [], "without quotation marks"),
        ("no-follow = true", [], "did you mean follow?"),
    ],
)
def test_lists_words_and_flags_with_two_sides(text: str, arguments: list[str], answer: str, project: Path) -> None:
    """What commands to come have, and those that are here have not."""
    (project / "safepoint.toml").write_text(f"[try]\n{text}\n")
    outcome = other("try", *arguments)
    assert answer in outcome.stdout + outcome.stderr
    assert outcome.code == (2 if outcome.stderr else 0)


def test_help_shows_what_files_say(project: Path) -> None:
    (project / "safepoint.toml").write_text("[run]\ngrace = 77\n")
    assert "default: 77" in " ".join(safepoint("run", "--help").stdout.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run]\nsave-stps = 20\n", ["line 2: [run] save-stps = 20", "`run` has no such option", "save-steps?"]),
        ("[run]\nsave-steps = '20'\n", ['save-steps = "20"', "wrong type", "without quotation marks"]),
        ("[run]\nsave-steps = 2.5\n", ["save-steps = 2.5: ", "see `safepoint run --help`"]),
        ("[run]\nsave-steps = true\n", ["save-steps = true", "wrong type"]),
        ("[run]\nsave-steps = [1]\n", ["save-steps = [1]", "without brackets"]),
        ("[run]\nsave-steps = 2020-01-01\n", ["wrong type"]),
        ("[run]\nfrom-scratch = 1\n", ["from-scratch = 1", "true or false"]),
        ("[run]\nmodule = true\n", ["module = true", "could unset it"]),
        ("[rum]\n", ["line 1: [rum]", "no such command", "did you mean run?"]),
        ("[lokal]\n", ["did you mean local?"]),
        ("[run.deeper]\n", ["[run.deeper]", "`run` is a single command without subcommands"]),
        ("[run]\nsave-steps = 0\n", ["--save-steps 0", "--save-steps is set by safepoint.toml, line 2"]),
        ("[run\n", ["safepoint.toml is not valid TOML", "line 1"]),
    ],
)
def test_what_cannot_be_meant_ends_with_2(
    text: str, words: list[str], project: Path, started: list[RunSettings]
) -> None:
    """With file, line, table, key, value and the fix; `--help` works all the same."""
    (project / "safepoint.toml").write_text(text)
    outcome = safepoint("run", "train.py")
    assert (outcome.code, started) == (2, [])
    for word in ["safepoint: error: ", "safepoint.toml", *words]:
        assert word in outcome.stderr, outcome.stderr
    assert safepoint("run", "--help").code == 0
    assert safepoint("run", "train.py", "--help").code == 2  # the script's own
    assert safepoint("--help").code == 0


def test_a_command_of_a_group_has_a_table_of_its_own(project: Path) -> None:
    """Below the group's name; the group itself has no options, and others' tables are not in the way."""
    output = prepared(project / "out")
    for step in (10, 20, 30):
        commit(output, step)
    (project / "safepoint.toml").write_text("[checkpoints.prune]\nkeep = 'newest=1'\n[run]\nno-such = 1\n")
    assert "deleted 2 checkpoints" in safepoint("checkpoints", "prune", "out").stdout
    for text, word in (
        ("[checkpoints]\nkeep = 'newest=1'\n", "such as [checkpoints.list]"),
        ("[checkpoints.prun]\nkeep = 'newest=1'\n", "did you mean prune?"),
        ("[checkpoints.list]\njson = true\n", "a file cannot set it"),
        ("[checkpoints.repair]\nidl = 3\n", "idle"),
    ):
        (project / "safepoint.toml").write_text(text)
        outcome = safepoint("checkpoints", "list" if "idl" not in text else "repair", "out")
        assert outcome.code == 2, text
        assert word in outcome.stderr, outcome.stderr


def test_claims_of_a_file_are_folders(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pvc://` means the same on a laptop as in a pod; what a pod says itself stands."""
    for name in ("laptop", "pod"):
        commit(prepared(project / name / "run"), 10 if name == "laptop" else 20)
    (project / "safepoint.toml").write_text("[pvc]\ndata = 'laptop'\nother = 'nowhere'\n")
    assert "checkpoint-10" in safepoint("checkpoints", "list", "pvc://data/run").stdout
    monkeypatch.setenv("SAFEPOINT_PVC_MOUNTS", f"data={project / 'pod'}")
    assert "checkpoint-20" in safepoint("checkpoints", "list", "pvc://data/run").stdout
    (project / "safepoint.toml").unlink()
    monkeypatch.setenv("SAFEPOINT_PVC_MOUNTS", "")
    unknown = safepoint("checkpoints", "list", "pvc://data/run")
    assert (unknown.code, "data = '/path' below [pvc]" in unknown.stderr) == (2, True)


def test_a_contradiction_names_where_the_other_half_stands(
    project: Path, started: list[RunSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message about a typed option names the other one, which was not typed."""
    (project / "safepoint.toml").write_text("[run]\nsave-strategy = 'epoch'\n")
    text = safepoint("run", "--save-steps", "5", "train.py").stderr
    assert "--save-strategy is set by safepoint.toml, line 2" in text
    assert "--save-steps is set" not in text
    monkeypatch.setenv("SAFEPOINT_SAVE_STRATEGY", "epoch")
    text = safepoint("run", "--save-steps", "5", "train.py").stderr
    assert "--save-strategy is set by SAFEPOINT_SAVE_STRATEGY" in text


def test_a_job_knows_where_its_options_were_set(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option, the variable, or the file and the line; not those with their defaults."""
    seen: list[JobSpec] = []

    def note(self: object, spec: JobSpec) -> None:
        seen.append(spec)
        raise UsageError("no job")

    monkeypatch.setattr(LocalJobs, "submit", note)
    (project / "train.py").touch()
    (project / "safepoint.toml").write_text('[run]\nkeep = "newest=3"\n[submit]\ncpu = 2\n')
    monkeypatch.setenv("SAFEPOINT_SAVE_STEPS", "5")
    safepoint("submit", "--grace", "45", "train.py")
    [spec] = seen
    assert spec.origins == {
        "grace": "--grace",
        "save-steps": "SAFEPOINT_SAVE_STEPS",
        "keep": "safepoint.toml, line 2",
        "cpu": "safepoint.toml, line 4",
    }
    assert JobSpec.from_json(spec.to_json()) == spec
