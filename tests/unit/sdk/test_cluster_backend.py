"""Tests of safepoint.sdk.cluster_backend without a cluster; tests/cluster has those with one."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.state import Observed, describe
from safepoint.jobs.cluster.suspension import stop
from safepoint.jobs.cluster.watches import pod_ends
from safepoint.sdk import TrainerClient
from safepoint.sdk.cluster_backend import ClusterBackend
from safepoint.sdk.upstream import KubernetesBackend, types
from tests.support.cluster.kept import JOB, Kept, answer_with_image, job_with_images, running_pod, trainjob

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


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """A namespace with a job that trains, whose pod can make images."""
    for name in ("_OPEN_S", "_LAST_EVENTS_S"):
        monkeypatch.setattr(pod_ends, name, 0.0)
    monkeypatch.setattr(stop, "_LOOK_S", 0.01)
    answer_with_image(monkeypatch)
    return Kept(trainjobs=[job_with_images()], pods=[running_pod()])


@pytest.fixture
def client(namespace: Kept, backend: Any) -> TrainerClient:
    """A client of this namespace."""
    backend._jobs = ClusterJobs(cast("ClusterApi", namespace))
    found = TrainerClient.__new__(TrainerClient)
    found.backend = backend
    return found


IMAGE = "pvc://ckpt/x/images/image-1"


def test_a_job_is_frozen_and_thawed(client: TrainerClient, namespace: Kept) -> None:
    """As by the commands, which use the same methods."""

    def after(change: str) -> None:
        namespace.kept["pods"] = []

    running = client.freeze_job(JOB, leave_running=True)
    assert (running.status, running.image) == ("Running", IMAGE)
    namespace.after = after
    frozen = client.freeze_job(JOB)
    assert (frozen.status, frozen.image) == ("Suspended", IMAGE)
    assert f"its process image is {IMAGE}" in frozen.message
    assert client.get_job(JOB).image == IMAGE
    assert client.thaw_job(JOB).status != "Suspended"
    assert namespace.kept["trainjobs"][0]["spec"]["suspend"] is False
    with pytest.raises(RuntimeError, match="not suspended"):
        client.thaw_job(JOB)


def test_a_folder_for_the_image_is_refused(client: TrainerClient, namespace: Kept) -> None:
    """The pod makes the image in the output location. Nothing is frozen."""
    with pytest.raises(ValueError, match="folder /images has no effect on a cluster"):
        client.freeze_job(JOB, folder="/images")
    assert namespace.changes == []


def test_a_job_without_images_is_refused_in_words_of_the_sdk(client: TrainerClient, namespace: Kept) -> None:
    namespace.kept["trainjobs"] = [trainjob()]
    with pytest.raises(NotImplementedError, match="submitted without freeze_as_last_resort"):
        client.freeze_job(JOB)
    namespace.kept["trainjobs"][0]["spec"]["suspend"] = True
    namespace.kept["pods"] = []
    with pytest.raises(RuntimeError, match="no process image of job tiny is known"):
        client.thaw_job(JOB)
