"""The cluster of the tests: one that this machine starts and ends without a trace, or one that runs elsewhere."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import programs
from tests.support.patience import PATIENCE

EXISTING = "SAFEPOINT_TEST_CLUSTER"
"""The variable with the context of a cluster that runs already."""
_READY_WITHIN_S = 240
_CPU_SHARES = 8 * 1024
"""As much as eight processes that are in no group."""
_COUNT = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParts:
    """What tests can reach of a cluster only because this machine has started it.

    Args:
        folder: its files; `logs` holds the output of its programs.
        host: the address at which pods reach this machine.
        process: the id of its first process on this machine.
    """

    folder: Path
    host: str
    process: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """A running cluster. What only a cluster of this machine has skips the test on another one, with the reason.

    Args:
        kubeconfig: of an administrator, with one context, `test`; works on this machine.
        kubectl_program: the path of kubectl.
        parts: None for a cluster that this machine has not started.
    """

    kubeconfig: Path
    kubectl_program: str
    parts: LocalParts | None = None

    def local(self, why: str) -> LocalParts:
        """The parts of a cluster of this machine. On another cluster, skip the test.

        Args:
            why: what the test does with them.
        """
        if self.parts is None:
            pytest.skip(f"{why}, and {EXISTING} names a cluster that this machine has not started")
        return self.parts

    @property
    def folder(self) -> Path:
        """The files of the cluster."""
        return self.local("it uses files of the cluster's programs").folder

    @property
    def host(self) -> str:
        """The address at which pods reach this machine."""
        return self.local("the pods connect to this machine").host

    @property
    def has_queues(self) -> bool:
        """Whether it has Kueue."""
        if self.parts is None:
            return "kueue.x-k8s.io" in self.kubectl("api-versions")
        return "kueue" in json.loads((self.parts.folder / "plan.json").read_text())["addons"]

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """Run kubectl, and return what it prints.

        Raises:
            RuntimeError: it failed, with what it said.
        """
        command = [self.kubectl_program, "--kubeconfig", str(self.kubeconfig), *words]
        done = subprocess.run(command, input=stdin, text=True, check=False, capture_output=True)
        if done.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(words)}: {done.stderr.strip()[-1500:]}")
        return done.stdout

    def inside(self, *words: str) -> list[str]:
        """The command that runs `words` in the cluster's namespaces."""
        process = self.local("it stops programs of the cluster").process
        return ["nsenter", "--target", str(process), "--mount", "--net", "--pid", *words]


def at(folder: Path) -> RunningCluster:
    """The cluster whose files are in `folder`."""
    address = str(json.loads((folder / "plan.json").read_text())["address"])
    return RunningCluster(
        kubeconfig=folder / "admin.kubeconfig",
        kubectl_program=str(programs.folder() / "kubectl"),
        parts=LocalParts(
            folder=folder,
            host=f"{address.rpartition('.')[0]}.1",
            process=int((folder / "process").read_text()),
        ),
    )


@contextlib.contextmanager
def existing_cluster(context: str) -> Generator[RunningCluster]:
    """A cluster that runs already: the context of the user's kubeconfig.

    If the kubeconfig is that of `python -m tests.support.cluster up`, the cluster has its local parts.

    Raises:
        RuntimeError: there is no kubectl, or no such context.
    """
    beside = Path(os.environ.get("KUBECONFIG", "")).parent
    if (beside / "plan.json").exists() and (beside / "process").exists():
        yield at(beside)
        return
    built = programs.folder() / "kubectl"
    kubectl = shutil.which("kubectl") or (str(built) if built.exists() else None)
    if kubectl is None:
        raise RuntimeError(f"{EXISTING} is set, and there is no kubectl in PATH")
    command = [kubectl, "config", "view", "--raw", "--minify", "--flatten", f"--context={context}", "-o", "json"]
    shown = subprocess.run(command, text=True, check=False, capture_output=True)
    if shown.returncode != 0:
        raise RuntimeError(f"{EXISTING}={context}: {shown.stderr.strip()[-1500:]}")
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
        kubeconfig = Path(folder) / "kubeconfig"
        kubeconfig.touch(mode=0o600)
        kubeconfig.write_text(json.dumps(_renamed(json.loads(shown.stdout))))
        yield RunningCluster(kubeconfig=kubeconfig, kubectl_program=kubectl)


