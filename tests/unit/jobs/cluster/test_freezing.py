"""Tests of safepoint.jobs.cluster.suspension.freezing with an API that is injected; tests/cluster has the others."""

import json
from collections.abc import Iterator
from typing import Any, cast

import pytest

from safepoint.errors import AccessDeniedError, ConflictError, FreezeError, SafepointError, UnsupportedError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.pod_archive import command_of
from safepoint.jobs.cluster.suspension import pod_requests, stop
from safepoint.jobs.cluster.watches import pod_ends
from tests.support.cluster.kept import JOB, Kept, running_pod, trainjob

IMAGE = {
    "name": "image-1",
    "path": "/mnt/x/images/image-1",
    "created": "2026-11-27T10:00:00Z",
    "program": "python3",
    "num_processes": 4,
    "size_bytes": 10,
    "memory_bytes": 20,
    "num_pages": 3,
    "num_stored": 2,
    "needs": [],
}


def job_with_images(**labels: str) -> Any:
    job = trainjob(**labels)
    record = {"program": ["train.py"], "settings": {"SAFEPOINT_FREEZE_AS_LAST_RESORT": "1"}}
    job["metadata"]["annotations"]["safepoint.dev/job"] = json.dumps(record)
    job["spec"]["trainer"]["command"] = [*command_of("/opt/safepoint", {"safepoint.pyz": b""}), "run", "train.py"]
    return job


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The namespace has no watch for the ends of pods."""
    for name in ("_OPEN_S", "_LAST_EVENTS_S"):
        monkeypatch.setattr(pod_ends, name, 0.0)
    monkeypatch.setattr(stop, "_LOOK_S", 0.01)


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that are run in the pod, which answers with an image."""
    commands: list[list[str]] = []

    def run_in_pod(api: object, pod: str, container: str, command: list[str], **_: object) -> Iterator[str]:
        commands.append(command[-3:])
        yield json.dumps({"waits": "the image"})
        yield json.dumps({"image": IMAGE})

    monkeypatch.setattr(pod_requests, "run_in_pod", run_in_pod)
    return commands


def jobs_of(namespace: Kept) -> ClusterJobs:
    return ClusterJobs(cast("ClusterApi", namespace))


def test_a_job_is_suspended_only_after_its_image_is_complete(pod: list[list[str]]) -> None:
    namespace = Kept(trainjobs=[job_with_images()], pods=[running_pod()])
    before: list[int] = []

    def after(change: str) -> None:
        before.append(len(pod))
        namespace.kept["pods"] = []  # suspended

    namespace.after = after
    frozen, image = jobs_of(namespace).freeze(JOB, is_running_after=False)
    assert pod == [["safepoint.jobs.local.images.image_request", "900", "hold"]]
    assert set(before) == {1}
    assert namespace.changes[0].startswith("patch trainjobs")
    assert image.path == "pvc://ckpt/x/images/image-1"
    assert "it is frozen in pvc://ckpt/x/images/image-1" in frozen.message


def test_a_job_that_ends_before_it_is_suspended(pod: list[list[str]]) -> None:
    """Such as one whose processes ran on, because the request to suspend it came too late."""
    job = job_with_images()
    namespace = Kept(trainjobs=[job], pods=[running_pod()])

    def after(change: str) -> None:
        namespace.kept["pods"] = []
        namespace.kept["trainjobs"][0]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}

    namespace.after = after
    with pytest.raises(ConflictError, match=r"is Complete: it ended before it was suspended; .*image-1 stays"):
        jobs_of(namespace).freeze(JOB, is_running_after=False)


def test_a_job_that_runs_on_is_not_changed(pod: list[list[str]]) -> None:
    namespace = Kept(trainjobs=[job_with_images()], pods=[running_pod()])
    _, image = jobs_of(namespace).freeze(JOB, is_running_after=True)
    assert pod == [["safepoint.jobs.local.images.image_request", "900", "run-on"]]
    assert (image.num_processes, image.needs) == (4, ())
    assert namespace.changes == []


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        ([{"error": "CRIU lacks a right", "hint": "add it"}], FreezeError, "runs on: .*CRIU lacks a right"),
        ([{"image": {**IMAGE, "num_pages": "3"}}], FreezeError, "named no image"),
        (AccessDeniedError("no"), AccessDeniedError, "not allowed to create and get pods/exec"),
    ],
)
def test_a_job_that_cannot_be_frozen_is_not_suspended(
    answer: list[Any] | Exception, kind: type[SafepointError], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_in_pod(*_: object, **__: object) -> Iterator[str]:
        if isinstance(answer, Exception):
            raise answer
        yield from map(json.dumps, answer)
        if "error" in answer[0]:
            raise SafepointError("the program failed")

    monkeypatch.setattr(pod_requests, "run_in_pod", run_in_pod)
    namespace = Kept(trainjobs=[job_with_images()], pods=[running_pod()])
    with pytest.raises(kind, match=why):
        jobs_of(namespace).freeze(JOB, is_running_after=False)
    assert namespace.changes == []


def test_a_job_without_the_option_is_refused(pod: list[list[str]]) -> None:
    namespace = Kept(trainjobs=[trainjob()], pods=[running_pod()])
    with pytest.raises(UnsupportedError, match="submitted without --freeze-as-last-resort"):
        jobs_of(namespace).freeze(JOB, is_running_after=True)
    assert pod == []


def test_a_job_that_does_not_run_is_refused(pod: list[list[str]]) -> None:
    job = job_with_images()
    job["spec"]["suspend"] = True
    with pytest.raises(ConflictError, match="it is Suspended"):
        jobs_of(Kept(trainjobs=[job])).freeze(JOB, is_running_after=False)
    assert pod == []


def test_a_job_with_images_does_not_get_more_pods() -> None:
    claim = {"metadata": {"name": "ckpt"}, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
    namespace = Kept(trainjobs=[job_with_images()], pods=[running_pod()], persistentvolumeclaims=[claim])
    with pytest.raises(UnsupportedError, match="restored pods have new addresses"):
        jobs_of(namespace).scale(JOB, 2)
    assert namespace.changes == []
