"""A cluster with two nodes: the pods of a drained node go on on the other one, and nothing is lost."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.test_faults import TRIALS, Fault, assert_costs_nothing, last_pod
from tests.support.cluster import faults
from tests.support.cluster.figures import Figures
from tests.support.cluster.running import RunningCluster, own_cluster
from tests.support.cluster.workspace import Workspace, workspace
from tests.support.patience import PATIENCE

pytestmark = [pytest.mark.long, pytest.mark.timeout((600 if TRIALS == 1 else 1800) * PATIENCE)]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[RunningCluster]:
    """A cluster of its own."""
    with own_cluster(num_nodes=2) as cluster:
        yield cluster


@pytest.fixture
def wide_team(two_nodes: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """A namespace of it."""
    monkeypatch.setenv("KUBECONFIG", str(two_nodes.kubeconfig))
    with workspace(two_nodes, tmp_path) as team:
        yield team


def _nodes(team: Workspace, jobs: Sequence[str]) -> dict[str, str]:
    """The node of each pod of the jobs."""
    pods = team.get("pods", "", "-l", f"jobset.sigs.k8s.io/jobset-name in ({','.join(jobs)})")["items"]
    return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in pods}


def _drain(team: Workspace, jobs: Sequence[str]) -> float:
    """Drain the node of each job's last pod, until all pods are on the other one."""
    before = _nodes(team, jobs)
    node = before[last_pod(team, jobs[0])]
    with faults.drained(team, jobs, node):
        goes_on = time.time()
        deadline_s = time.monotonic() + 120 * PATIENCE
        while True:
            after = _nodes(team, jobs)
            if len(after) == len(before) and all(after.values()):
                break
            assert time.monotonic() < deadline_s, after
            time.sleep(0.5)
    assert node not in after.values()
    return goes_on


def test_a_drained_node(wide_team: Workspace, undisturbed: Callable[[int, int], Path], figures: Figures) -> None:
    """The scheduler gives the pods of a job with a memory limit a node each; after the first drain they share one."""
    fault = Fault(strike=_drain, options=("--memory", "1Gi"), most_strikes=2)
    assert_costs_nothing("drained, two nodes", fault, wide_team, undisturbed, figures)
    assert set(_nodes_of_cluster(wide_team)) == {"node-a", "node-b"}


def _nodes_of_cluster(team: Workspace) -> list[str]:
    return [node["metadata"]["name"] for node in team.get("nodes")["items"]]