def _renamed(document: dict[str, Any]) -> dict[str, Any]:
    """The kubeconfig with one context, whose parts are all named `test`, as those of a cluster of this machine."""
    [cluster], [context] = document["clusters"], document["contexts"]
    user = next((one["user"] for one in document.get("users") or []), {})
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": cluster["cluster"]}],
        "users": [{"name": "test", "user": user}],
        "contexts": [{"name": "test", "context": {**context["context"], "cluster": "test", "user": "test"}}],
    }


@contextlib.contextmanager
def chosen_cluster() -> Generator[RunningCluster]:
    """The cluster that SAFEPOINT_TEST_CLUSTER names, else one that is started here, with all addons.

    Without the programs for it, the test is skipped.
    """
    context = os.environ.get(EXISTING)
    if context:
        with existing_cluster(context) as cluster:
            yield cluster
    else:
        with own_cluster() as cluster:
            yield cluster


@contextlib.contextmanager
def own_cluster(addons: dict[str, str] | None = None, *, num_nodes: int = 1) -> Generator[RunningCluster]:
    """A cluster for some tests only, see `running_cluster`; skips them if it cannot be started, or if another one is
    to be used."""
    if os.environ.get(EXISTING) and (addons is not None or num_nodes > 1):
        pytest.skip(f"it starts a cluster of its own, and {EXISTING} names another one")
    if reason := programs.unavailable():
        pytest.skip(f"no cluster: {reason}")
    with running_cluster(addons, num_nodes=num_nodes) as cluster:
        yield cluster


@contextlib.contextmanager
def running_cluster(addons: dict[str, str] | None = None, *, num_nodes: int = 1) -> Generator[RunningCluster]:
    """A cluster with one node or two, and with addons by name and release: JobSet, Trainer and Kueue by default.

    Raises:
        RuntimeError: it did not start, with the end of its output.
    """
    unique = uuid.uuid4().hex[:6]
    folder = Path(tempfile.mkdtemp(prefix=f"cluster-{unique}-"))
    cgroup = f"/safepoint-{unique}"
    cable, inner, network = f"sp{unique}h", f"sp{unique}c", f"10.88.{(os.getpid() + next(_COUNT)) % 250}"
    plan = {
        "address": f"{network}.2",
        "cgroup": cgroup,
        "nodes": num_nodes,
        "addons": dict(item.name.split("-") for item in programs.ADDONS) if addons is None else addons,
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    first = None
    try:
        for place in controllers():
            (place / cgroup.strip("/")).mkdir(exist_ok=True)
            shares = place / cgroup.strip("/") / "cpu.shares"
            if shares.exists():  # otherwise all pods together would get as much time as one process of this machine
                shares.write_text(str(_CPU_SHARES))
        with (folder / "log").open("wb") as log:
            first = subprocess.Popen(
                [
                    *("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *(sys.executable, "-m", "tests.support.cluster.inside", str(folder)),
                ],
                cwd=Path(__file__).parents[3],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        inside = _child_of(first.pid)
        (folder / "process").write_text(str(inside))
        _ip("link", "add", cable, "type", "veth", "peer", "name", inner, "netns", str(inside))
        _ip("address", "add", f"{network}.1/30", "dev", cable)
        _ip("link", "set", cable, "up")
        enter = ["nsenter", "--target", str(inside), "--net", "ip"]
        for words in (
            ("address", "add", f"{network}.2/30", "dev", inner),
            ("link", "set", inner, "up"),
            ("route", "add", "default", "via", f"{network}.1"),
        ):
            subprocess.run([*enter, *words], check=True, capture_output=True)
        deadline_s = time.monotonic() + _READY_WITHIN_S * PATIENCE
        while not (folder / "ready").exists():
            if first.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the cluster did not start:\n{(folder / 'log').read_text()[-3000:]}")
            time.sleep(0.1)
        yield at(folder)
    finally:
        if first is not None:
            first.kill()  # its child, the first process of the namespace, is killed with it; then all others are
            first.wait()
        subprocess.run(["ip", "link", "del", cable], check=False, capture_output=True)
        for place in controllers():
            _remove_cgroup(place / cgroup.strip("/"))
        shutil.rmtree(folder, ignore_errors=True)


def _child_of(process: int) -> int:
    """The first process of the namespace, as this machine numbers it."""
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.02)
    raise RuntimeError("unshare started no process")


def controllers() -> list[Path]:
    """The roots of the machine's cgroup hierarchies."""
    return [Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines() if " cgroup" in line]


def _remove_cgroup(place: Path) -> None:
    """Remove a cgroup and all below it; its processes end at any moment."""
    deadline_s = time.monotonic() + 10
    while place.exists() and time.monotonic() < deadline_s:
        for folder, _, _ in os.walk(place, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        if place.exists():
            time.sleep(0.1)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
