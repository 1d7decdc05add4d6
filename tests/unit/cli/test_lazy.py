"""Commands are imported when they are used, and nothing shows that they were not before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from safepoint.cli.lazy import typed_options, walk
from safepoint.cli.main import root
from safepoint.jobs.local.history import History
from safepoint.jobs.model.states import JobState
from tests.support.checkpoints import commit, prepared
from tests.support.commands import safepoint
from tests.support.job_values import job_spec

_CHILD = """
import contextlib, io, json, sys
from safepoint.cli.failures import run_command
from safepoint.cli.main import root
seen = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        code = run_command(root(), arguments)
    seen.append({"arguments": arguments, "code": code, "out": out.getvalue(), "modules": sorted(sys.modules)})
print(json.dumps(seen))
"""


def modules_after(*commands: list[str]) -> list[dict[str, object]]:
    """What a process has imported after each of the commands, one after the other."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(commands)], capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout)


def test_help_imports_no_command() -> None:
    """What `safepoint --help` waits for is Python, Typer and a few small modules."""
    (seen,) = modules_after(["--help"])
    ours = {name for name in seen["modules"] if name.startswith("safepoint")}
    assert ours == {
        *("safepoint", "safepoint._version", "safepoint.errors"),
        *("safepoint.cli", "safepoint.cli.main", "safepoint.cli.lazy"),
        *("safepoint.cli.failures", "safepoint.cli.interruption"),
        *("safepoint.foundation", "safepoint.foundation.environment", "safepoint.foundation.processes"),
        *("safepoint.foundation.volumes", "safepoint.foundation.volumes.mounts"),
    }
    assert not {"torch", "numpy", "obstore", "rich", "asyncio", "tomllib"} & set(seen["modules"])
    for command in root().commands:
        assert f"\n  {command} " in seen["out"]


def test_no_command_imports_torch_before_it_trains(tmp_path: Path) -> None:
    """Neither to explain itself nor to do its work; `run` does when it has started its ranks' agent."""
    output = prepared(tmp_path / "out")
    for step in (10, 20):
        commit(output, step)
    at, copy = str(output.root), str(tmp_path / "copy")
    explained = [[*path, "--help"] for path, _ in walk(root())]
    done = [
        *(["checkpoints", name, at, "--deep"] for name in ("list", "verify", "repair")),
        ["checkpoints", "show", at],
        ["checkpoints", "diff", f"{at}/checkpoint-10", f"{at}/checkpoint-20", "--deep"],
        ["checkpoints", "copy", at, copy],
        ["checkpoints", "export", copy, str(tmp_path / "model")],
        ["checkpoints", "prune", copy, "--keep", "newest=1"],
        ["config", "show", "--all"],
        ["doctor", "--output-dir", at],
    ]
    assert {" ".join(path) for path, _ in walk(root())} >= {"run", "checkpoints list", "config show", "doctor"}
    seen = modules_after(*explained, *done)
    assert [item["arguments"] for item in seen if "torch" in item["modules"]] == []
    codes = {" ".join(item["arguments"][:2]): item["code"] for item in seen[len(explained) :]}
    assert set(codes.values()) == {0}, codes


def test_no_command_for_jobs_imports_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What trains are the processes that they start."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with History() as history:
        history.add(job_spec("done"), actor="me")
        history.become("done", JobState.COMPLETE, actor="me", exit_code=0)
    looks = [["list"], ["list", "--json"], ["watch", "done", "--json"]]
    looks += [[name, "done"] for name in ("status", "events", "logs")]
    refused = [["suspend", "done", "--yes"], ["resume", "done"], ["scale", "done", "--nnodes", "2"]]
    seen = modules_after(*looks, *refused, ["submit", "absent.py"], ["delete", "done", "--yes"])
    assert [item["code"] for item in seen] == [0] * len(looks) + [11] * len(refused) + [2, 0]
    assert [item["arguments"] for item in seen if "torch" in item["modules"]] == []


