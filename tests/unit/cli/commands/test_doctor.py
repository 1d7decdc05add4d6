"""`safepoint doctor`: every finding said, nothing left behind, 1 when something fails."""

import os
from pathlib import Path

import pytest

from safepoint.doctor import examination
from safepoint.doctor.programs import Torch
from tests.support.checkpoints import commit, prepared
from tests.support.commands import safepoint
from tests.support.moto_server import MotoServer

MACHINE = {"python", "memory", "/dev/shm", "open files", "clock", "torch", "gpu"}
CHECKS = MACHINE | {"criu", "pid namespaces", "image locks", "cuda checkpoints"}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose torch answers at once; `tests.unit.cli.test_lazy` asks the real one."""
    torch = Torch(version="2.13.0", cuda=None, devices=0, has_gloo=True, import_s=1.0)
    monkeypatch.setattr(examination, "look_at_torch", lambda: torch)
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)


def findings(*arguments: object, code: int) -> dict[str, dict[str, str]]:
    outcome = safepoint("doctor", *arguments, "--json")
    assert outcome.code == code, outcome
    if code:
        assert outcome.exit_error["code"] == code
    assert outcome.document["version"] == 1
    found = outcome.document["findings"]
    assert all(entry.keys() == {"check", "status", "found", "why", "fix"} for entry in found)
    return {entry["check"]: entry for entry in found}


def test_without_a_place_the_machine_is_looked_at(project: Path) -> None:
    assert findings(code=0).keys() == CHECKS
    text = safepoint("doctor").stdout
    assert "give it with --output-dir" in text
    assert "\033[" not in text


def test_a_folder_is_measured_and_left_as_it_was(project: Path) -> None:
    """Also one that is not there yet, and one with a run in it."""
    assert findings("--output-dir", "new/folder", code=0).keys() == CHECKS | {"output folder"}
    assert list(project.iterdir()) == []
    output = prepared(project / "out")
    commit(output, 10)
    before = sorted(output.root.rglob("*"))
    found = findings("--output-dir", "out", code=0)
    assert found.keys() == CHECKS | {"output folder", "grace period"}
    assert "a snapshot takes" in found["memory"]["found"]
    assert sorted(output.root.rglob("*")) == before


def test_a_grace_period_that_is_too_short_fails(project: Path) -> None:
    """1, with the line for people and the line for programs."""
    commit(prepared(project / "out"), 10)
    found = findings("--output-dir", "out", "--grace", "1", code=1)
    assert found["grace period"]["status"] == "failure"
    outcome = safepoint("doctor", "--output-dir", "out", "--grace", "1")
    assert "fix: set the platform's grace period" in outcome.stdout
    assert "1 check failed" in outcome.stderr


def test_it_looks_where_a_run_would_write(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of `run` hold for it, its own come first."""
    (project / "file").touch()
    (project / "safepoint.toml").write_text("[run]\noutput-dir = 'file'\n")
    assert "file" in findings(code=1)["output folder"]["found"]
    monkeypatch.setenv("SAFEPOINT_OUTPUT_DIR", "elsewhere")
    assert "elsewhere" in findings(code=0)["output folder"]["found"]
    (project / "safepoint.toml").write_text("[doctor]\noutput-dir = 'own'\n")
    assert "own" in findings(code=0)["output folder"]["found"]


def test_a_store_is_tried_and_left_as_it_was(
    project: Path, moto: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written, read, listed, deleted; the secret is never said."""
    for name, value in moto.variables.items():
        monkeypatch.setenv(name, value)
    outcome = safepoint("doctor", "--output-dir", "s3://checkpoints/doctor", "--local-dir", "local", "--json")
    found = {entry["check"]: entry for entry in outcome.document["findings"]}
    assert found["object store"]["status"] == "ok"
    assert moto.endpoint in found["object store"]["found"]
    assert moto.variables["AWS_SECRET_ACCESS_KEY"] not in outcome.stdout + outcome.stderr
    assert list(moto.store("doctor").list()) == []
    assert list(project.iterdir()) == []
    missing = findings("--output-dir", "s3://no-such-bucket/x", "--local-dir", "local", code=1)["object store"]
    assert (missing["status"], "no such bucket" in missing["found"]) == ("failure", True)


def test_a_store_that_nobody_serves_is_given_up_in_time(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    outcome = safepoint("doctor", "--output-dir", "s3://bucket/x", "--local-dir", "local")
    assert outcome.code == 1
    assert "cannot be reached" in outcome.stdout
    assert "very-secret" not in outcome.stdout + outcome.stderr
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    assert "AWS_SECRET_ACCESS_KEY is not set" in safepoint("doctor", "--output-dir", "s3://bucket/x").stdout


def test_what_hangs_is_said_and_left(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead file server no answer within."""
    reader, writer = os.pipe()
    monkeypatch.setattr(examination, "look_at_folder", lambda folder: os.read(reader, 1))
    monkeypatch.setattr(examination, "_FOLDER_S", 0.1)
    found = findings("--output-dir", "out", code=1)
    assert "no answer within" in found["output folder"]["found"]
    os.write(writer, b"x")
