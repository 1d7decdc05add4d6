"""What Safepoint costs on a real cluster, in turns with Kubeflow's own SDK: `train()`, the list of jobs, the import.

- `train()` of a function, with all of Safepoint's checks, and Kubeflow's `train()` of the same function. A queue
  without quota holds the jobs, so that no pod disturbs the measurement; each job is deleted before the next one.
- `safepoint list` with suspended TrainJobs, and Kubeflow's `list_jobs()` of the same ones.
- `from safepoint import TrainerClient`, and the same from `kubeflow.trainer`, in processes of their own. Also the
  former after the latter, in one process.

Requests are those that leave this process. Limits: one request to the API server; `kubectl get trainjobs`; Python
that does nothing.

It needs what `make test-cluster` builds. With `SAFEPOINT_TEST_CLUSTER` it uses the cluster of this context.
"""

import argparse
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from figures import print_load, print_machine, row, verdict
from kubeflow.trainer import CustomTrainer
from kubeflow.trainer import TrainerClient as KubeflowClient
from kubernetes.client.rest import RESTClientObject
from tests.support.cluster.running import chosen_cluster
from tests.support.cluster.workspace import CLAIM, QUEUE, RUNTIME, Workspace, apply, queue_objects, workspace

from safepoint import TrainerClient, TransformersTrainer
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.connection import connect_to
from safepoint.jobs.cluster.spec import ClusterSpec
from safepoint.sdk.upstream import KubernetesBackendConfig, kubernetes_options
from safepoint.settings.run_settings import RunSettings

TRAIN_GOAL_S, TRAIN_GOAL_REQUESTS = 0.3, 8
LIST_GOAL_S, LIST_GOAL_REQUESTS = 1.0, 10
IMPORT_GOAL_S = 0.05


class Requests:
    """Counts the requests of both clients in this process."""

    def __init__(self) -> None:
        self.count = 0

    def install(self) -> None:
        """Count from now on."""
        for kind, name in ((httpx2.Client, "send"), (RESTClientObject, "request")):
            setattr(kind, name, self._counted(getattr(kind, name)))

    def _counted(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*words: Any, **options: Any) -> Any:
            self.count += 1
            return send(*words, **options)

        return counted


def train(steps: int = 10) -> None:
    """Never runs: the queue has no quota."""
    print(steps)


def _config(team: Workspace) -> KubernetesBackendConfig:
    return KubernetesBackendConfig(namespace=team.namespace, config_file=str(team.cluster.kubeconfig))


