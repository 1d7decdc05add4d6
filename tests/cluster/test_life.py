"""The life of a job on a cluster, as a person types it."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.cluster.workspace import CLAIM, Workspace
from tests.support.commands import safepoint
from tests.support.jobs import TINY
from tests.support.patience import PATIENCE

TRAIN = ("--epochs", "4", "--step-ms", "250")
ON = ("--on", ".", "--namespace")


def submit(team: Workspace, name: str, *options: str, program: tuple[str, ...] = TRAIN) -> None:
    output = f"pvc://{CLAIM}/{name}"
    done = safepoint(
        "submit",
        *ON,
        team.namespace,
        *("--name", name, "--output-dir", output, "--code", str(TINY.parent), "--cpu", "1", "--memory", "2Gi"),
        *options,
        *("tiny.py", "--out", "/tmp/out", *program),
    )
    assert done.code == 0, done.stderr


def status(team: Workspace, name: str) -> dict[str, Any]:
    done = safepoint("status", *ON, team.namespace, "--json", name)
    assert done.code == 0, done.stderr
    return done.document


def wait(team: Workspace, name: str, is_so: Callable[[dict[str, Any]], bool], seconds: float = 120) -> dict[str, Any]:
    deadline_s = time.monotonic() + seconds * PATIENCE
    while True:
        found = status(team, name)
        if is_so(found):
            return found
        if time.monotonic() > deadline_s or found["state"] in {"Failed", "Complete"}:
            pods = team.kubectl("get", "pods", "-o", "wide")
            logs = safepoint("logs", *ON, team.namespace, name)
            pytest.fail(f"{json.dumps(found, indent=1)}\n{pods}\n{logs.stdout[-4000:]}{logs.stderr}")
        time.sleep(1)


def trains_at(step: int) -> Callable[[dict[str, Any]], bool]:
    return lambda job: job["state"] == "Running" and (job["progress"] or {}).get("step", 0) >= step


@pytest.mark.timeout(400)
def test_a_job_on_two_pods_is_suspended_and_goes_on(team: Workspace) -> None:
    submit(team, "tiny", "--nnodes", "2")
    wait(team, "tiny", trains_at(4))
    done = safepoint("suspend", *ON, team.namespace, "--json", "tiny")
    assert done.code == 0, done.stderr
    assert done.document["state"] == "Suspended"
    assert done.document["is_saved"] is True
    step = done.document["safe_step"]
    assert (team.folder / "tiny" / f"checkpoint-{step}" / "safepoint-manifest.json").exists()
    assert safepoint("resume", *ON, team.namespace, "tiny").code == 0
    wait(team, "tiny", lambda job: job["state"] == "Complete", 240)
    assert safepoint("delete", *ON, team.namespace, "tiny").code == 0
    assert team.left() == []
