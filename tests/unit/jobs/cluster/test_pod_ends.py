"""Tests of safepoint.jobs.cluster.watches.pod_ends."""

import queue
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from safepoint.errors import AccessDeniedError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import Object
from safepoint.jobs.cluster.watches import pod_ends
from safepoint.jobs.cluster.watches.pod_ends import PodEnds

_SLEEP = clock.sleep


class Changes:
    """The watch of the pods: the test says which changes it reports, and when."""

    def __init__(self, *before: tuple[str, Object]) -> None:
        self._changes: queue.SimpleQueue[tuple[str, Object] | None] = queue.SimpleQueue()
        for change in before:
            self.report(*change)

    def report(self, what: str, pod: Object) -> None:
        self._changes.put((what, pod))

    def objects_at(self, kind: str, **_: object) -> tuple[list[Object], str]:
        return [], "1"

    def watch(self, kind: str, **_: object) -> Iterator[tuple[str, Object]]:
        while (change := self._changes.get()) is not None:
            yield change
        raise AccessDeniedError("the watch has ended")

    def end(self, ends: PodEnds) -> None:
        """End the thread of the watch."""
        self._changes.put(None)
        ends._thread.join(10)
        assert not ends._thread.is_alive()


def pod(node: int, state: dict[str, Any]) -> Object:
    labels = {"batch.kubernetes.io/job-completion-index": str(node)}
    return {
        "metadata": {"name": f"tiny-node-0-{node}-abcde", "labels": labels},
        "status": {"containerStatuses": [{"name": "node", "state": state}]},
    }


def ended(code: int, message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "startedAt": "2026-11-23T10:00:00Z", "message": message}}


RUNNING: dict[str, Any] = {"running": {"startedAt": "2026-11-23T10:00:00Z"}}


@pytest.mark.parametrize(("last", "is_saved"), [(75, True), (143, False)])
def test_the_end_of_each_pod_is_waited_for(last: int, is_saved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only that of the first one: the pod of node 0, which names the step, may be the last one."""
    changes = Changes(("ADDED", pod(0, RUNNING)), ("ADDED", pod(1, RUNNING)), ("MODIFIED", pod(1, ended(75))))
    waits = threading.Event()

    def sleep(seconds: float) -> None:
        if not waits.is_set():
            waits.set()
            changes.report("MODIFIED", pod(0, ended(last, '{"currentStep": 40}')))
            changes.report("DELETED", pod(0, ended(last, '{"currentStep": 40}')))
        _SLEEP(0.01)

    monkeypatch.setattr(clock, "sleep", sleep)
    with PodEnds(cast("ClusterApi", changes), "tiny") as ends:
        while not ends._codes:
            _SLEEP(0.01)
        ends.wait_for_last()
    changes.end(ends)
    assert ends.is_saved is is_saved
    assert ends.safe_step == (40 if is_saved else None)


def test_a_deleted_pod_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node may be gone, so that no program reports how it ended."""
    monkeypatch.setattr(clock, "sleep", lambda _: pytest.fail("nothing runs any more"))
    changes = Changes(
        ("ADDED", pod(0, RUNNING)),
        ("MODIFIED", pod(1, ended(75))),
        ("DELETED", pod(0, RUNNING)),
        ("MODIFIED", pod(2, ended(75))),
    )
    with PodEnds(cast("ClusterApi", changes), "tiny") as ends:
        while len(ends._codes) < 2:
            _SLEEP(0.01)
        ends.wait_for_last()
    changes.end(ends)
    assert ends.is_saved


def test_a_job_without_pods_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a job in a queue: its watch reports nothing."""
    monkeypatch.setattr(pod_ends, "_OPEN_S", 30.0)
    changes = Changes()
    begun_s = clock.monotonic_s()
    with PodEnds(cast("ClusterApi", changes), "tiny") as ends:
        assert clock.monotonic_s() - begun_s < 15
    changes.end(ends)


def test_pods_that_there_are_when_the_context_is_entered() -> None:
    """The watch continues from the version of their list, so it does not report them."""
    asked: list[Any] = []

    class Listed(Changes):
        def objects_at(self, kind: str, **_: object) -> tuple[list[Object], str]:
            return [pod(0, RUNNING), pod(1, ended(143))], "7"

        def watch(self, kind: str, **options: object) -> Iterator[tuple[str, Object]]:
            asked.append(options["version"])
            yield from super().watch(kind)

    changes = Listed(("MODIFIED", pod(0, ended(75))))
    with PodEnds(cast("ClusterApi", changes), "tiny") as ends:
        while len(ends._codes) < 2:
            _SLEEP(0.01)
    changes.end(ends)
    assert ends._codes == {"tiny-node-0-0-abcde": 75, "tiny-node-0-1-abcde": 143}
    assert asked[0] == "7"