def bench_train(team: Workspace, requests: Requests, rounds: int, num_nodes: int) -> None:
    """`train()` of both clients in turns."""
    ours, theirs = TrainerClient(_config(team)), KubeflowClient(_config(team))
    api = ClusterApi(connect_to(namespace=team.namespace, file=team.cluster.kubeconfig))
    common: dict[str, Any] = {"func": train, "num_nodes": num_nodes, "resources_per_node": {"cpu": 1}}
    trainers = {
        "safepoint": (ours, TransformersTrainer(output_dir=f"pvc://{CLAIM}/run", **common)),
        "kubeflow": (theirs, CustomTrainer(**common)),
    }
    took_s, counts = defaultdict[str, list[float]](list), defaultdict[str, list[int]](list)
    limit_s: list[float] = []
    for number in range(rounds + 1):
        for name, (client, trainer) in sorted(trainers.items(), reverse=number % 2 == 0):
            options = [kubernetes_options.Labels({"kueue.x-k8s.io/queue-name": QUEUE})]
            requests.count, begun_s = 0, time.perf_counter()
            job = client.train(runtime=RUNTIME, trainer=trainer, options=options)
            duration_s = time.perf_counter() - begun_s
            if number:  # the first one opens connections
                took_s[name].append(duration_s)
                counts[name].append(requests.count)
            ours.delete_job(job)
        begun_s = time.perf_counter()
        api.get("persistentvolumeclaims", CLAIM)
        limit_s.append(time.perf_counter() - begun_s)
    print_machine(f"train(), {num_nodes} nodes")
    for name in trainers:
        print(row(f"{name}, {max(counts[name])} requests", took_s[name], unit="s"))
    print(row("limit: one request", limit_s, unit="s"))
    further_s = [one - other for one, other in zip(took_s["safepoint"], took_s["kubeflow"], strict=True)]
    print(row("safepoint - kubeflow", further_s, unit="s"))
    ratios = [one / other for one, other in zip(took_s["safepoint"], took_s["kubeflow"], strict=True)]
    print(row("safepoint / kubeflow", ratios, unit=""))
    middle_s = sorted(further_s)[len(further_s) // 2]
    print(verdict("further time", value=middle_s, goal=TRAIN_GOAL_S, at_most=True, unit="s"))
    further = max(counts["safepoint"]) - min(counts["kubeflow"])
    print(verdict("further requests", value=further, goal=TRAIN_GOAL_REQUESTS, at_most=True, unit="requests"))
    print_load("after")


def fill(team: Workspace, num_jobs: int) -> None:
    """Suspended TrainJobs, as `submit` makes them."""
    settings = RunSettings(output_dir=f"pvc://{CLAIM}/run")
    with ClusterApi(connect_to(namespace=team.namespace, file=team.cluster.kubeconfig)) as api:
        spec = ClusterSpec(name="job", program=("train.py",), files={"train.py": b"print()\n"}, settings=settings)
        trainjob = ClusterJobs(api).manifests(spec).trainjob

        def create(number: int) -> None:
            metadata = {**trainjob["metadata"], "name": f"job-{number:04d}"}
            api.create("trainjobs", {**trainjob, "metadata": metadata, "spec": {**trainjob["spec"], "suspend": True}})

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(create, range(num_jobs)))
        while len(api.objects("jobsets", has_content=False)) < num_jobs:
            time.sleep(1)


