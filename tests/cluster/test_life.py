"""The life of a job on a cluster, as a person types it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import jobs
from tests.support.cluster.workspace import CLAIM, QUEUE, Workspace, apply, queue_objects
from tests.support.commands import safepoint
from tests.support.equality import assert_same_run, logged, samples
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
    assert step in team.steps("tiny")
    assert safepoint("resume", *ON, team.namespace, "tiny").code == 0
    wait(team, "tiny", lambda job: job["state"] == "Complete", 240)
    assert safepoint("delete", *ON, team.namespace, "tiny").code == 0
    assert team.left() == []


_SCALED = ("--samples", "72", "--epochs", "5", "--logging-steps", "1", "--dropout", "0", "--tell-samples")
_SCALED += ("--grad-accum", "4")
"""A step has 8 samples; on two ranks, Safepoint accumulates half as often. Masks of dropout would differ."""


@pytest.mark.timeout(900)
def test_a_job_gets_more_nodes_and_fewer(team: Workspace, tmp_path: Path) -> None:
    """1 → 2 → 1: it resumes at the step at which it stopped, stays the same job, and its result is that of here."""
    out = "/mnt/kubeflow-checkpoints/tiny"
    submit(team, "tiny", program=(*_SCALED, "--out", out, "--step-ms", "200"))
    first = wait(team, "tiny", trains_at(4))
    for nodes in (2, 1):
        done = safepoint("scale", *ON, team.namespace, "--nnodes", str(nodes), "--json", "tiny")
        assert done.code == 0, done.stderr
        assert (done.document["num_nodes"], done.document["created"]) == (nodes, first["created"])
        step = done.document["safe_step"]
        assert step in team.steps("tiny")
        found = wait(team, "tiny", trains_at(step + 2), 180)
        assert found["num_nodes"] == nodes
        assert len(team.get("pods")["items"]) == nodes
    ended = wait(team, "tiny", lambda job: job["state"] == "Complete", 240)
    assert ended["progress"]["step"] == ended["progress"]["max_steps"]
    assert [attempt["num_nodes"] for attempt in ended["attempts"]] == [1, 2, 1]
    assert ended["attempts"][-1]["outcome"] == "Complete"
    output = team.folder / "tiny"
    resumed = [event["step"] for event in jobs.read_events(output, "resumed")]
    assert len(resumed) == 2
    assert resumed == [event["step"] for event in jobs.read_events(output, "stop_requested")]
    assert safepoint("delete", *ON, team.namespace, "tiny").code == 0
    assert team.left() == []
    undisturbed, replayed = tmp_path / "undisturbed", tmp_path / "replayed"
    run_here(undisturbed, (1, None))
    assert samples(output) == samples(undisturbed)
    assert [entry.get("learning_rate") for entry in logged(output)] == [
        entry.get("learning_rate") for entry in logged(undisturbed)
    ]
    run_here(replayed, (1, resumed[0]), (2, resumed[1]), (1, None))
    assert [event["step"] for event in jobs.read_events(replayed, "resumed")] == resumed
    assert samples(output) == samples(replayed)
    assert_same_run(output, replayed)


def run_here(output: Path, *schedule: tuple[int, int | None]) -> None:
    """Run the same training on this machine: with a number of ranks up to a step or, with None, to the end."""
    for ranks, last in schedule:
        program = jobs.tiny(output, *_SCALED, "--step-ms", "0" if last is None else "200")
        job = jobs.safepoint(output, "--nproc-per-node", str(ranks), program=program)
        with jobs.no_orphans(job):
            if last is not None:
                job.wait_for_mark(f"train {last - 1}")
                job.signal()
            assert job.wait(200) == (0 if last is None else 75), job.text


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
