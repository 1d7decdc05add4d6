"""Tests of safepoint.jobs.cluster.watches.observer: which events are requested, and which of them count."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from safepoint.errors import AccessDeniedError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.objects import Object, at
from safepoint.jobs.model.states import JobState

CREATED = "2026-11-23T10:00:00Z"
POD = "tiny-node-0-0-abcde"


def trainjob(num_nodes: int = 1) -> Object:
    return {
        "metadata": {"name": "tiny", "namespace": "team", "uid": "new", "creationTimestamp": CREATED},
        "spec": {"trainer": {"numNodes": num_nodes}, "runtimeRef": {"name": "torch"}},
    }


def pod(**state: Any) -> Object:
    labels = {"jobset.sigs.k8s.io/jobset-name": "tiny", "batch.kubernetes.io/job-completion-index": "0"}
    phase = "Running" if "running" in state else "Pending"
    status = {"containerStatuses": [{"name": "node", "state": state}], "phase": phase}
    return {"metadata": {"name": POD, "labels": labels, "creationTimestamp": CREATED}, "status": status}


def warning(kind: str, name: str, reason: str, *, minute: int = 1, uid: str | None = None) -> Object:
    return {
        "type": "Warning",
        "reason": reason,
        "message": f"{reason} of {name}",
        "lastTimestamp": f"2026-11-23T10:{minute:02}:00Z" if minute >= 0 else "2026-11-23T09:30:00Z",
        "involvedObject": {"kind": kind, "name": name, **({"uid": uid} if uid else {})},
    }


class Namespace:
    """A namespace with one job, its pods and events. It selects events as the API server does."""

    namespace = "team"
    connection = SimpleNamespace(name="kind")

    def __init__(self, job: Object, pods: list[Object], events: list[Object], *, is_allowed: bool = True) -> None:
        self._job, self._pods, self._events, self._is_allowed = job, pods, events, is_allowed
        self.asked: list[str] = []

    def check_name(self, name: str) -> None: ...

    def serves(self, kind: str) -> bool:
        return True

    def find(self, kind: str, name: str) -> Object | None:
        return self._job if kind == "trainjobs" else None

    def objects(self, kind: str, *, labels: str = "", fields: str = "") -> list[Object]:
        if kind == "trainjobs":
            return [self._job]
        if kind == "pods":
            return self._pods
        if kind != "events":
            return []
        self.asked.append(fields)
        if not self._is_allowed:
            raise AccessDeniedError("you may not list events")
        key, wanted = fields.split("=")
        return [event for event in self._events if at(event, *key.split(".")) == wanted]


def jobs_of(api: Namespace) -> ClusterJobs:
    return ClusterJobs(cast("ClusterApi", api))


@pytest.mark.parametrize(
    ("event", "pods"),
    [
        (warning("TrainJob", "tiny", "TrainJobResourcesCreationFailed", uid="new"), []),
        (warning("JobSet", "tiny", "JobCreationFailed"), []),
        (warning("Job", "tiny-node-0", "FailedCreate"), []),
        (warning("Job", "tiny-node-0", "FailedCreate"), [pod(running={"startedAt": CREATED})]),
        (warning("Pod", POD, "FailedMount"), [pod(waiting={"reason": "ContainerCreating"})]),
    ],
)
def test_whatever_keeps_a_job_from_running_is_named(event: Object, pods: list[Object]) -> None:
    """By `status`, and by `list` and `watch`, which request all warnings at once."""
    job = trainjob(num_nodes=2)
    one = jobs_of(Namespace(job, pods, [event])).job("tiny")
    [listed] = jobs_of(api := Namespace(job, pods, [event])).jobs()
    assert event["message"] in one.message
    assert (listed.state, listed.message) == (one.state, one.message)
    assert api.asked == ["type=Warning"]


@pytest.mark.parametrize(
    "event",
    [
        warning("TrainJob", "tiny", "TrainJobResourcesCreationFailed", uid="old"),
        warning("JobSet", "tiny", "JobCreationFailed", minute=-1),
        warning("Job", "tiny-2-node-0", "FailedCreate"),
    ],
)
def test_events_of_other_jobs_and_of_earlier_ones_of_the_same_name_do_not_count(event: Object) -> None:
    job = jobs_of(Namespace(trainjob(), [], [event])).job("tiny")
    assert (job.state, job.message) == (JobState.STARTING, "its pods are being created")


def test_a_job_that_runs_needs_no_events() -> None:
    api = Namespace(trainjob(), [pod(running={"startedAt": CREATED})], [])
    assert jobs_of(api).job("tiny").state is JobState.RUNNING
    assert [job.state for job in jobs_of(api).jobs()] == [JobState.RUNNING]
    assert api.asked == []


def test_a_job_is_shown_without_the_right_to_list_events() -> None:
    api = Namespace(trainjob(), [], [], is_allowed=False)
    assert jobs_of(api).job("tiny").state is JobState.STARTING
    assert [job.state for job in jobs_of(api).jobs()] == [JobState.STARTING]
