"""The life of a job on a cluster, as a person types it."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.cluster.workspace import CLAIM, QUEUE, Workspace, apply, queue_objects
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
        *("--name", name, "--output-dir", output, "--code", str(TINY.parent)),
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
    assert done.document["was_saved"] is True
    step = done.document["safe_step"]
    assert (team.folder / "tiny" / f"checkpoint-{step}" / "safepoint-manifest.json").exists()
    assert safepoint("resume", *ON, team.namespace, "tiny").code == 0
    wait(team, "tiny", lambda job: job["state"] == "Complete", 240)
    assert safepoint("delete", *ON, team.namespace, "tiny").code == 0
    assert team.left() == []


@pytest.mark.timeout(600)
def test_a_job_gets_more_nodes_and_fewer(team: Workspace) -> None:
    """1 → 2 → 1: each time it resumes from the step at which it stopped, and it stays the same job."""
    # The Trainer's sampler deals samples by the number of ranks.
    submit(team, "tiny", "--allow-batch-change", program=("--epochs", "6", "--step-ms", "400"))
    first = wait(team, "tiny", trains_at(4))
    for nodes in (2, 1):
        done = safepoint("scale", *ON, team.namespace, "--nnodes", str(nodes), "--json", "tiny")
        assert done.code == 0, done.stderr
        assert (done.document["num_nodes"], done.document["created"]) == (nodes, first["created"])
        step = done.document["safe_step"]
        assert (team.folder / "tiny" / f"checkpoint-{step}" / "safepoint-manifest.json").exists()
        found = wait(team, "tiny", trains_at(step + 2), 180)
        assert found["num_nodes"] == nodes
        assert len(team.get("pods")["items"]) == nodes
    ended = wait(team, "tiny", lambda job: job["state"] == "Complete", 240)
    assert ended["progress"]["step"] == ended["progress"]["max_steps"]
    assert [attempt["num_nodes"] for attempt in ended["attempts"]] == [1, 2]
    happened = [json.loads(line) for line in (team.folder / "tiny/.safepoint/events.jsonl").read_text().splitlines()]
    resumed = [event["step"] for event in happened if event["event"] == "resumed"]
    assert len(resumed) == 2
    assert resumed == [event["step"] for event in happened if event["event"] == "stop_requested"]
    assert safepoint("delete", *ON, team.namespace, "tiny").code == 0
    assert team.left() == []


@pytest.mark.timeout(600)
def test_a_job_of_a_queue_gets_more_nodes(team: Workspace) -> None:
    """Kueue admits the successor as a job of its own."""
    apply(team.cluster, queue_objects(team.namespace, cpu="2"))
    # A small machine has no two whole cores left for the pods.
    queue = ("--queue", QUEUE, "--memory", "1Gi", "--allow-batch-change")
    submit(team, "tiny", *queue, program=("--epochs", "6", "--step-ms", "400"))
    wait(team, "tiny", trains_at(3))
    done = safepoint("scale", *ON, team.namespace, "--nnodes", "2", "--json", "tiny")
    assert done.code == 0, done.stderr
    wait(team, "tiny", trains_at(done.document["safe_step"] + 1), 180)
    assert len(team.get("pods")["items"]) == 2
    [workload] = team.get("workloads.kueue.x-k8s.io")["items"]
    assert workload["spec"]["podSets"][0]["count"] == 2
    assert safepoint("delete", *ON, team.namespace, "tiny").code == 0
    assert team.left() == []