def bench_list(team: Workspace, requests: Requests, rounds: int, num_jobs: int) -> None:
    """`safepoint list` as a process, and Kubeflow's `list_jobs()` in this one."""
    begun_s = time.perf_counter()
    fill(team, num_jobs)
    print(f"   {num_jobs} TrainJobs created in {time.perf_counter() - begun_s:.0f} s", file=sys.stderr)
    theirs = KubeflowClient(_config(team))
    place = ("--on", ".", "--namespace", team.namespace)
    kubectl = [team.cluster.kubectl_program, "--kubeconfig", str(team.cluster.kubeconfig)]
    commands = {
        "safepoint list": [sys.executable, "-m", "safepoint.cli.main", "list", *place],
        "safepoint --help": [sys.executable, "-m", "safepoint.cli.main", "--help"],
        "limit: kubectl get trainjobs": [*kubectl, "-n", team.namespace, "get", "trainjobs"],
    }
    environment = {**os.environ, "KUBECONFIG": str(team.cluster.kubeconfig)}
    took_s, inside_s, kubeflow_s = defaultdict[str, list[float]](list), list[float](), list[float]()
    num_requests = num_theirs = 0
    for number in range(rounds + 1):
        for name, command in commands.items():
            begun_s = time.perf_counter()
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            if number:
                took_s[name].append(time.perf_counter() - begun_s)
            assert "--help" in command or len(done.stdout.splitlines()) > num_jobs
        with ClusterJobs(ClusterApi(connect_to(namespace=team.namespace, file=team.cluster.kubeconfig))) as jobs:
            requests.count, begun_s = 0, time.perf_counter()
            jobs.summaries()
            inside_s.append(time.perf_counter() - begun_s)
            num_requests = requests.count
        if number < 3:  # it takes long
            requests.count, begun_s = 0, time.perf_counter()
            theirs.list_jobs()
            kubeflow_s.append(time.perf_counter() - begun_s)
            num_theirs = requests.count
    print_machine(f"list of {num_jobs} TrainJobs")
    for name in commands:
        print(row(name, took_s[name], unit="s"))
    print(row(f"of it, the jobs, {num_requests} requests", inside_s, unit="s"))
    print(row(f"kubeflow, list_jobs(), {num_theirs} requests", kubeflow_s, unit="s"))
    listed_s = sorted(took_s["safepoint list"])
    print(row("safepoint list / kubeflow", [one / min(kubeflow_s) for one in listed_s], unit=""))
    print(verdict("safepoint list", value=listed_s[len(listed_s) // 2], goal=LIST_GOAL_S, at_most=True, unit="s"))
    print(verdict("requests", value=num_requests, goal=LIST_GOAL_REQUESTS, at_most=True, unit="requests"))
    print_load("after")


_AFTER_KUBEFLOW = """
import time
from kubeflow.trainer import TrainerClient, CustomTrainer
before_s = time.process_time()
from safepoint import TrainerClient, TransformersTrainer
print(time.process_time() - before_s)
"""


def _python(program: str) -> str:
    """Run a program, and return what it prints.

    As in an installation, the first, untimed process compiles the modules, and the later ones do not.
    """
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def _timed(program: str) -> tuple[float, float]:
    """Seconds on the clock and of the processor."""
    before, begun_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    _python(program)
    took_s, after = time.perf_counter() - begun_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def bench_import(rounds: int) -> None:
    """The import of both SDKs, and nothing."""
    imports = {
        "safepoint": "from safepoint import TrainerClient, TransformersTrainer",
        "kubeflow": "from kubeflow.trainer import TrainerClient, CustomTrainer",
        "limit: nothing": "pass",
    }
    took_s, used_s = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    after_s: list[float] = []
    for number in range(rounds + 1):
        for name, program in imports.items():
            clock_s, processor_s = _timed(program)
            if number:
                took_s[name].append(clock_s)
                used_s[name].append(processor_s)
        further_s = float(_python(_AFTER_KUBEFLOW))
        after_s += [further_s] if number else []
    print_machine("import of the SDK")
    for what, found in (("clock", took_s), ("processor", used_s)):
        for name in imports:
            print(row(f"{name}, {what}", found[name], unit="s"))
        further_s = sorted(one - other for one, other in zip(found["safepoint"], found["kubeflow"], strict=True))
        print(row(f"safepoint - kubeflow, {what}", further_s, unit="s"))
        middle_s = further_s[len(further_s) // 2]
        print(verdict(f"further time, {what}", value=middle_s, goal=IMPORT_GOAL_S, at_most=True, unit="s"))
    # The difference of two long times is uncertain on a busy machine. This one is measured in one process.
    print(row("safepoint after kubeflow, processor", after_s, unit="s"))
    middle_s = statistics.median(after_s)
    print(verdict("the same, in one process", value=middle_s, goal=IMPORT_GOAL_S, at_most=True, unit="s"))
    print_load("after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000, help="TrainJobs in the list")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=("train", "list", "import"))
    options = parser.parse_args()
    if options.only in {None, "import"}:
        bench_import(options.rounds)
    if options.only == "import":
        return
    logging.disable(logging.WARNING)  # Kubeflow's client warns that the control plane names no version
    try:
        bench_cluster(options)
    except pytest.skip.Exception as reason:  # there is no cluster, or it may not be changed as a benchmark needs it
        print(f"NOT RUN: cluster ({reason})")


def bench_cluster(options: argparse.Namespace) -> None:
    """What needs a cluster."""
    requests = Requests()
    requests.install()
    with chosen_cluster() as cluster, tempfile.TemporaryDirectory() as folder:
        os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
        for number, only in enumerate(("train", "list")):
            if options.only in {None, only}:
                with workspace(cluster, Path(folder) / f"{number}-{uuid.uuid4().hex}") as team:
                    apply(cluster, queue_objects(team.namespace, cpu="0"))
                    if only == "list":
                        bench_list(team, requests, options.rounds, options.jobs)
                    else:
                        bench_train(team, requests, options.rounds, 1)
                        bench_train(team, requests, options.rounds, 2)


if __name__ == "__main__":
    main()
