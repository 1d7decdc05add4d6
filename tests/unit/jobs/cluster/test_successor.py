"""Tests of safepoint.jobs.cluster.changes.successor that need no cluster; tests/cluster has the others."""

from typing import Any, cast

import pytest

from safepoint.errors import UsageError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.plans import plans_among
from safepoint.jobs.cluster.changes.successor import Successions
from safepoint.jobs.cluster.objects import Object, name_of
from safepoint.jobs.cluster.spec import PLAN, is_plan, plan_name
from safepoint.jobs.cluster.state import Observed, describe


class Created:
    """A namespace that accepts one object, and no Secrets."""

    def may(self, verb: str, kind: str) -> bool:
        return False

    def create(self, kind: str, body: Object) -> Object:
        assert kind == "trainjobs"
        return {**body, "metadata": {**body["metadata"], "uid": "plan"}}


def trainjob(**annotations: str) -> dict[str, Any]:
    metadata = {"name": "tiny", "namespace": "team", "uid": "u", "creationTimestamp": "2026-11-23T10:00:00Z"}
    labels = {"kueue.x-k8s.io/queue-name": "gpus", "kueue.x-k8s.io/priority-class": "high"}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {**metadata, "annotations": annotations, "labels": labels},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {"numNodes": 2, "command": ["python3"], "args": ["train.py"], "image": "i"},
            "runtimePatches": [{"manager": "safepoint.dev/job"}],
        },
    }


def write(job: Object, num_nodes: int) -> Object:
    seen = describe(Observed(trainjob=job), place="kind")
    return Successions(cast("ClusterApi", Created())).write(job, seen, num_nodes).document


def test_a_plan_runs_nothing_and_waits_in_no_queue() -> None:
    document = write(trainjob(), 4)
    assert document["spec"] == {
        "suspend": True,
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {"numNodes": 1, "command": ["true"]},
    }
    labels = dict(document["metadata"]["labels"])
    # With no name at all, Kueue would use the queue `default`.
    assert labels.pop("kueue.x-k8s.io/queue-name") == "no-queue.safepoint.dev"
    assert labels == {"safepoint.dev/successor-of": "tiny"}
    assert is_plan(document)
    assert not is_plan(trainjob())


def test_a_plan_says_what_was_written() -> None:
    (plan,) = plans_among([trainjob(), write(trainjob(), 4)])
    assert (plan.job, plan.old_uid, plan.num_nodes, plan.uid, plan.successor) == ("tiny", "u", 4, "plan", None)


def test_a_plan_has_the_name_of_its_content() -> None:
    """A label alone hides no job."""
    document = write(trainjob(), 4)
    assert name_of(document) == plan_name(document["metadata"]["annotations"][PLAN])
    assert len(f"{name_of(document)}-model-initializer-0-0-abcde") <= 63
    assert name_of(write(trainjob(), 4)) != name_of(document)
    document["metadata"]["name"] = "other"
    assert not is_plan(document)
    assert plans_among([document]) == []


def test_the_successor_is_the_old_trainjob_with_another_number_of_nodes() -> None:
    old = trainjob(**{"safepoint.dev/nodes": "4", "safepoint.dev/suspended-by": "kim", "note": "x"})
    old["spec"]["suspend"] = True
    old["spec"]["runtimePatches"].append({"manager": "kueue.x-k8s.io/manager"})
    (plan,) = plans_among([write(old, 4)])
    assert plan.planned["spec"] == {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {"numNodes": 4, "command": ["python3"], "args": ["train.py"], "image": "i"},
        "runtimePatches": [{"manager": "safepoint.dev/job"}],
    }
    assert plan.planned["metadata"]["labels"] == old["metadata"]["labels"]
    assert plan.planned["metadata"]["annotations"] == {"note": "x", "safepoint.dev/created": "2026-11-23T10:00:00Z"}


def test_a_plan_that_is_too_large_is_refused() -> None:
    """Before the job is stopped: nothing is asked of the cluster."""
    with pytest.raises(UsageError, match=r"has 2\d\d,\d\d\d bytes, and a TrainJob has room for 253,952"):
        write(trainjob(note="x" * 260_000), 4)
