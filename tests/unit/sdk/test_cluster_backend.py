"""Tests of safepoint.sdk.cluster_backend without a cluster; tests/cluster has those with one."""

from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.jobs.cluster.state import Observed, describe
from safepoint.sdk.cluster_backend import ClusterBackend
from safepoint.sdk.upstream import KubernetesBackend, types

COPY = {"metadata": {"name": "tiny-90s"}}


def runtime(name: str) -> types.Runtime:
    trainer = types.RuntimeTrainer(trainer_type=types.TrainerType.CUSTOM_TRAINER, framework="torch", image="i")
    return types.Runtime(name=name, trainer=trainer, kind=types.RuntimeKind.TRAINING_RUNTIME)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend of a cluster with the runtime `torch`, and a job with a copy of it."""
    monkeypatch.setattr(KubernetesBackend, "list_runtimes", lambda _: [runtime("torch"), runtime("tiny-90s")])
    record = '{"runtime": "torch", "grace_s": 90}'
    job = {
        "metadata": {"name": "tiny", "namespace": "t", "annotations": {"safepoint.dev/job": record}},
        "spec": {"runtimeRef": {"name": "tiny-90s"}, "trainer": {"numNodes": 1}},
    }
    found: Any = ClusterBackend.__new__(ClusterBackend)
    found._api = SimpleNamespace(objects=lambda kind, **_: [COPY] if kind == "trainingruntimes" else [])
    found._jobs = SimpleNamespace(jobs=lambda: [describe(Observed(trainjob=job), place="kind")])
    found.get_runtime = runtime
    return found


def test_a_job_with_a_grace_period_is_a_job_of_its_runtime(backend: Any) -> None:
    assert [job.name for job in backend.list_jobs(runtime=runtime("torch"))] == ["tiny"]
    assert backend.list_jobs(runtime=runtime("other")) == []
    [job] = backend.list_jobs()
    assert job.runtime.name == "torch"


def test_the_copy_that_a_job_has_of_its_runtime_is_not_listed(backend: Any) -> None:
    assert [found.name for found in backend.list_runtimes()] == ["torch"]


def test_a_job_is_shown_although_its_runtime_was_deleted(backend: Any) -> None:
    def get(name: str) -> types.Runtime:
        if name == "torch":
            raise RuntimeError("no such runtime")
        return runtime(name)

    backend.get_runtime = get
    [job] = backend.list_jobs()
    assert job.runtime.name == "tiny-90s"
