"""Older releases of Kubeflow Trainer, each on a cluster of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_life import ON, submit, wait
from tests.cluster.test_restricted import IN_QUEUE, live
from tests.support.cluster import programs
from tests.support.cluster.running import RunningCluster, own_cluster
from tests.support.cluster.workspace import QUEUE, Workspace, apply, queue_objects, restrict, workspace
from tests.support.commands import safepoint
from tests.support.jobs import TINY
from tests.support.patience import PATIENCE

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=programs.OLDER)
def old_cluster(request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    """A cluster with an older Trainer."""
    if programs.missing(with_older=True):
        pytest.skip("`python -m tests.support.cluster build older` builds the older Trainers")
    with own_cluster(programs.OLDER[request.param]) as cluster:
        yield cluster


@pytest.fixture
def old_team(old_cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """A namespace of it."""
    monkeypatch.setenv("KUBECONFIG", str(old_cluster.kubeconfig))
    with workspace(old_cluster, tmp_path) as team:
        yield team


def trains(team: Workspace) -> bool:
    """Whether the training has begun; Trainer 2.1 has no status server that would say so."""
    marks = team.folder / "tiny" / "marks-0"
    return marks.exists() and "train 4" in marks.read_text()


def test_a_life(old_team: Workspace, request: pytest.FixtureRequest) -> None:
    """Two pods with a grace period of their own are suspended, resumed and complete."""
    release = request.node.callspec.params["old_cluster"]
    program = ("--code", str(TINY.parent), "tiny.py")
    asked = ("--name", "tiny", "--nnodes", "2", "--grace", "45", "--output-dir", "pvc://checkpoints/tiny")
    shown = safepoint("submit", *ON, old_team.namespace, *asked, "--dry-run", "-o", "json", *program)
    assert shown.code == 0, shown.stderr
    field = "podTemplateOverrides" if release == "2.1" else "runtimePatches"
    assert shown.document["items"][-1]["spec"][field], shown.document["items"][-1]
    assert old_team.left() == []
    submit(old_team, "tiny", "--nnodes", "2", "--grace", "45")
    wait(old_team, "tiny", lambda job: job["state"] == "Running" and trains(old_team))
    pods = old_team.get("pods")["items"]
    assert {pod["spec"]["terminationGracePeriodSeconds"] for pod in pods} == {45}
    done = safepoint("suspend", *ON, old_team.namespace, "--json", "tiny")
    assert done.code == 0, done.stderr
    assert safepoint("resume", *ON, old_team.namespace, "tiny").code == 0
    wait(old_team, "tiny", lambda job: job["state"] == "Complete", 240)
    assert safepoint("delete", *ON, old_team.namespace, "tiny").code == 0
    assert old_team.left_at_last() == []  # JobSet 0.10 starts pods once more while it is deleted


def test_a_queue(old_team: Workspace, request: pytest.FixtureRequest) -> None:
    """With Trainer 2.1 Kueue would remove the volumes, so a job of a queue is refused; later ones run it."""
    queue = ("--queue", QUEUE, "--cpu", "1", "--memory", "1Gi")
    apply(old_team.cluster, queue_objects(old_team.namespace, cpu="1"))
    if request.node.callspec.params["old_cluster"] == "2.1":
        words = ("--name", "queued", "--code", str(TINY.parent), *queue, "tiny.py")
        refused = safepoint("submit", *ON, old_team.namespace, *words)
        assert refused.code == 2
        assert "the cluster has Kubeflow Trainer 2.1, and Kueue would remove the volumes" in refused.stderr
        assert old_team.left() == []
        return
    submit(old_team, "queued", *queue)
    wait(old_team, "queued", lambda job: job["state"] == "Complete", 240)


@pytest.mark.parametrize("options", [(), IN_QUEUE], ids=["without", "queue"])
def test_a_restricted_life(options: tuple[str, ...], old_team: Workspace, request: pytest.FixtureRequest) -> None:
    """As an arbitrary user on a read-only root file system, with Kueue and without it."""
    if options and request.node.callspec.params["old_cluster"] == "2.1":
        pytest.skip("see test_a_queue")
    restrict(old_team)
    if options:
        apply(old_team.cluster, queue_objects(old_team.namespace, cpu="2"))
    submit(old_team, "tiny", "--nnodes", "2", *options)
    live(old_team, "tiny", lambda job: job["state"] == "Running" and trains(old_team))


def test_the_safe_point_of_a_job_that_another_program_suspends(
    old_team: Workspace, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Trainer 2.1 has no status server: an open `watch` sees the message of the pod, and keeps the step."""
    if request.node.callspec.params["old_cluster"] != "2.1":
        pytest.skip("its pods post the step")
    submit(old_team, "tiny")
    wait(old_team, "tiny", lambda job: job["state"] == "Running" and trains(old_team))
    command = [sys.executable, "-P", "-m", "safepoint.cli.main", "watch", "tiny", "--json", *ON, old_team.namespace]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
    output = tmp_path / "output"
    with output.open("w") as stream:
        watcher = subprocess.Popen(command, env=environ, stdout=stream, stdin=subprocess.DEVNULL)
    try:
        wait(old_team, "tiny", lambda _: bool(output.read_text()))
        old_team.kubectl("patch", "trainjob", "tiny", "--type=merge", "-p", '{"spec":{"suspend":true}}')
        assert watcher.wait(100 * PATIENCE) == 0
    finally:
        watcher.kill()
        watcher.wait()
    [*_, saved] = old_team.steps("tiny")
    assert json.loads(output.read_text().splitlines()[-1])["safe_step"] == saved
    found = wait(old_team, "tiny", lambda job: job["state"] == "Suspended")
    assert found["safe_step"] == saved
