"""Why a job does not start, by `status` and `list`; and the output of all nodes, also while the kubelet is away."""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.test_life import ON, status, submit, trains_at, wait
from tests.support import jobs
from tests.support.cluster.faults import restart
from tests.support.cluster.workspace import QUEUE, RUNTIME, Workspace, apply, queue_objects, runtime
from tests.support.commands import safepoint
from tests.support.patience import PATIENCE

_AWAY_S = 20.0


def _use_up_pods(team: Workspace) -> None:
    name = {"name": "none", "namespace": team.namespace}
    apply(
        team.cluster,
        [{"apiVersion": "v1", "kind": "ResourceQuota", "metadata": name, "spec": {"hard": {"pods": "0"}}}],
    )
    deadline_s = time.monotonic() + 30
    while not team.get("resourcequota", "none").get("status"):
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


def _refuse_host_paths(team: Workspace) -> None:
    team.cluster.kubectl("label", "namespace", team.namespace, "pod-security.kubernetes.io/enforce=restricted")


def _own_runtime(team: Workspace) -> tuple[dict[str, Any], Any]:
    """A runtime of the namespace, and the template of its Job."""
    document: dict[str, Any] = {**runtime(), "kind": "TrainingRuntime"}
    document["metadata"] = {**document["metadata"], "namespace": team.namespace}
    return document, document["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]


def _mount_nothing(team: Workspace) -> None:
    document, job = _own_runtime(team)
    pod = job["template"]["spec"]
    pod["volumes"].append({"name": "missing", "secret": {"secretName": "missing"}})
    pod["containers"][0]["volumeMounts"].append({"name": "missing", "mountPath": "/missing"})
    apply(team.cluster, [document])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (_use_up_pods, ("Error creating: pods", "exceeded quota")),
        (_refuse_host_paths, ("Error creating: pods", "violates PodSecurity")),
        (_mount_nothing, ("waits for a volume (since ", 'secret "missing" not found')),
    ],
    ids=["quota", "policy", "secret"],
)
def test_a_job_that_cannot_start_is_named(
    prepare: Callable[[Workspace], None], words: tuple[str, ...], team: Workspace
) -> None:
    prepare(team)
    submit(team, "tiny", "--runtime", RUNTIME)
    begun_s = time.monotonic()
    found = wait(team, "tiny", lambda job: job["state"] == "Inadmissible", 30)
    print(f"{time.monotonic() - begun_s:.1f} s: {found['message']}")
    assert all(word in found["message"] for word in words), found["message"]
    listed = safepoint("list", *ON, team.namespace)
    assert words[0] in listed.stdout, listed.stdout
    assert safepoint("delete", *ON, team.namespace, "tiny").code == 0
    # The error of an earlier job of the same name does not count.
    team.kubectl("delete", "resourcequota", "--all")
    if prepare is _use_up_pods:
        submit(team, "tiny", "--runtime", RUNTIME)
        assert "quota" not in status(team, "tiny")["message"]
        assert safepoint("delete", *ON, team.namespace, "tiny").code == 0


@pytest.mark.timeout(300)
def test_the_place_in_the_queue(team: Workspace) -> None:
    """Kueue's visibility server knows it. The first job takes the whole quota."""
    apply(team.cluster, queue_objects(team.namespace, cpu="1"))
    for name in ("one", "two", "three"):
        submit(team, name, "--queue", QUEUE, "--cpu", "1", "--memory", "1Gi")
        if name == "one":
            wait(team, name, lambda job: job["state"] != "Queued", 60)
    found = wait(team, "three", lambda job: job["queue_place"] is not None, 60)
    assert (found["state"], found["queue_place"]) == ("Queued", 2)
    assert status(team, "two")["queue_place"] == 1
    assert status(team, "one")["queue_place"] is None
    shown = safepoint("status", *ON, team.namespace, "three")
    assert "position    number 2 of the jobs that wait in the queue" in shown.stdout
    for name in ("three", "two", "one"):
        assert safepoint("delete", *ON, team.namespace, name).code == 0


@pytest.mark.timeout(300)
def test_the_last_lines_of_a_job_that_has_failed(team: Workspace) -> None:
    document, job = _own_runtime(team)
    job["backoffLimit"] = 0
    job["template"]["spec"]["restartPolicy"] = "Never"
    apply(team.cluster, [document])
    submit(team, "tiny", "--max-restarts", "0", program=("--no-such-option",))
    deadline_s = time.monotonic() + 120 * PATIENCE
    while (found := status(team, "tiny"))["state"] != "Failed":
        assert time.monotonic() < deadline_s, found
        time.sleep(1)
    assert any("unrecognized arguments: --no-such-option" in line for line in found["last_lines"]), found
    shown = safepoint("status", *ON, team.namespace, "tiny").stdout
    assert "last lines of the output" in shown
    assert "unrecognized arguments: --no-such-option" in shown
    assert safepoint("delete", *ON, team.namespace, "tiny").code == 0


@pytest.mark.timeout(600)
def test_the_output_of_all_nodes_is_followed_while_the_kubelet_is_away(team: Workspace) -> None:
    """No line is missing and none comes twice, although all streams end when the kubelet does."""
    submit(team, "tiny", "--nnodes", "2", program=("--epochs", "4", "--step-ms", "1500"))
    wait(team, "tiny", trains_at(2))
    program = [sys.executable, "-P", "-m", "safepoint.cli.main", "logs", *ON, team.namespace, "-f", "tiny"]
    following = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(3)  # the streams are open
    restart(team.cluster, "kubelet", _AWAY_S)
    wait(team, "tiny", lambda job: job["state"] == "Complete", 300)
    output, errors = following.communicate(timeout=120)
    assert following.returncode == 0, errors
    assert "Traceback" not in errors
    expected = safepoint("logs", *ON, team.namespace, "tiny")
    lines = expected.stdout.rstrip("\n").split("\n")
    # The carriage returns of a bar became ends of lines when the output of the process was read.
    assert sorted(output.splitlines()) == sorted(expected.stdout.splitlines())
    assert {line.partition(" | ")[0] for line in lines} == {"node 0", "node 1"}
    assert jobs.read_events(team.folder / "tiny", "resumed") == []
    one = safepoint("logs", *ON, team.namespace, "--rank", "1", "tiny")
    of_node = [line.partition(" | ")[2] for line in lines if line.startswith("node 1")]
    assert one.stdout.rstrip("\n").split("\n") == of_node
    assert safepoint("delete", *ON, team.namespace, "tiny").code == 0
