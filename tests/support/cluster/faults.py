"""Faults of a cluster, as they really happen: processes killed, memory used up, a node drained, a service stopped."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from tests.support.cluster.node import NODES
from tests.support.cluster.running import RunningCluster, controllers
from tests.support.cluster.workspace import Workspace
from tests.support.patience import PATIENCE

_EXHAUST = """
import os, sys, time
group, victim, held = sys.argv[1], sys.argv[2], []
open(group, "w").write(str(os.getpid()))
while os.path.exists(f"/proc/{victim}"):
    held.append(b"x" * (8 << 20))
    time.sleep(0.005)
"""


def restart(cluster: RunningCluster, program: str, pause_s: float) -> None:
    """Kill a program of the cluster with SIGKILL, and start it again after a while.

    Args:
        cluster: the cluster.
        program: `api_server` or `kubelet`.
        pause_s: the seconds without it.
    """
    pattern = {"api_server": "kube-apiserver --etcd-servers", "kubelet": "/kubelet --config"}[program]
    listed = subprocess.run(cluster.inside("pgrep", "-f", pattern), check=True, capture_output=True, text=True)
    subprocess.run(cluster.inside("kill", "-9", *listed.stdout.split()), check=True)
    time.sleep(pause_s)
    start = "import sys; from pathlib import Path; from tests.support.cluster.inside import Cluster; "
    of = {"api_server": "start_api_server", "kubelet": "node.start_kubelet"}[program]
    start += f"Cluster(Path(sys.argv[1])).{of}()"
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, f"{root}/src"])}
    words = cluster.inside(sys.executable, "-c", start, str(cluster.folder))
    subprocess.run(words, check=True, env=environment)


def evict(team: Workspace, pod: str) -> None:
    """Evict a pod through the API, as `kubectl drain` does."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    path = f"/api/v1/namespaces/{team.namespace}/pods/{pod}/eviction"
    team.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


@contextlib.contextmanager
def drained(team: Workspace, jobs: Sequence[str], node: str = NODES[0]) -> Generator[None]:
    """Cordon a node and evict the pods that jobs have there; the node is uncordoned when the block ends.

    The pods of Trainer, JobSet and Kueue stay, as if they ran on another node.
    """
    pods = ("--pod-selector", f"jobset.sigs.k8s.io/jobset-name in ({','.join(jobs)})")
    try:
        team.kubectl("drain", node, *pods, "--delete-emptydir-data", "--force", "--timeout=90s")
        yield
    finally:
        team.kubectl("uncordon", node)


def kill_pod(team: Workspace, pod: str) -> None:
    """Send SIGKILL to all processes of a pod, also to the one that holds its network."""
    for file in _cgroup(team, pod).rglob("cgroup.procs"):
        for process in file.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)


def exhaust_memory(team: Workspace, pod: str) -> None:
    """Use up the memory of a pod's container, until the kernel has killed the container's first process.

    A process of this machine joins the container's cgroup and takes memory up to the limit. Kubernetes lets the
    kernel kill the container's own processes before it.
    """
    status = team.get("pod", pod)["status"]["containerStatuses"][0]
    container = _cgroup(team, pod) / status["containerID"].rpartition("/")[2]
    processes = (container / "cgroup.procs").read_text().split()
    [first] = [process for process in processes if _number_inside(process) == "1"]
    command = [sys.executable, "-P", "-c", _EXHAUST, str(container / "cgroup.procs"), first]
    subprocess.run(command, check=True, timeout=60)


def _number_inside(process: str) -> str:
    """The id of a process in its own namespace."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(line.split()[-1] for line in lines if line.startswith("NSpid:"))


def _cgroup(team: Workspace, pod: str) -> Path:
    """The cgroup of a pod; the one with its memory limit where there are several hierarchies."""
    uid = team.get("pod", pod)["metadata"]["uid"]
    own = json.loads((team.cluster.folder / "plan.json").read_text())["cgroup"].strip("/")
    deadline_s = time.monotonic() + 20 * PATIENCE
    while time.monotonic() < deadline_s:
        # Other cgroups disappear while this one is searched, and then the search may miss it.
        found = [place for root in controllers() for place in (root / own).rglob(f"pod{uid}")]
        if found:
            return next((place for place in found if "memory" in place.parts), found[0])
        time.sleep(0.1)
    raise AssertionError(f"pod {pod} has no cgroup")