def test_lists_of_jobs_import_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What shows jobs needs their history, and nothing of checkpoints and where they are."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (seen,) = modules_after(["list"])
    assert seen["code"] == 0
    assert not {"torch", "numpy", "obstore", "rich", "safepoint.storage.opening"} & set(seen["modules"])


def test_summaries_are_the_commands_own() -> None:
    """The line of `safepoint --help` is the first line of `safepoint COMMAND --help`."""
    group = root()
    for name, lazy in list(group.commands.items()):
        assert group.load(name).get_short_help_str(200) == lazy.short_help


def test_a_command_explains_itself_in_full() -> None:
    """A lazy command has its options, arguments, variables and defaults, and a group its commands."""
    text = safepoint("run", "--help").stdout
    for word in ("SCRIPT", "--save-steps", "SAFEPOINT_SAVE_STEPS", "--from-scratch", "Exit codes", "default: 30"):
        assert word in text, word
    text = safepoint("checkpoints", "--help").stdout
    for word in ("list", "verify", "repair"):
        assert f"\n  {word} " in text
    assert "--idle" in safepoint("checkpoints", "repair", "--help").stdout
    assert safepoint("--help").code == 0


def test_what_is_nearly_a_command_is_suggested() -> None:
    assert "Did you mean 'checkpoints'?" in safepoint("checkpoint", "list").stderr
    assert safepoint("checkpoint").code == 2
    assert "Usage: safepoint" in safepoint().stderr


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ch"], ["checkpoints"]),
        (["checkpoints", "re"], ["repair"]),
        (["run", "--snap"], ["--snapshot-steps", "--snapshot-slots", "--snapshot-memory"]),
        (["checkpoints", "list", "--j"], ["--json"]),
        (["nothing", "x"], []),
    ],
)
def test_shells_complete_commands_and_options(
    words: list[str], offered: list[str], monkeypatch: pytest.MonkeyPatch, project: Path
) -> None:
    """Also beside a settings file that no command would accept."""
    (project / "safepoint.toml").write_text("[rnu\n")
    monkeypatch.setenv("_SAFEPOINT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["safepoint", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    outcome = safepoint()
    assert (outcome.code, outcome.stdout.split()) == (0, offered)


@pytest.mark.parametrize("words", [["status", "b"], ["watch", "b"], ["logs", "-f", "b"]])
def test_shells_complete_names_of_jobs(words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that begin so; none, and nothing made, where there is no history."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("_SAFEPOINT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["safepoint", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert (safepoint().stdout.split(), (tmp_path / "safepoint").exists()) == ([], False)
    with History() as history:
        for name in ("bear", "cat", "bee"):
            history.add(job_spec(name), actor="me")
    assert sorted(safepoint().stdout.split()) == ["bear", "bee"]


def test_the_completion_script_is_for_this_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `--show-completion` prints calls back with the variable that is listened to."""
    monkeypatch.setenv("_SAFEPOINT_COMPLETE", "source_bash")
    assert "_SAFEPOINT_COMPLETE=complete_bash" in safepoint().stdout


def test_completing_a_name_imports_no_command() -> None:
    """A shell waits for it at every press of the key."""
    environ = {**os.environ, "_SAFEPOINT_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "safepoint "}
    child = "import sys\nfrom safepoint.cli.main import main\ntry:\n main()\nfinally:\n print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", child], env=environ, capture_output=True, text=True, check=True)
    assert "doctor" in done.stdout
    assert "safepoint.cli.commands.checkpoints" not in done.stdout.split()
    assert "safepoint.cli.commands.run" not in done.stdout.split()


def test_a_programs_own_options_are_its_own() -> None:
    """Values are no options, and behind SCRIPT or `--` nothing is ours."""
    group = root()
    run, show = group.load("run"), dict(walk(group))["checkpoints", "show"]
    typed = typed_options(run, ["--keep", "--json", "-m", "--nope", "--grace=3", "script", "--json"])
    assert typed.keys() == {"--keep", "-m", "--module", "--grace"}
    assert (typed["--keep"], typed["--grace"]) == ("--json", "3")
    assert typed_options(show, ["place", "--json", "--", "--deep"]).keys() == {"--json"}
