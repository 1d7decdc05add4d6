"""A machine without obstore: s3:// needs nothing but the standard library; gs:// and az:// say what to install."""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.support.blocked import without
from tests.support.jobs import environment, no_orphans, read_events, safepoint, tiny
from tests.support.moto_server import MotoServer

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


def command(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-P", "-m", "safepoint.cli.main", *words]
    return subprocess.run(program, env=environment(**variables), capture_output=True, text=True, check=False)


def test_a_life_on_s3(moto: MotoServer, tmp_path: Path) -> None:
    """Interrupted, resumed on an emptied disk, completed; then listed, checked, pruned and exported."""
    location = str(moto.location(f"plain-{uuid.uuid4().hex}"))
    variables = {**moto.variables, "PYTHONPATH": without(tmp_path / "blocked", "obstore", "kubeflow", "boto3")}
    assert "is not installed" in command("checkpoints", "list", "gs://bucket/run", **variables).stderr
    output = tmp_path / "run"
    options = ("--nproc-per-node", "2", "--output-dir", location, "--local-dir", str(output), "--save-steps", "5")
    program = tiny(output, "--step-ms", "50", "--epochs", "3")
    job = safepoint(output, *options, program=program, **variables)
    with no_orphans(job):
        job.wait_for_step(8)
        os.kill(job.rank_pids()[1], signal.SIGTERM)
        assert job.wait() == 75, job.text
    step = read_events(output, "uploaded")[-1]["step"]
    shutil.rmtree(output)
    job = safepoint(output, *options, program=program, **variables)
    with no_orphans(job):
        assert job.wait() == 0, job.text
    assert [event["step"] for event in read_events(output, "fetched")] == [step]
    listed = command("checkpoints", "list", location, **variables)
    assert "checkpoint-" in listed.stdout, listed.stderr
    for words in (
        ("checkpoints", "verify", f"{location}/checkpoint-{step}"),
        ("checkpoints", "prune", location, "--keep", "newest=1"),
        ("checkpoints", "export", location, str(tmp_path / "model")),
    ):
        done = command(*words, **variables)
        assert done.returncode == 0, (words, done.stderr)
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(("scheme", "extra"), [("gs", "gcs"), ("az", "azure")])
def test_others_say_what_to_install(scheme: str, extra: str, tmp_path: Path) -> None:
    """One message and no traceback, from a run before any training, from a command and from `doctor`."""
    variables = {"PYTHONPATH": without(tmp_path / "blocked", "obstore")}
    location = f"{scheme}://bucket/run"
    run = ("run", "--output-dir", location, "--local-dir", str(tmp_path / "out"), "--nproc-per-node", "2")
    for words in (
        (*run, *tiny(tmp_path / "out")),
        ("checkpoints", "list", location),
        ("doctor", "--output-dir", location),
    ):
        done = command(*words, **variables)
        said = done.stdout + done.stderr
        assert done.returncode == (1 if words[0] == "doctor" else 13), said
        assert said.count("needs the package obstore") == 1, said
        assert f"pip install 'safepoint[{extra}]'" in said
        assert "Traceback" not in said
