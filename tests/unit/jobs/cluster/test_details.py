"""Tests of safepoint.jobs.cluster.watches.details."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

from safepoint.cli.job_answers import page
from safepoint.errors import NotFoundError, SafepointError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.state import ClusterJob, Observed, describe
from safepoint.jobs.cluster.transport.failures import BusyError
from safepoint.jobs.cluster.watches.details import details_of

NOTHING = {"last_lines": [], "queue_place": None}
_ROOT = "/apis/visibility.kueue.x-k8s.io"


class Cluster:
    """A cluster with Kueue's server of places in queues, unless `failure` is given."""

    namespace = "team"

    def __init__(self, *, failure: SafepointError | None = None) -> None:
        self._failure = failure

    def check_name(self, name: str) -> None: ...

    def log(self, pod: str, container: str, *, tail: int) -> Iterator[str]:
        if self._failure is not None:
            raise self._failure
        yield from ([f"{pod} {number}" for number in range(20)] + ["0%\r50%\r100%\r"])[-tail:]

    def read_once(self, path: str) -> Any:
        if self._failure is not None:
            raise self._failure
        if path == _ROOT:
            return {"preferredVersion": {"version": "v1beta2"}}
        assert path == f"{_ROOT}/v1beta2/namespaces/team/localqueues/gpus/pendingworkloads"
        owners = [{"metadata": {"ownerReferences": [{"uid": uid}]}} for uid in ("other", "u")]
        return {"items": [{**item, "positionInLocalQueue": number} for number, item in enumerate(owners)]}


def pod(node: int, finished: str, code: int = 1) -> dict[str, Any]:
    ended = {"terminated": {"exitCode": code, "finishedAt": finished}}
    labels = {"batch.kubernetes.io/job-completion-index": str(node)}
    status = {"containerStatuses": [{"name": "node", "state": ended}]}
    return {"metadata": {"name": f"p{node}", "labels": labels}, "status": status}


def job(*, queue: str | None = None, failed: bool = False, pods: tuple[Any, ...] = ()) -> ClusterJob:
    labels = {} if queue is None else {"kueue.x-k8s.io/queue-name": queue}
    conditions = [{"type": "Failed", "status": "True"}] if failed else []
    metadata = {"name": "tiny", "namespace": "team", "uid": "u", "labels": labels}
    document = {"metadata": metadata, "spec": {"suspend": True}, "status": {"conditions": conditions}}
    return describe(Observed(trainjob=document, pods=pods), place="kind")


def details(cluster: Cluster, of: ClusterJob, *pods: Any) -> dict[str, Any]:
    return details_of(cast("ClusterApi", cluster), of, lambda _: pods)


def test_the_last_lines_of_the_pod_that_failed_first() -> None:
    """The other pods fail because of it."""
    pods = (pod(0, "2026-11-23T10:00:02Z"), pod(1, "2026-11-23T10:00:01Z"))
    failed = job(failed=True, pods=pods)
    found = details(Cluster(), failed, *pods)
    assert found["last_lines"] == [*[f"p1 {number}" for number in range(11, 20)], "100%"]
    shown = page(failed, None, [], None, details=found)
    assert shown[shown.index("  last lines of the output") + 1] == "    p1 11"


def test_the_place_in_the_queue() -> None:
    waiting = job(queue="gpus")
    found = details(Cluster(), waiting)
    assert found == {"last_lines": [], "queue_place": 2}
    assert "  position    number 2 of the jobs that wait in the queue" in page(waiting, None, [], None, details=found)


def test_a_version_that_leads_to_another_path() -> None:
    """The server of places is an extension of the cluster. No further request is sent."""

    class Hostile(Cluster):
        def check_name(self, name: str) -> None:
            ClusterApi.check_name(cast("ClusterApi", self), name)

        def read_once(self, path: str) -> Any:
            assert path == _ROOT
            return {"preferredVersion": {"version": "../../api/v1/namespaces/kube-system/secrets?"}}

    assert details(Hostile(), job(queue="gpus")) == NOTHING


@pytest.mark.parametrize("failure", [NotFoundError("no such API"), BusyError("503"), None])
def test_what_cannot_be_read_is_missing(failure: SafepointError | None) -> None:
    for of in (job(queue="gpus"), job(failed=True)) if failure else (job(), job(failed=True)):
        assert details(Cluster(failure=failure), of, *([pod(0, "x")] if failure else [])) == NOTHING
