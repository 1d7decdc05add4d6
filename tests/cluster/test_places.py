"""Jobs of this machine and of the default place: one list, and commands that find the job."""

from pathlib import Path

import pytest

from tests.cluster.test_killed import submission
from tests.support.cluster.workspace import Workspace
from tests.support.commands import safepoint


@pytest.mark.timeout(200)
def test_commands_find_a_job_in_both_places(team: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.chdir(tmp_path)
    settings = tmp_path / "xdg_config_home" / "safepoint" / "config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text(f'[places.team]\ncontext = "test"\nnamespace = "{team.namespace}"\ndefault = true\n')
    assert submission(team, tmp_path / "train.py", "there").run().code == 0
    assert submission(team, tmp_path / "train.py", "twice").run().code == 0
    (tmp_path / "train.py").write_text("print('here')\n")
    for name in ("here", "twice"):
        assert safepoint("submit", "--name", name, "train.py").code == 0
    done = safepoint("list", "--json")
    assert done.code == 0, done.stderr
    found = {(job["name"], job["place"]) for job in done.document}
    assert found == {("here", "local"), ("twice", "local"), ("there", "team"), ("twice", "team")}
    assert "PLACE" in safepoint("list").stdout.splitlines()[0]
    assert safepoint("status", "here").code == 0
    assert safepoint("status", "--json", "there").document["namespace"] == team.namespace
    assert "there is no job 'nowhere' on this machine or on cluster 'team'" in safepoint("status", "nowhere").stderr
    for misspelt, meant in (("heer", "here"), ("twise", "twice")):
        assert f"did you mean {meant}? `safepoint list` shows the jobs" in safepoint("logs", misspelt).stderr
    unknown = safepoint("status", "--on", "team", "teher")
    assert (unknown.code, "did you mean there? " in unknown.stderr) == (10, True), unknown.stderr
    twice = safepoint("status", "twice")
    assert "this machine and cluster 'team' both have a job 'twice'" in twice.stderr
    assert "--on local or --on team" in twice.stderr
    for place in ("local", "team"):
        assert safepoint("delete", "--on", place, "twice").code == 0
    for name in ("here", "there"):
        assert safepoint("delete", name).code == 0
    assert safepoint("list", "--json").document == []
