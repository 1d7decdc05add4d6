"""Tests of safepoint.jobs.cluster.suspension.freezing with an API that is injected; tests/cluster has the others."""

import json
from collections.abc import Iterator
from typing import Any, cast

import pytest

from safepoint.errors import (
    AccessDeniedError,
    ConflictError,
    FreezeError,
    NotFoundError,
    SafepointError,
    UnsupportedError,
)
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.records.pod_image import IMAGE
from safepoint.jobs.cluster.records.receipts import RECEIPT
from safepoint.jobs.cluster.state import SAFE_STEP
from safepoint.jobs.cluster.suspension import pod_requests, stop
from safepoint.jobs.cluster.suspension.resuming import image_to_thaw
from safepoint.jobs.cluster.watches import pod_ends
from safepoint.jobs.cluster.watches.pod_ends import PodEnds
from tests.support.cluster.kept import (
    IMAGE_OF_POD,
    JOB,
    Kept,
    answer_with_image,
    job_with_images,
    running_pod,
    trainjob,
    workload_of,
)
from tests.unit.jobs.cluster.test_stop import Ends


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The namespace has no watch for the ends of pods."""
    for name in ("_OPEN_S", "_LAST_EVENTS_S"):
        monkeypatch.setattr(pod_ends, name, 0.0)
    monkeypatch.setattr(stop, "_LOOK_S", 0.01)


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that are run in the pod, which answers with an image."""
    return answer_with_image(monkeypatch)


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
    assert "its process image is pvc://ckpt/x/images/image-1" in frozen.message


