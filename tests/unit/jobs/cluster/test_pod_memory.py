"""Tests of safepoint.jobs.cluster.watches.pod_memory."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from safepoint.errors import AccessDeniedError, NotFoundError, SafepointError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.pods.pod_summary import PodSummary
from safepoint.jobs.cluster.state import ClusterJob, Observed, describe
from safepoint.jobs.cluster.transport.failures import BusyError
from safepoint.jobs.cluster.watches import pod_memory
from safepoint.jobs.cluster.watches.pod_memory import MemoryUse, PodMemory
from safepoint.jobs.model.states import JobState
from tests.support.patience import PATIENCE


class Cluster:
    """A cluster with metrics-server, unless `failure` is given."""

    namespace = "team"

    def __init__(self, *, failure: SafepointError | None = None) -> None:
        self.failure = failure
        self.asked: list[Mapping[str, str] | None] = []
        self.memory: Any = "2Gi"
        self.answers = threading.Event()
        self.answers.set()

    def check_name(self, name: str) -> None: ...

    def read_once(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        assert path == "/apis/metrics.k8s.io/v1beta1/namespaces/team/pods"
        self.asked.append(query)
        self.answers.wait(30 * PATIENCE)
        if self.failure is not None:
            raise self.failure
        used = {"proxy": "9Gi", "node": self.memory}
        containers = [{"name": name, "usage": {"memory": text}} for name, text in used.items()]
        return {"items": [{"metadata": {"name": name}, "containers": containers} for name in ("p0", "stranger")]}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need longer than a person waits."""
    monkeypatch.setattr(pod_memory, "_WAIT_S", 30 * PATIENCE)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the monotonic clock, as a list of one value."""
    found = [1000.0]
    monkeypatch.setattr(clock, "monotonic_s", lambda: found[0])
    return found


def job(state: JobState = JobState.RUNNING, phase: str = "Running") -> ClusterJob:
    described = describe(Observed(trainjob={"metadata": {"name": "tiny", "namespace": "team"}}), place="kind")
    return replace(described, state=state, pods=(PodSummary(name="p0", node=0, phase=phase),))


def memory(cluster: Cluster) -> PodMemory:
    return PodMemory(cast("ClusterApi", cluster))


def test_the_memory_of_the_container_that_trains(now: list[float]) -> None:
    """Only of the job's own pods, by one request in 15 seconds."""
    cluster = Cluster()
    use = memory(cluster)
    for _ in range(3):
        assert use.of(job()) == MemoryUse(pods={"p0": 2 << 30})
    assert cluster.asked == [{"labelSelector": "jobset.sigs.k8s.io/jobset-name=tiny"}]
    cluster.memory = "3Gi"
    now[0] += 16
    assert use.of(job()).pods == {"p0": 3 << 30}


def test_a_job_without_running_pods_takes_no_request() -> None:
    cluster = Cluster()
    for of in (job(JobState.SUSPENDED), job(phase="Pending")):
        assert memory(cluster).of(of) == MemoryUse()
    assert cluster.asked == []


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (NotFoundError("no such API"), "the cluster has no metrics API"),
        (AccessDeniedError("forbidden"), "you are not allowed to list the metrics of pods"),
        (BusyError("503"), "cannot be read: 503"),
    ],
)
def test_why_there_is_no_figure(failure: SafepointError, why: str, now: list[float]) -> None:
    """After a failure, the next request comes two minutes later."""
    cluster = Cluster(failure=failure)
    use = memory(cluster)
    for seconds in (0, 60):
        now[0] += seconds
        found = use.of(job())
        assert why in found.missing
        assert not found.pods
        assert len(cluster.asked) == 1
    now[0] += 61
    use.of(job())
    assert len(cluster.asked) == 2


@pytest.mark.parametrize("text", [None, "much", "-5", ""])
def test_a_figure_that_is_not_valid_is_left_out(text: Any) -> None:
    cluster = Cluster()
    cluster.memory = text
    assert memory(cluster).of(job()).missing == "the metrics API of the cluster has no figures of these pods yet"


def test_an_api_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure is missing until it answers, and no second request is sent."""
    monkeypatch.setattr(pod_memory, "_WAIT_S", 0.01)
    cluster = Cluster()
    cluster.answers.clear()
    use = memory(cluster)
    for _ in range(2):
        assert use.of(job()).missing == "the metrics API of the cluster has not answered yet"
    assert len(cluster.asked) == 1
    cluster.answers.set()
    work = use._found["tiny"][1]  # pyright: ignore[reportPrivateUsage]
    assert work.is_done(30 * PATIENCE)
    assert use.of(job()).pods == {"p0": 2 << 30}
    assert len(cluster.asked) == 1
