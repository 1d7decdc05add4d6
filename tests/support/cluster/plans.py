"""TrainJobs that keep a plan of `scale`."""

import json
from typing import Any

from safepoint.jobs.cluster.changes.plans import ENDED
from safepoint.jobs.cluster.spec import PLAN, PLAN_LABEL, plan_name


def plan_for(successor: Any, *, job: str, old_uid: str = "old", nodes: int = 3, is_released: bool = True) -> Any:
    """The TrainJob that keeps a plan.

    Args:
        successor: the new TrainJob.
        job: the name of the job.
        old_uid: the uid of the TrainJob that the new one replaces.
        nodes: the new number of nodes.
        is_released: whether the plan says how the old TrainJob has ended.
    """
    content = json.dumps({"old": old_uid, "nodes": nodes, "actor": "kim", "successor": successor})
    metadata = {
        "name": plan_name(content),
        "namespace": "ns",
        "uid": "plan",
        "creationTimestamp": "2026-11-23T10:00:00Z",
        "labels": {PLAN_LABEL: job},
        "annotations": {PLAN: content, **({ENDED: "{}"} if is_released else {})},
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {"runtimeRef": {"name": "torch"}, "trainer": {"numNodes": 1, "command": ["true"]}, "suspend": True},
    }
