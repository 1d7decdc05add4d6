"""Restricted clusters: a job's life without root, home, token, capability, host path, or obstore."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_life import ON, TRAIN, submit, trains_at, wait
from tests.support.cluster.workspace import QUEUE, Workspace, apply, queue_objects, restrict
from tests.support.commands import safepoint
from tests.support.jobs import TINY
from tests.support.moto_server import moto_server
from tests.support.patience import PATIENCE

IN_QUEUE = ("--queue", QUEUE, "--memory", "1Gi")


def live(team: Workspace, name: str, trains: Callable[[dict[str, Any]], bool] | None = None) -> None:
    """Suspend the job when it trains, with a receipt, resume it, and let it complete."""
    wait(team, name, trains or trains_at(4))
    pod = team.get("pods")["items"][0]
    container = pod["spec"]["containers"][0]
    assert pod["spec"]["securityContext"]["runAsUser"] == 1000660000
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    done = safepoint("suspend", *ON, team.namespace, "--json", name)
    assert done.code == 0, done.stderr
    assert done.document["was_saved"] is True
    assert done.document["safe_step"] > 0
    assert safepoint("resume", *ON, team.namespace, name).code == 0
    wait(team, name, lambda job: job["state"] == "Complete", 240)
    assert safepoint("delete", *ON, team.namespace, name).code == 0
    assert team.left_at_last() == []


@pytest.mark.timeout(400)
def test_a_life_on_a_claim(team: Workspace) -> None:
    restrict(team)
    submit(team, "tiny", "--nnodes", "2")
    live(team, "tiny")
    assert (team.folder / "tiny" / "checkpoint-32" / "safepoint-manifest.json").exists()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_life_in_a_queue(team: Workspace) -> None:
    restrict(team)
    apply(team.cluster, queue_objects(team.namespace, cpu="2"))
    submit(team, "tiny", "--nnodes", "2", *IN_QUEUE)
    live(team, "tiny")
    assert (team.folder / "tiny" / "checkpoint-32" / "safepoint-manifest.json").exists()


@pytest.mark.timeout(400)
def test_a_life_on_s3(team: Workspace, tmp_path: Path) -> None:
    """The pods have no obstore."""
    restrict(team)
    with moto_server(tmp_path, team.cluster.host) as moto:
        secret = {"apiVersion": "v1", "kind": "Secret", "stringData": moto.variables}
        apply(team.cluster, [{**secret, "metadata": {"name": "models", "namespace": team.namespace}}])
        done = safepoint(
            *("submit", *ON, team.namespace, "--name", "tiny", "--nnodes", "2", "--code", str(TINY.parent)),
            *("--output-dir", str(moto.location("run")), "--connection", "models"),
            *("tiny.py", "--out", "/tmp/out", *TRAIN),
        )
        assert done.code == 0, done.stderr
        wait(team, "tiny", trains_at(4))
        done = safepoint("suspend", *ON, team.namespace, "--json", "tiny")
        assert done.code == 0, done.stderr
        step = done.document["safe_step"]
        assert f"checkpoint-{step}/safepoint-manifest.json" in [item.key for item in moto.store("run").list()]
        assert safepoint("resume", *ON, team.namespace, "tiny").code == 0
        wait(team, "tiny", lambda job: job["state"] == "Complete", 240)
        assert "checkpoint-32/safepoint-manifest.json" in [item.key for item in moto.store("run").list()]


@pytest.mark.timeout(200)
def test_no_folder_for_temporary_files(team: Workspace) -> None:
    """One message in the pod's log, and no traceback."""
    restrict(team, with_tmp=False)
    submit(team, "tiny")
    deadline_s = time.monotonic() + 90 * PATIENCE
    while "emptyDir at /tmp" not in (said := safepoint("logs", *ON, team.namespace, "tiny").stdout):
        assert time.monotonic() < deadline_s, said
        time.sleep(1)
    # The kubelet says so of a container that it has removed meanwhile.
    lines = [line for line in said.splitlines() if not line.startswith("unable to retrieve container logs")]
    assert said.count("no folder for temporary files can be written") == len(lines), said
    assert safepoint("delete", *ON, team.namespace, "tiny").code == 0
