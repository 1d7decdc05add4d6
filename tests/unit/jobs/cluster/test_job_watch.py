"""Tests of safepoint.jobs.cluster.watches.job_watch; tests/cluster/test_watch.py has those on a cluster."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from safepoint.errors import NotFoundError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import Object, name_of
from safepoint.jobs.cluster.transport.failures import BusyError
from safepoint.jobs.cluster.watches import job_watch
from safepoint.jobs.cluster.watches.job_watch import JobWatch

JOB: Object = {"metadata": {"name": "tiny", "uid": "u"}, "spec": {}}


class Namespace:
    """A namespace with one job. Its watches of TrainJobs end at once, with an error while `is_away`."""

    connection = SimpleNamespace(name="kind")

    def __init__(self) -> None:
        self.is_away = False
        self.refused, self.answered = threading.Semaphore(0), threading.Semaphore(0)

    def objects_at(self, kind: str, **_: Any) -> tuple[list[Object], str | None]:
        self._check()
        return ([JOB] if kind == "trainjobs" else []), "1"

    def watch(self, kind: str, **_: Any) -> Iterator[tuple[str, Object]]:
        self._check()
        yield from ()

    def _check(self) -> None:
        if self.is_away:
            self.refused.release()
            raise BusyError("no route to host")
        self.answered.release()


def test_jobs_that_are_not_up_to_date_are_reported_once_for_each_outage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise `watch` would show an old state as the present one."""
    monkeypatch.setattr(job_watch, "_AGAIN_S", 0.01)
    monkeypatch.setattr(job_watch, "_OLD_S", 0.0)
    api = Namespace()
    with JobWatch(cast("ClusterApi", api)) as watch:
        for num_outages in (1, 2):
            assert [name_of(seen.trainjob) for seen in watch.jobs()] == ["tiny"]
            assert len(caplog.messages) == num_outages - 1
            api.is_away = True
            for _ in range(6):
                assert api.refused.acquire(timeout=30)
            for _ in range(3):
                assert [name_of(seen.trainjob) for seen in watch.jobs()] == ["tiny"]
            assert len(caplog.messages) == num_outages
            assert caplog.messages[-1].startswith("requests to the cluster have failed since 2")
            api.is_away = False
            while watch._unanswered:
                assert api.answered.acquire(timeout=30)


class WithoutKueue(Namespace):
    """A cluster that has no Workloads."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def objects_at(self, kind: str, **_: Any) -> tuple[list[Object], str | None]:
        self.asked.append(f"list {kind}")
        return ([], None) if kind == "workloads" else super().objects_at(kind)

    def watch(self, kind: str, **_: Any) -> Iterator[tuple[str, Object]]:
        self.asked.append(f"watch {kind}")
        if kind == "workloads":
            raise NotFoundError("the server could not find the requested resource")
        return super().watch(kind)


def test_a_kind_that_the_cluster_does_not_have_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch of Workloads would fail each second for as long as `watch` runs, on every cluster without Kueue."""
    monkeypatch.setattr(job_watch, "_AGAIN_S", 0.01)
    api = WithoutKueue()
    with JobWatch(cast("ClusterApi", api)) as watch:
        while api.asked.count("watch pods") < 10:
            clock.sleep(0.01)
        assert [name_of(seen.trainjob) for seen in watch.jobs()] == ["tiny"]
    assert [one for one in api.asked if one.endswith("workloads")] == ["list workloads"]


def test_a_kind_that_is_missing_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kueue may be installed while `watch` runs."""
    monkeypatch.setattr(job_watch, "_ABSENT_S", 0.01)
    api = WithoutKueue()
    with JobWatch(cast("ClusterApi", api)):
        while api.asked.count("list workloads") < 3:
            clock.sleep(0.01)
