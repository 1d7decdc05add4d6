"""Tests of safepoint.jobs.cluster.pods.delays."""

from typing import Any

import pytest

from safepoint.jobs.cluster.pods.delays import delay_of, why_no_pods

CREATING = {"waiting": {"reason": "ContainerCreating"}}
SINCE = "2026-11-23T10:00:10Z"


def pod(state: dict[str, Any] | None = None, **scheduling: str) -> dict[str, Any]:
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": SINCE, **scheduling}
    return {
        "metadata": {"name": "p"},
        "status": {"conditions": [scheduled], "containerStatuses": [{"name": "node", "state": state or CREATING}]},
    }


def event(reason: str, message: str, name: str = "p", kind: str = "Pod") -> dict[str, Any]:
    about = {"kind": kind, "name": name}
    return {"reason": reason, "message": message, "involvedObject": about, "lastTimestamp": "2026-11-23T10:01:00Z"}


@pytest.mark.parametrize(
    ("seen", "text", "is_for_good"),
    [
        (event("Pulling", "Pulling big"), "pulls its image (since 2026-11-23T10:01:00Z): Pulling big", False),
        (event("FailedMount", "timed out"), f"waits for a volume (since {SINCE}): timed out", False),
        (event("FailedMount", "s not found"), f"waits for a volume (since {SINCE}): s not found", True),
        (event("FailedAttachVolume", "Multi-Attach"), f"waits for a volume (since {SINCE}): Multi-Attach", False),
        (event("FailedCreatePodSandBox", "no address"), f"waits for its network (since {SINCE}): no address", False),
    ],
)
def test_an_event_says_what_a_pod_waits_for(seen: dict[str, Any], text: str, is_for_good: bool) -> None:
    assert delay_of(pod(), [event("Scheduled", "to a node"), seen]) == (f"pod p {text}", is_for_good)
    of_another = {**seen, "involvedObject": {"kind": "Pod", "name": "q"}}
    assert delay_of(pod(), [of_another]) == ("", False)


def test_an_image_that_was_pulled_does_not_keep_a_pod() -> None:
    assert delay_of(pod(), [event("Pulling", "Pulling image"), event("Pulled", "pulled")]) == ("", False)


def test_a_claim_that_is_not_bound_is_no_lack_of_room() -> None:
    """The scheduler reports both in the same way."""
    unbound = pod(status="False", reason="Unschedulable", message="pod has unbound immediate PersistentVolumeClaims")
    assert delay_of(unbound, [])[0].startswith(f"pod p waits for a volume (since {SINCE}): pod has unbound")
    missing = pod(status="False", reason="Unschedulable", message='persistentvolumeclaim "c" not found')
    assert delay_of(missing, [])[1]
    full = pod(status="False", reason="Unschedulable", message="0/1 nodes: Insufficient cpu")
    assert delay_of(full, [])[0] == f"no node has room for pod p (since {SINCE}): 0/1 nodes: Insufficient cpu"


@pytest.mark.parametrize("reason", ["FailedCreate", "JobCreationFailed", "TrainJobResourcesCreationFailed"])
def test_whatever_creates_pods_may_be_refused(reason: str) -> None:
    assert why_no_pods([event(reason, "exceeded quota", "tiny-node-0", "Job")], []) == "exceeded quota"
    assert why_no_pods([event("BackOff", "again", "tiny-node-0", "Job")], []) == ""