@pytest.mark.parametrize("reported", [{**IMAGE_OF_POD, "path": "/elsewhere"}, {"name": 3}, "text", None])
def test_an_image_that_the_pod_made_at_its_deadline(reported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`suspend` records what the pod reports at its end, and `thaw` then knows the image. Other texts are ignored."""

    def refuse(*_: object, **__: object) -> Any:
        raise SafepointError("the ranks do not answer")

    def wait_for_last(ends: PodEnds) -> None:
        ended = {"exitCode": 75, "startedAt": "2026-11-23T10:00:00Z", "message": json.dumps(message)}
        pod = running_pod()
        pod["status"]["containerStatuses"][0]["state"] = {"terminated": ended}
        ends._note(pod, is_deleted=False)

    message = {"currentStep": 4, "processImage": reported}
    monkeypatch.setattr(stop, "request_save", refuse)
    monkeypatch.setattr(PodEnds, "wait_for_last", wait_for_last)
    namespace = Kept(trainjobs=[job_with_images()], pods=[running_pod()])
    namespace.after = lambda change: namespace.kept.update(pods=[])
    stopped = jobs_of(namespace).suspend(JOB)
    assert stopped.safe_step == 4
    seen = jobs_of(namespace).job(JOB)
    if isinstance(reported, dict) and len(reported) > 1:
        path = "pvc://ckpt/x/images/image-1"
        said = f"its ranks did not save before the deadline, so a process image of them was made: {path}"
        assert said in stopped.message
        assert seen.image is not None
        assert seen.image.path == path
        assert seen.image.is_newer_than(seen.safe_step)
        assert image_to_thaw(seen) == stopped.image == seen.image
    else:
        assert seen.image is stopped.image is None
        assert "frozen" not in stopped.message


@pytest.mark.parametrize("step", [4, 5])
def test_the_receipt_of_a_frozen_job(step: int, pod: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that was there before the image is no save of this suspension. A newer one is a save: the
    processes ran on, because the request to suspend the job came too late."""
    monkeypatch.setattr(stop, "PodEnds", lambda *_: Ends(step))
    namespace = Kept(trainjobs=[job_with_images()], pods=[running_pod()])

    def after(change: str) -> None:
        namespace.kept["pods"] = []

    namespace.after = after
    jobs_of(namespace).freeze(JOB, is_running_after=False)
    text = namespace.kept["trainjobs"][0]["metadata"]["annotations"].get(RECEIPT)
    if step == 4:
        assert text is None
    else:
        assert json.loads(text)["reason"] == "the job trained on after its process image was made"


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
    job, image = jobs_of(namespace).freeze(JOB, is_running_after=True)
    assert pod == [["safepoint.jobs.local.images.image_request", "900", "run-on"]]
    assert (image.num_processes, image.needs) == (4, ())
    assert job.image == image
    assert namespace.changes == [f"patch trainjobs {JOB}"]  # its record
    assert jobs_of(namespace).job(JOB).image == image


def test_the_image_of_a_job_that_you_may_not_change(pod: list[list[str]], caplog: pytest.LogCaptureFixture) -> None:
    """The image is made, and a warning says that commands do not show it."""
    namespace = Kept(trainjobs=[job_with_images()], pods=[running_pod()], denied={"patch trainjobs"})
    assert jobs_of(namespace).freeze(JOB, is_running_after=True)[1].name == "image-1"
    assert "the image is complete, but `safepoint status` does not show it" in caplog.text


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        ([{"error": "CRIU lacks a right", "hint": "add it"}], FreezeError, "continues to run: .*CRIU lacks a right"),
        ([{"image": {**IMAGE_OF_POD, "num_pages": "3"}}], FreezeError, "named no image"),
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


@pytest.mark.parametrize("in_queue", [False, True])
def test_a_suspended_job_continues_from_its_image(in_queue: bool, pod: list[list[str]]) -> None:
    job = job_with_images()
    workloads = [workload_of(job)] if in_queue else []
    namespace = Kept(trainjobs=[job], pods=[running_pod()], workloads=workloads)

    def after(change: str) -> None:
        if change.startswith("patch workloads"):
            is_active = workloads[0]["spec"]["active"]
            namespace.kept["trainjobs"][0]["spec"]["suspend"] = not is_active  # as Kueue does
            workloads[0]["status"] = {}
        namespace.kept["pods"] = []

    namespace.after = after
    jobs_of(namespace).freeze(JOB, is_running_after=False)
    assert namespace.kept["trainjobs"][0]["metadata"]["annotations"][IMAGE]
    assert jobs_of(namespace).job(JOB).state == "Suspended"
    resumed, image = jobs_of(namespace).thaw(JOB)
    assert (image.path, image.safe_step) == ("pvc://ckpt/x/images/image-1", 4)
    assert resumed.state != "Suspended"
    assert resumed.image is None  # it is restored now
    if in_queue:
        assert namespace.kept["workloads"][0]["spec"]["active"] is True
    else:
        assert namespace.kept["trainjobs"][0]["spec"]["suspend"] is False


def suspended(safe_step: int | None, annotation: str | None) -> Any:
    job = job_with_images()
    job["spec"]["suspend"] = True
    notes = {IMAGE: annotation, SAFE_STEP: None if safe_step is None else str(safe_step)}
    job["metadata"]["annotations"] |= {name: text for name, text in notes.items() if text is not None}
    return job


RECORDED = json.dumps({**IMAGE_OF_POD, "path": "pvc://ckpt/x/images/image-1"})


@pytest.mark.parametrize(
    ("safe_step", "annotation", "kind", "why"),
    [
        (4, None, NotFoundError, "no process image of job tiny is known"),
        (5, RECORDED, ConflictError, r"image-1, because the checkpoint of step 5 is newer"),
        (4, "[" * 10000, NotFoundError, "no process image"),
        (4, json.dumps({**json.loads(RECORDED), "created": "yesterday"}), NotFoundError, "no process image"),
        (4, json.dumps({**json.loads(RECORDED), "path": 3}), NotFoundError, "no process image"),
        (4, json.dumps({**json.loads(RECORDED), "safe_step": True}), NotFoundError, "no process image"),
    ],
)
def test_a_job_that_would_not_continue_from_an_image(
    safe_step: int, annotation: str | None, kind: type[SafepointError], why: str
) -> None:
    namespace = Kept(trainjobs=[suspended(safe_step, annotation)])
    with pytest.raises(kind, match=why) as refused:
        jobs_of(namespace).thaw(JOB)
    assert "`safepoint resume tiny`" in (refused.value.hint or "")
    assert namespace.changes == []


def test_a_running_job_is_not_thawed(pod: list[list[str]]) -> None:
    namespace = Kept(trainjobs=[job_with_images()], pods=[running_pod()])
    jobs_of(namespace).freeze(JOB, is_running_after=True)
    with pytest.raises(ConflictError, match="is Running, not suspended"):
        jobs_of(namespace).thaw(JOB)


def test_a_job_with_images_does_not_get_more_pods() -> None:
    claim = {"metadata": {"name": "ckpt"}, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
    namespace = Kept(trainjobs=[job_with_images()], pods=[running_pod()], persistentvolumeclaims=[claim])
    with pytest.raises(UnsupportedError, match="restored pods have new addresses"):
        jobs_of(namespace).scale(JOB, 2)
    assert namespace.changes == []
