"""Tests of safepoint.jobs.cluster.watches.pod_logs."""

from collections.abc import Iterator
from typing import Any

import pytest

from safepoint.errors import NotFoundError
from safepoint.foundation import clock
from safepoint.jobs.cluster.watches.pod_logs import follow_node, read_pods
from safepoint.jobs.model.states import JobState

RUNNING, WAITING = {"running": {}}, {"waiting": {}}


def pod(uid: str, state: dict[str, Any], *, restarts: int = 0, node: int = 0) -> dict[str, Any]:
    labels = {"batch.kubernetes.io/job-completion-index": str(node)}
    status = {"name": "node", "state": state, "restartCount": restarts}
    return {"metadata": {"name": uid, "uid": uid, "labels": labels}, "status": {"containerStatuses": [status]}}


class Logs:
    """The logs of pods. A list of texts is what one request after the other answers; None is a refusal."""

    def __init__(self, **answers: list[str | None]) -> None:
        self.answers = answers

    def log(self, pod: str, container: str, *, follow: bool = False, previous: bool = False) -> Iterator[str]:
        answer = self.answers[f"{pod}_previous" if previous else pod].pop(0)
        if answer is None:
            raise NotFoundError("nothing yet")
        yield from answer.split()


def follow(api: Logs, *seen: tuple[JobState, list[Any]] | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(clock, "sleep", lambda _: None)
    looks = iter(seen)

    def look() -> tuple[JobState, list[Any]]:
        found = next(looks)
        if found is None:
            raise NotFoundError("no such job")
        return found

    return [line.text for line in follow_node(api, look)]  # type: ignore[arg-type]


def test_the_first_pod_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was just submitted has no pod, then one without a container."""
    looks = [
        (JobState.QUEUED, []),
        (JobState.STARTING, [pod("a", WAITING)]),
        (JobState.RUNNING, [pod("a", RUNNING), pod("b", RUNNING, node=1)]),
        (JobState.COMPLETE, [pod("a", {"terminated": {}})]),
    ]
    assert follow(Logs(a=["one two"]), *looks, monkeypatch=monkeypatch) == ["one", "two"]


def test_a_pod_that_has_written_nothing_yet_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server has no log of it then, and says so."""
    running = (JobState.RUNNING, [pod("a", RUNNING)])
    looks = [running, running, (JobState.COMPLETE, [])]
    assert follow(Logs(a=[None, "one"]), *looks, monkeypatch=monkeypatch) == ["one"]


def test_pods_after_an_interruption_are_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [
        (JobState.RUNNING, [pod("a", RUNNING)]),
        (JobState.RESTARTING, [pod("a", RUNNING, restarts=1)]),
        (JobState.PREEMPTED, []),
        (JobState.RUNNING, [pod("b", RUNNING)]),
        (JobState.SUSPENDED, []),
    ]
    assert follow(Logs(a=["one", "two"], b=["three"]), *looks, monkeypatch=monkeypatch) == ["one", "two", "three"]


def test_what_a_container_wrote_before_its_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(JobState.RUNNING, [pod("a", RUNNING, restarts=2)]), (JobState.COMPLETE, [])]
    assert follow(Logs(a=["two"], a_previous=["one"]), *looks, monkeypatch=monkeypatch) == ["one", "two"]


def test_a_job_that_is_deleted_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(JobState.RUNNING, [pod("a", RUNNING)]), None]
    assert follow(Logs(a=["one"]), *looks, monkeypatch=monkeypatch) == ["one"]
    with pytest.raises(NotFoundError, match="no such job"):
        follow(Logs(), None, monkeypatch=monkeypatch)


def test_a_job_without_a_pod_that_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError, match="is Suspended and has no pods"):
        follow(Logs(), (JobState.SUSPENDED, []), monkeypatch=monkeypatch)
    with pytest.raises(NotFoundError, match="has no pods"):
        list(read_pods(Logs(), lambda: (JobState.QUEUED, [])))  # type: ignore[arg-type]
