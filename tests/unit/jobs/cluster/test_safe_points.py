"""Tests of safepoint.jobs.cluster.watches.safe_points, and of what a watch keeps of pods that are gone."""

import json
from typing import Any, cast

import pytest

from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.objects import at
from safepoint.jobs.cluster.state import SAFE_STEP, Observed
from safepoint.jobs.cluster.watches.job_watch import JobWatch
from safepoint.jobs.cluster.watches.safe_points import SafePoints
from safepoint.jobs.model.states import JobState
from tests.support.cluster.kept import JOB, Kept, running_pod, trainjob, workload_of


def ended_pod(step: int, *, name: str | None = None) -> Any:
    """The pod of node 0 after it has saved a step."""
    pod = running_pod()
    message = json.dumps({"currentStep": step})
    ended = {"exitCode": 75, "message": message, "startedAt": "2026-11-23T10:00:10Z"}
    pod["status"]["containerStatuses"][0]["state"] = {"terminated": ended}
    pod["metadata"]["name"] = name or pod["metadata"]["name"]
    return pod


def watch_of(*objects: tuple[str, str, Any]) -> JobWatch:
    """A watch that has seen these changes: kind, what happened, object."""
    watch = JobWatch(cast("ClusterApi", Kept()))
    for kind, what, item in objects:
        watch._note(kind, what, item)
    return watch


def saved_by(watch: JobWatch) -> int | None:
    [seen] = watch.jobs()
    return seen.saved_step


def test_a_watch_keeps_the_step_of_a_pod_that_is_gone() -> None:
    """The cluster deletes the pods of a preempted job one second after their end."""
    job = ("trainjobs", "ADDED", trainjob())
    gone = [("pods", "MODIFIED", ended_pod(40)), ("pods", "DELETED", ended_pod(40))]
    assert saved_by(watch_of(job, ("pods", "ADDED", running_pod()), *gone)) == 40
    assert saved_by(watch_of(job, *gone, ("pods", "ADDED", running_pod()))) == 40
    assert saved_by(watch_of(job, ("pods", "DELETED", running_pod()))) is None


def test_a_later_job_of_the_same_name_has_saved_nothing() -> None:
    gone = ("pods", "DELETED", ended_pod(40))
    deleted = ("trainjobs", "DELETED", trainjob())
    assert saved_by(watch_of(gone, deleted, ("trainjobs", "ADDED", trainjob(uid="new")))) is None


def test_the_pod_of_another_job_does_not_count() -> None:
    """Anyone who may change the labels of a pod can give it the label of the job."""
    other = ended_pod(40, name="other-node-0-0-abcde")
    assert saved_by(watch_of(("trainjobs", "ADDED", trainjob()), ("pods", "DELETED", other))) is None


def keep(namespace: Kept, step: int | None, *, times: int = 1) -> None:
    safe_points = SafePoints(cast("ClusterApi", namespace))
    for _ in range(times):
        [job] = namespace.kept["trainjobs"]
        safe_points.keep(Observed(trainjob=job, saved_step=step))


def test_the_step_is_kept_once_in_an_annotation() -> None:
    namespace = Kept(trainjobs=[trainjob()])
    keep(namespace, 40, times=3)
    assert namespace.changes == ["patch trainjobs tiny"]
    assert at(namespace.kept["trainjobs"][0], "metadata", "annotations", SAFE_STEP) == "40"
    keep(namespace, 40)
    keep(namespace, 32)
    keep(namespace, None)
    assert namespace.changes == ["patch trainjobs tiny"]


def test_a_job_that_posts_its_progress_needs_no_annotation() -> None:
    job = trainjob()
    job["status"] = {"trainerStatus": {"lastUpdatedTime": "2026-11-23T10:30:00Z", "metrics": []}}
    namespace = Kept(trainjobs=[job])
    keep(namespace, 40)
    assert namespace.changes == []


def test_a_user_who_may_not_change_the_job_gets_no_message(caplog: pytest.LogCaptureFixture) -> None:
    namespace = Kept(trainjobs=[trainjob()], denied={"patch trainjobs"})
    keep(namespace, 40, times=3)
    assert (namespace.changes, caplog.messages) == ([], [])


class Preempted(Kept):
    """A job in a queue without a status server. As soon as all is watched, the queue takes the quota back."""

    def __init__(self) -> None:
        self.job = trainjob(**{"kueue.x-k8s.io/queue-name": "gpus"})
        super().__init__(trainjobs=[self.job], pods=[running_pod()], workloads=[workload_of(self.job)])

    def objects_at(self, kind: str, **_: object) -> tuple[list[Any], str]:
        return self.objects(kind), "1"

    def watch(self, kind: str, **_: Any) -> Any:
        if kind == "pods" and self.kept["pods"]:
            self.kept["pods"] = []
            yield "MODIFIED", ended_pod(40)
            yield "DELETED", ended_pod(40)
        if kind == "workloads":
            evicted = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "by job b"}
            yield "MODIFIED", {**workload_of(self.job), "status": {"conditions": [evicted]}}
            self.job["spec"]["suspend"] = True


@pytest.mark.parametrize("is_read_only", [False, True])
def test_the_safe_point_of_a_preempted_job_is_shown_and_kept(is_read_only: bool) -> None:
    """A command that only reads shows the step, and changes nothing."""
    namespace = Preempted()
    jobs = ClusterJobs(cast("ClusterApi", namespace), is_read_only=is_read_only)
    for found in jobs.watch(None, interval_s=0.01):
        if found[0].state is JobState.PREEMPTED and found[0].safe_step is not None:
            assert found[0].safe_step == 40
            break
    [later] = ClusterJobs(cast("ClusterApi", namespace)).jobs()
    assert later.name == JOB
    # The generator was left before it wrote a second time: what it showed, it had kept.
    assert later.safe_step == (None if is_read_only else 40)
