"""`safepoint config show`: what is in effect, and where it comes from."""

import tomllib
from pathlib import Path

import pytest

from safepoint.foundation.configuration import user_file
from tests.support.commands import safepoint


@pytest.fixture
def files(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (project / "safepoint.toml").write_text(
        "[run]\nsave-steps = 20\noutput_dir = 'a \"b\"'\n[checkpoints.repair]\nidle = 60\n[pvc]\ndata = '/d'\n"
    )
    (project / "pyproject.toml").write_text("[tool.safepoint.run]\nsave-steps = 30\ngrace = 60\n")
    user_file().parent.mkdir(parents=True)
    user_file().write_text("[local]\ngpu_slots = 1\n")
    monkeypatch.setenv("SAFEPOINT_KEEP", "newest=2")
    return project


def test_what_is_set_is_shown_as_a_file_says_it(files: Path) -> None:
    """The answer can be written into a settings file, and says the same there."""
    text = safepoint("config", "show").stdout
    assert tomllib.loads(text) == {
        "run": {"save-steps": 20, "output-dir": 'a "b"', "grace": 60.0, "keep": "newest=2"},
        "submit": {"save-steps": 20, "output-dir": 'a "b"', "grace": 60.0, "keep": "newest=2"},
        "checkpoints": {"repair": {"idle": 60.0}},
        "pvc": {"data": "/d"},
        "local": {"gpu-slots": 1},
    }
    (files / "pyproject.toml").unlink()
    (files / "safepoint.toml").unlink()
    user_file().write_text(text)
    assert safepoint("config", "show").stdout == text


def test_origins_are_files_lines_and_variables(files: Path) -> None:
    lines = safepoint("config", "show", "--origin").stdout.splitlines()
    for line in (
        "save-steps = 20  # safepoint.toml, line 2",
        "grace = 60.0  # pyproject.toml, line 3",
        'keep = "newest=2"  # SAFEPOINT_KEEP',
        'data = "/d"  # safepoint.toml, line 7',
        f"gpu-slots = 1  # {user_file()}, line 2",
    ):
        assert line in lines


def test_the_slots_in_force_are_shown(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable counts more than the file, and says so."""
    monkeypatch.setenv("SAFEPOINT_GPU_SLOTS", "3")
    lines = safepoint("config", "show", "--origin").stdout.splitlines()
    assert "gpu-slots = 3  # SAFEPOINT_GPU_SLOTS" in lines
    assert safepoint("config", "show", "--json").document["local"] == {"gpu-slots": 3}


def test_all_shows_defaults_too(files: Path) -> None:
    """Of every command; what has no default says so."""
    text = safepoint("config", "show", "--all").stdout
    assert tomllib.loads(text)["run"].items() >= {"max-restarts": 3, "save-steps": 20, "resume": "auto"}.items()
    assert "# save-strategy is not set" in text


def test_json_says_all_of_it(files: Path) -> None:
    document = safepoint("config", "show", "--json").document
    assert document["settings"][0].keys() == {"command", "option", "value", "default", "source", "origin"}
    by_name = {(entry["command"], entry["option"]): entry for entry in document["settings"]}
    assert by_name["run", "keep"]["source"] == "environment"
    assert by_name["run", "grace"] == {
        "command": "run",
        "option": "grace",
        "value": 60.0,
        "default": 30.0,
        "source": "file",
        "origin": "pyproject.toml, line 3",
    }
    assert (document["local"], document["pvc"]) == ({"gpu-slots": 1}, {"data": "/d"})
    everything = safepoint("config", "show", "--json", "--all").document["settings"]
    assert {"source": "default", "origin": None}.items() <= everything[0].items()


def test_nothing_set_is_said(project: Path) -> None:
    assert safepoint("config", "show").stdout == "# all settings have their defaults\n"
    assert safepoint("config", "show", "--json").document == {
        "version": 1,
        "settings": [],
        "local": {},
        "pvc": {},
    }


@pytest.mark.parametrize(
    ("text", "word"),
    [("[doctor]\ngrce = 3\n", "grace"), ("[checkpoints.lst]\n", "list"), ("[run]\nsave-steps = 'x'\n", "save-steps")],
)
def test_it_finds_what_is_wrong_for_any_command(text: str, word: str, project: Path) -> None:
    (project / "safepoint.toml").write_text(text)
    outcome = safepoint("config", "show", "--json")
    assert outcome.exit_error["code"] == outcome.code == 2
    assert word in outcome.exit_error["message"] + outcome.exit_error["hint"]


def test_a_variable_that_cannot_be_meant_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFEPOINT_GRACE", "soon")
    outcome = safepoint("config", "show")
    assert outcome.code == 2
    assert "SAFEPOINT_GRACE='soon'" in outcome.stderr
