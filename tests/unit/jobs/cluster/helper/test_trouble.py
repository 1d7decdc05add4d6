"""Tests of safepoint.jobs.cluster.helper.trouble."""

from typing import Any

import pytest

from safepoint.errors import ConflictError, WaitTimeoutError
from safepoint.jobs.cluster.helper.trouble import ending_without_answer, trouble_of

JOB: Any = {"metadata": {"name": "h"}}


def pod(**status: Any) -> Any:
    return {"metadata": {"name": "h-x"}, "status": status}


def container(**state: Any) -> Any:
    return pod(containerStatuses=[{"name": "safepoint", "state": state}])


def event(reason: str, message: str, name: str = "h") -> Any:
    return {"reason": reason, "message": message, "involvedObject": {"name": name}, "lastTimestamp": "2026-01-01"}


UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 Insufficient memory",
}


@pytest.mark.parametrize(
    ("job", "made", "events", "words"),
    [
        (
            JOB,
            container(waiting={"reason": "ImagePullBackOff", "message": "no such"}),
            [],
            "image i cannot be pulled",
        ),
        (JOB, container(waiting={"reason": "ErrImageNeverPull"}), [], "image i is not on the node"),
        (JOB, pod(conditions=[UNSCHEDULABLE]), [], "no node has room for the pod: 0/1 nodes"),
        (JOB, pod(), [event("FailedAttachVolume", "Multi-Attach error", "h-x")], "a volume cannot be mounted: Multi"),
        (JOB, None, [event("FailedCreate", "exceeded quota: few")], "a quota of the namespace is used up"),
        (JOB, None, [event("FailedCreate", "violates PodSecurity")], "the cluster refuses the pod: violates"),
        ({**JOB, "spec": {"suspend": True}}, None, [], "probably by Kueue"),
    ],
)
def test_why_it_does_not_start(job: Any, made: Any, events: Any, words: str) -> None:
    found = trouble_of(job, made, events, image="i")
    assert found is not None
    assert words in str(found.error)
    assert "nothing was done" in str(found.error)


def test_what_is_usual_at_a_start_is_no_trouble() -> None:
    late = event("FailedMount", 'MountVolume.SetUp failed: configmap "h-0" not found', "h-x")
    for made, events in ((None, []), (pod(), []), (container(waiting={"reason": "ContainerCreating"}), [late])):
        assert trouble_of(JOB, made, events, image="i") is None


@pytest.mark.parametrize(
    ("ended", "said", "kind", "words"),
    [
        ({"reason": "OOMKilled", "exitCode": 137}, [], ConflictError, "more memory than 2Gi"),
        ({"reason": "Error", "exitCode": 1}, ["No module named 'xxhash'"], ConflictError, "No module named 'xxhash'"),
        ({"reason": "StartError", "message": "python3: not found"}, [], ConflictError, "python3: not found"),
    ],
)
def test_why_there_is_no_answer(ended: Any, said: list[str], kind: type[Exception], words: str) -> None:
    error = ending_without_answer(JOB, container(terminated=ended), said, memory="2Gi")
    assert isinstance(error, kind)
    assert words in str(error)
    assert error.hint


def test_a_deadline_that_has_passed() -> None:
    failed: Any = {
        **JOB,
        "status": {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]},
    }
    assert isinstance(ending_without_answer(failed, None, [], memory="2Gi"), WaitTimeoutError)
    found = trouble_of(failed, None, [], image="i")
    assert found is not None
    assert isinstance(found.error, WaitTimeoutError)


def test_a_helper_in_a_queue_waits() -> None:
    """Kueue puts Jobs into the queue `default`, if there is one."""
    metadata = {"name": "h", "labels": {"kueue.x-k8s.io/queue-name": "default"}}
    found = trouble_of({"metadata": metadata, "spec": {"suspend": True}}, None, [], image="i")
    assert found is not None
    assert "Job h waits in queue default" in str(found.error)
    assert found.patience_s >= 60
