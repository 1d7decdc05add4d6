"""The pages of the dashboard for jobs of a real cluster, over HTTP."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.conftest import PLACE
from tests.cluster.test_life import TRAIN
from tests.support.cluster.workspace import CLAIM, QUEUE, Workspace, apply, queue_objects
from tests.support.commands import safepoint
from tests.support.jobs import TINY
from tests.support.visitor import Visitor


def submit(name: str, *options: str, program: tuple[str, ...] = TRAIN) -> None:
    output = ("--output-dir", f"pvc://{CLAIM}/{name}", "--code", str(TINY.parent))
    words = ("submit", "--on", PLACE, "--name", name, *output, *options, "tiny.py", "--out", "/tmp/out", *program)
    done = safepoint(*words)
    assert done.code == 0, done.stderr


def trains_at(step: int) -> Callable[[Any], bool]:
    return lambda job: job["state"] == "Running" and (job["progress"] or {}).get("step", 0) >= step


@pytest.mark.timeout(900)
def test_the_pages_of_a_job(team: Workspace, visitor: Visitor) -> None:
    """Its list, its page, pods, output, checkpoints; before a suspension, the receipt, and what follows."""
    page = f"/jobs/{PLACE}/tiny"
    assert "No jobs yet" in visitor.get("/jobs")
    submit("tiny", "--nnodes", "2", "--save-steps", "2", program=("--epochs", "40", "--step-ms", "250"))
    visitor.wait("/jobs", lambda jobs: [job["name"] for job in jobs] == ["tiny"])
    visitor.wait(page, trains_at(4))
    visitor.wait(page, lambda job: job["safe_step"] is not None)
    text = visitor.get(page)
    assert re.search("Trains: step [0-9]+", text)
    for pod in team.get("pods")["items"]:
        assert pod["metadata"]["name"] in text
        assert pod["spec"]["nodeName"] in text
    assert "save-steps" in text
    visitor.wait(f"{page}/metrics", lambda found: len(found["metrics"].get("loss", ())) >= 2)
    assert {line["source"] for line in visitor.document(f"{page}/logs")} == {"node 0", "node 1"}
    assert {line["source"] for line in visitor.document(f"{page}/logs", "rank=1")} == {"node 1"}
    assert any(event["event"] == "Started" for event in visitor.document(f"{page}/events"))

    checkpoints = f"{page}/checkpoints"
    assert "can be read only in the cluster" in visitor.get(checkpoints)
    read = visitor.act(checkpoints, f"{checkpoints}/read")
    names = [one["name"] for one in read["result"]["checkpoints"]]
    assert names
    assert all(name.startswith("checkpoint-") for name in names)
    assert names[0] in visitor.get(checkpoints)

    before = visitor.document(f"{page}/suspend")
    assert before["is_possible"]
    assert before["safe_step"] is not None
    done = visitor.act(f"{page}/suspend", f"{page}/suspend")
    receipt = done["result"]["receipt"]
    assert receipt["checkpoint"] == f"pvc://{CLAIM}/tiny/checkpoint-{receipt['step']}"
    assert (team.folder / "tiny" / f"checkpoint-{receipt['step']}" / "safepoint-manifest.json").exists()
    visitor.wait_for_text(f"{page}/logs", "has no pods now")  # pods that end are there for some seconds
    assert f"step {receipt['step']:,} is saved" in visitor.get(page)
    [room] = visitor.document("/storage")
    assert room["location"] == f"pvc://{CLAIM}/tiny"
    assert [cost["job"] for cost in visitor.document("/costs")] == ["tiny"]

    scaled = visitor.act(f"{page}/scale", f"{page}/scale", nnodes="1")
    assert scaled["result"]["num_nodes"] == 1
    visitor.act(f"{page}/resume", f"{page}/resume")
    resumed = visitor.wait(page, trains_at(receipt["step"] + 2), 240)
    assert resumed["num_nodes"] == 1
    visitor.act(f"{page}/delete", f"{page}/delete", checkpoints="on", name="tiny")
    assert "No jobs yet" in visitor.get("/jobs")
    assert not list((team.folder / "tiny").glob("checkpoint-*"))
    assert team.left_at_last() == []


@pytest.mark.timeout(400)
def test_a_job_that_waits_in_a_queue(team: Workspace, visitor: Visitor) -> None:
    """Its queue, its priority and why it waits are in the list and on its page."""
    apply(team.cluster, queue_objects(team.namespace, cpu="1"))
    queue = ("--queue", QUEUE, "--cpu", "1", "--memory", "1Gi", "--priority-class")
    submit("first", *queue, "high", program=("--epochs", "40", "--step-ms", "250"))
    visitor.wait(f"/jobs/{PLACE}/first", lambda job: job["state"] in {"Starting", "Running"})
    submit("second", *queue, "low")
    visitor.wait(f"/jobs/{PLACE}/second", lambda job: job["state"] == "Queued" and job["queue_place"] == 1)
    text = visitor.get("/jobs")
    assert f"queue {QUEUE}" in text
    assert "priority low" in text
    assert "number 1 in the queue" in visitor.get(f"/jobs/{PLACE}/second")
    for name in ("second", "first"):
        visitor.act(f"/jobs/{PLACE}/{name}/delete", f"/jobs/{PLACE}/{name}/delete")
    assert team.left_at_last() == []
