"""`job:NAME` as a location, and the keys of a data connection."""

import os
from pathlib import Path

import pytest

from safepoint.jobs.local.history import History
from safepoint.jobs.local.paths import state_folder
from safepoint.jobs.model.states import JobState
from tests.support.checkpoints import commit, prepared
from tests.support.commands import safepoint
from tests.support.job_values import job_spec
from tests.support.moto_server import MotoServer


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


def add(name: str, output: str | None, **fields: object) -> None:
    with History() as history:
        history.add(job_spec(name, output_dir=output, **fields), actor="test")
        history.become(name, JobState.COMPLETE, actor="test")


def connection(name: str, variables: dict[str, str]) -> None:
    path = state_folder().parent.parent / "config" / "safepoint" / "connections.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"[{name}]\n" + "".join(f'{key} = "{value}"\n' for key, value in variables.items()))
    path.chmod(0o600)


def test_the_checkpoints_of_a_job_in_a_folder(tmp_path: Path) -> None:
    """Through a claim of the job's own, by the beginning of its name, all of them or one."""
    output = prepared(tmp_path / "data" / "out")
    for step in (10, 20):
        commit(output, step)
    add("tiny", "pvc://claim/out", env={"SAFEPOINT_PVC_MOUNTS": f"claim={tmp_path / 'data'}"})
    before = dict(os.environ)
    found = safepoint("checkpoints", "list", "job:ti", "--json")
    assert [item["step"] for item in found.document] == [20, 10], found.stderr
    assert safepoint("checkpoints", "show", "job:tiny/checkpoint-10", "--json").document["step"] == 10
    assert safepoint("checkpoints", "diff", "job:tiny/checkpoint-10", "job:tiny").code == 0
    assert dict(os.environ) == before


@pytest.mark.parametrize(("where", "word"), [("job:absent", "no job 'absent'"), ("job:silent", "has not reported")])
def test_a_job_without_a_place(where: str, word: str) -> None:
    """Its checkpoints are not found."""
    add("silent", None)
    outcome = safepoint("checkpoints", "list", where, "--json")
    assert outcome.code == 10
    assert word in outcome.exit_error["message"]


def test_the_keys_of_a_connection(tmp_path: Path, moto: MotoServer) -> None:
    """Of a job, of the option, for `doctor` too; two of them in one command are refused."""
    connection("here", moto.variables)
    connection(
        "dead",
        {**moto.variables, "AWS_S3_ENDPOINT": "http://127.0.0.1:9", "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"},
    )
    committed = prepared(tmp_path / "out")
    commit(committed, 10)
    location = str(moto.location("of-a-job"))
    add("tiny", location, data_connection="here")
    add("other", location, data_connection="dead")
    copied = safepoint("checkpoints", "copy", committed.root, location, "--connection", "here")
    assert copied.code == 0, copied.stderr
    assert [item["step"] for item in safepoint("checkpoints", "list", "job:tiny", "--json").document] == [10]
    assert safepoint("checkpoints", "list", "job:tiny", "--connection", "here").code == 0
    for arguments in (["list", "job:tiny", "--connection", "dead"], ["diff", "job:tiny", "job:other"]):
        outcome = safepoint("checkpoints", arguments[0], "--json", *arguments[1:])
        assert outcome.code == 2
        assert "the locations need different credentials for object stores" in outcome.exit_error["message"]
    assert safepoint("checkpoints", "list", location, "--connection", "absent").code == 10
    found = safepoint("doctor", "--output-dir", location, "--connection", "here", "--json").document["findings"]
    assert next(one["status"] for one in found if one["check"] == "object store") == "ok"
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ
