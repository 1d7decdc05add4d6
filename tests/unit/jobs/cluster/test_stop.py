"""Tests of safepoint.jobs.cluster.suspension.stop with an API that is injected; tests/cluster has the others."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from safepoint.errors import AccessDeniedError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from tests.support.cluster.kept import JOB, Kept, running_pod, trainjob, workload_of

QUEUE = {"kueue.x-k8s.io/queue-name": "gpus"}


def queued(*, denied: set[str]) -> Kept:
    """A job in a queue that trains, and a user without some rights."""
    job = trainjob(**QUEUE)
    claim = {"metadata": {"name": "ckpt"}, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
    return Kept(
        denied=denied,
        trainjobs=[job],
        pods=[running_pod()],
        workloads=[workload_of(job)],
        persistentvolumeclaims=[claim],
    )


def jobs_of(namespace: Kept) -> ClusterJobs:
    return ClusterJobs(cast("ClusterApi", namespace))


@pytest.mark.parametrize("denied", ["patch", "list"])
@pytest.mark.parametrize("change", [lambda jobs: jobs.suspend(JOB), lambda jobs: jobs.scale(JOB, 2)])
def test_a_job_in_a_queue_is_stopped_only_through_its_workload(
    change: Callable[[ClusterJobs], Any], denied: str
) -> None:
    """Kueue would start it again at once, so nothing is stopped; also if the Workload cannot be found."""
    namespace = queued(denied={f"{denied} workloads", "create pods"})
    with pytest.raises(
        AccessDeniedError, match=f"job tiny cannot be stopped: .*may not {denied} workloads"
    ) as raised:
        change(jobs_of(namespace))
    assert "resources [workloads]" in str(raised.value.hint)
    assert namespace.changes == []
    jobs_of(namespace).jobs()
    assert namespace.changes == []
