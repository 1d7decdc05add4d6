"""Tests of a cluster that runs already and is used by tests/cluster; kubectl is a script that notes its arguments."""

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.faults import restart
from tests.support.cluster.running import EXISTING, RunningCluster, chosen_cluster, own_cluster
from tests.support.cluster.workspace import CLAIM, RUNTIME, Workspace, apply, queue_objects, workspace

KUBECTL = """#!/bin/sh
echo "$@" >> "{calls}"
case "$*" in
  *--context=kind-test*) cat "{config}" ;;
  *--context=*) echo "error: context was not found" >&2; exit 1 ;;
  *"get clustertrainingruntime"*) cat "{runtime}" ;;
  *apply*) cat > "{applied}/$$.json" ;;
esac
"""
CONFIG = {
    "current-context": "kind-test",
    "clusters": [{"name": "kind", "cluster": {"server": "https://127.0.0.1:1"}}],
    "users": [{"name": "kind-admin", "user": {"token": "t"}}],
    "contexts": [{"name": "kind-test", "context": {"cluster": "kind", "user": "kind-admin"}}],
}
_POD = {"spec": {"containers": [{"image": "registry/torch:2"}]}}
_JOB = {"name": "node", "template": {"spec": {"template": _POD}}}
CLUSTER_RUNTIME = {"spec": {"template": {"spec": {"replicatedJobs": [_JOB]}}}}


class Machine:
    """A machine with a kubectl and a kubeconfig.

    Args:
        folder: for its files.
    """

    def __init__(self, folder: Path) -> None:
        self.calls, self.applied = folder / "calls", folder / "applied"
        self.applied.mkdir()
        config, runtime = folder / "config.json", folder / "runtime.json"
        config.write_text(json.dumps(CONFIG))
        runtime.write_text(json.dumps(CLUSTER_RUNTIME))
        (folder / "bin").mkdir()
        kubectl = folder / "bin" / "kubectl"
        kubectl.write_text(KUBECTL.format(calls=self.calls, config=config, runtime=runtime, applied=self.applied))
        kubectl.chmod(0o755)

    @property
    def objects(self) -> dict[str, Any]:
        """What was applied, by kind."""
        documents = [json.loads(path.read_text()) for path in self.applied.iterdir()]
        return {item["kind"]: item for document in documents for item in document["items"]}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(EXISTING, "kind-test")
    for name in ("KUBECONFIG", "SAFEPOINT_TEST_IMAGE", "SAFEPOINT_TEST_STORAGE_CLASS"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.fixture
def cluster(machine: Machine) -> Iterator[RunningCluster]:
    with chosen_cluster() as found:
        yield found


def test_the_kubeconfig_has_the_context_alone(cluster: RunningCluster) -> None:
    """Under the name that the tests use. It contains a token."""
    document = json.loads(cluster.kubeconfig.read_text())
    assert document["current-context"] == "test"
    assert document["contexts"] == [{"name": "test", "context": {"cluster": "test", "user": "test"}}]
    assert document["users"] == [{"name": "test", "user": {"token": "t"}}]
    assert stat.S_IMODE(cluster.kubeconfig.stat().st_mode) == 0o600


def test_a_context_that_does_not_exist_is_an_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a typing error would start a cluster, or skip all tests."""
    monkeypatch.setenv(EXISTING, "knd-test")
    with pytest.raises(RuntimeError, match="knd-test: error: context was not found"), chosen_cluster():
        pass


def test_a_workspace_makes_only_a_namespace_and_what_is_in_it(
    cluster: RunningCluster, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster's own runtime and its volumes stay as they are."""
    monkeypatch.setenv("SAFEPOINT_TEST_STORAGE_CLASS", "shared")
    with workspace(cluster, tmp_path / "work") as team:
        found = machine.objects
        assert set(found) == {"Namespace", "TrainingRuntime", "PersistentVolumeClaim"}
        runtime, claim = found["TrainingRuntime"], found["PersistentVolumeClaim"]
        assert (runtime["metadata"]["name"], runtime["metadata"]["namespace"]) == (RUNTIME, team.namespace)
        pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        [node] = pod["containers"]
        assert node["image"] == "registry/torch:2"
        assert "volumes" not in pod
        assert "PATH" not in {one["name"] for one in node["env"]}
        assert (claim["metadata"]["name"], claim["spec"]["storageClassName"]) == (CLAIM, "shared")
    assert f"delete namespace {team.namespace}" in machine.calls.read_text()
    assert " delete pv " not in machine.calls.read_text()


def test_the_image_can_be_chosen(
    cluster: RunningCluster, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAFEPOINT_TEST_IMAGE", "registry/mine:1")
    with workspace(cluster, tmp_path / "work"):
        assert "registry/mine:1" in json.dumps(machine.objects["TrainingRuntime"])
    assert "get clustertrainingruntime" not in machine.calls.read_text()


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (lambda team: team.folder, "it reads or writes the claim as a folder of this machine"),
        (lambda team: team.cluster.host, "the pods connect to this machine"),
        (lambda team: team.cluster.folder, "it uses files of the cluster's programs"),
        (lambda team: restart(team.cluster, "kubelet", 0.0), "it stops programs of the cluster"),
        (
            lambda team: apply(team.cluster, queue_objects(team.namespace, cpu="1")),
            r"it makes objects of the whole cluster \(ClusterQueue, ResourceFlavor, WorkloadPriorityClass\)",
        ),
        (lambda team: own_cluster(num_nodes=2).__enter__(), "it starts a cluster of its own"),
    ],
    ids=["claim", "host", "files", "programs", "objects", "second"],
)
def test_a_case_that_needs_a_cluster_of_this_machine_is_skipped_with_the_reason(
    use: Callable[[Workspace], object], why: str, cluster: RunningCluster, machine: Machine
) -> None:
    """Before it has changed anything of the cluster."""
    before = machine.calls.read_text()
    with pytest.raises(pytest.skip.Exception, match=f"{why}, and {EXISTING} names"):
        use(Workspace(cluster=cluster, namespace="team", claim_folder=None))
    assert machine.calls.read_text() == before


def test_the_cluster_of_up_has_its_local_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kubeconfig lies beside its other files."""
    (tmp_path / "plan.json").write_text(json.dumps({"address": "10.88.0.2", "addons": {"kueue": "0.19.2"}}))
    (tmp_path / "process").write_text("1")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "admin.kubeconfig"))
    monkeypatch.setenv(EXISTING, "test")
    with chosen_cluster() as found:
        assert (found.folder, found.host, found.has_queues) == (tmp_path, "10.88.0.1", True)
