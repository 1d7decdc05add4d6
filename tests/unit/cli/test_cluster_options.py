"""Tests of safepoint.cli.cluster_options: places of the settings, without a cluster."""

from pathlib import Path

import pytest

from safepoint.errors import UsageError
from safepoint.foundation.configuration import ClusterPlace, Configuration, user_file
from tests.support.commands import safepoint


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own settings file, in a home folder of its own."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("SAFEPOINT_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    file = user_file()
    file.parent.mkdir(parents=True)
    return file


def test_a_place_has_a_context_and_a_namespace(settings: Path) -> None:
    settings.write_text('[places.a]\ncontext = "prod"\nnamespace = "team"\ndefault = true\n[places.b]\n')
    found = Configuration.load()
    assert found.places == {
        "a": ClusterPlace(name="a", context="prod", namespace="team", is_default=True),
        "b": ClusterPlace(name="b"),
    }
    assert found.default_place == found.places["a"]
    shown = safepoint("config", "show").stdout
    assert '[places.a]\ncontext = "prod"\nnamespace = "team"\ndefault = true\n' in shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[places]\ncontext = 'a'", "each place has a table of its own"),
        ("[places.a.b]\ncontext = 'a'", "each place has a table of its own"),
        ("[places.a]\ncontxt = 'a'", "did you mean context"),
        ("[places.a]\ncontext = 5", "write it in quotation marks"),
        ("[places.a]\nnamespace = ''", "write it in quotation marks"),
        ("[places.a]\ndefault = 'yes'", "write true or false"),
        ("[places.a]\ndefault = true\n[places.b]\ndefault = true", "a is the default already"),
    ],
)
def test_what_is_no_place_is_refused(settings: Path, text: str, why: str) -> None:
    settings.write_text(text)
    with pytest.raises(UsageError, match=why):
        Configuration.load()


def test_a_project_names_no_cluster(settings: Path) -> None:
    """Else a folder that someone sends could direct commands to another cluster."""
    Path("safepoint.toml").write_text('[places.a]\ncontext = "prod"\n')
    with pytest.raises(UsageError, match="clusters are your own, and not of a project"):
        Configuration.load()


def test_jobs_of_this_machine_are_listed_when_the_default_place_cannot_be_reached(settings: Path) -> None:
    settings.write_text('[places.a]\ncontext = "prod"\ndefault = true\n')
    done = safepoint("list")
    assert (done.code, done.stdout) == (0, "no jobs\n")
    assert "the jobs of place a cannot be listed: there is no kubeconfig" in done.stderr
    assert "there is no kubeconfig" in safepoint("status", "x").stderr
    assert "there is no kubeconfig" in safepoint("list", "--on", "a").stderr
    assert safepoint("list", "--on", "local").stderr == ""
