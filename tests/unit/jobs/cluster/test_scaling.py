"""Tests of safepoint.jobs.cluster.suspension.scaling with an API that is injected; tests/cluster has the others."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from safepoint.errors import AccessDeniedError, ConflictError, WaitTimeoutError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes import plan_lease
from safepoint.jobs.cluster.changes.plan_lease import LEASE, PlanLease
from safepoint.jobs.cluster.changes.successor import Successions
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.objects import Object, at, name_of, texts
from safepoint.jobs.cluster.spec import is_plan
from safepoint.jobs.cluster.state import Observed, describe
from safepoint.jobs.cluster.suspension import stop
from safepoint.jobs.cluster.transport.admission import RefusedError, Rule, refused
from tests.support.cluster.kept import JOB, Kept, running_pod, trainjob

CLAIM = {"metadata": {"name": "ckpt"}, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}


def as_api(namespace: Kept) -> ClusterApi:
    return cast("ClusterApi", namespace)


def with_plan(*, pods: list[Any], denied: set[str] | None = None, **notes: str) -> Kept:
    """A job with a plan that another command has written."""
    job = trainjob()
    namespace = Kept(trainjobs=[job], pods=pods, persistentvolumeclaims=[CLAIM])
    described = describe(Observed(trainjob=job, pods=pods), place="kind")
    Successions(as_api(namespace)).write(job, described, 2, notes=notes)
    namespace.changes.clear()
    namespace.denied = denied or set()
    return namespace


def lease(age_s: float) -> dict[str, str]:
    return {LEASE: json.dumps({"holder": "other", "renewed": clock.as_utc(clock.wall_s() - age_s)})}


def ends_pods(namespace: Kept) -> Callable[[str], None]:
    """The pods end as soon as the TrainJob is suspended."""

    def after(change: str) -> None:
        found = namespace.find("trainjobs", JOB)
        if at(found, "spec", "suspend"):
            namespace.kept["pods"] = []

    return after


READS: list[Callable[[ClusterJobs], Any]] = [lambda jobs: jobs.jobs(), lambda jobs: jobs.job(JOB)]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("pods", [[], [running_pod()]])
def test_no_reader_disturbs_a_command_that_scales(read: Callable[[ClusterJobs], Any], pods: list[Any]) -> None:
    """It may wait for a save that it has requested."""
    namespace = with_plan(pods=pods, **lease(5))
    read(ClusterJobs(as_api(namespace)))
    assert namespace.changes == []


@pytest.mark.parametrize("read", READS)
def test_no_reader_stops_a_job_that_trains(
    read: Callable[[ClusterJobs], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It says which command completes the change."""
    namespace = with_plan(pods=[running_pod()], **lease(60))
    jobs = ClusterJobs(as_api(namespace))
    for _ in range(2):
        read(jobs)
    assert namespace.changes == []
    (record,) = caplog.records
    assert "`safepoint scale tiny --nnodes 2` completes the change" in record.getMessage()


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("notes", [lease(60), lease(-6000), {LEASE: "{"}, {LEASE: '{"renewed": 1}'}, {}])
def test_a_reader_continues_when_the_command_was_killed(
    read: Callable[[ClusterJobs], Any], notes: dict[str, str]
) -> None:
    """If nothing trains. A lease that is not valid, or from the future, counts for nothing."""
    namespace = with_plan(pods=[], **notes)
    namespace.after = ends_pods(namespace)
    jobs = ClusterJobs(as_api(namespace))
    for _ in range(5):
        read(jobs)
    [successor] = namespace.kept["trainjobs"]
    assert at(successor, "spec", "trainer", "numNodes") == 2


def test_the_end_of_an_attempt_is_by_the_clock_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its begin, so that its duration is right whatever the clock of this machine says."""
    namespace = with_plan(pods=[])
    namespace.after = ends_pods(namespace)
    monkeypatch.setattr(namespace, "now_s", lambda: clock.parse_utc("2026-11-23T10:30:00Z"))
    jobs = ClusterJobs(as_api(namespace))
    for _ in range(5):
        found = jobs.job(JOB)
    first = found.attempts[0]
    assert (first.started, first.ended) == ("2026-11-23T10:00:00Z", "2026-11-23T10:30:00.000Z")


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("pods", [[], [running_pod()]])
def test_a_page_that_is_open_changes_nothing(read: Callable[[ClusterJobs], Any], pods: list[Any]) -> None:
    namespace = with_plan(pods=pods, **lease(60))
    read(ClusterJobs(as_api(namespace), is_read_only=True))
    assert namespace.changes == []


@pytest.mark.parametrize("read", READS)
def test_a_viewer_sees_a_job_that_is_being_scaled(
    read: Callable[[ClusterJobs], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The plan is carried out by people who may change the job."""
    namespace = with_plan(pods=[], denied={"patch trainjobs"}, **lease(60))
    with caplog.at_level(logging.INFO):
        read(ClusterJobs(as_api(namespace)))
    assert caplog.records == []


def test_scale_holds_the_lease_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it waits for the requested save, and so other commands do nothing."""
    namespace = Kept(trainjobs=[trainjob()], pods=[running_pod()], persistentvolumeclaims=[CLAIM])
    namespace.after = ends_pods(namespace)
    monkeypatch.setattr(plan_lease, "_RENEW_S", 0.02)
    seen: list[bool] = []

    def save(*_: object, **__: object) -> Any:
        [plan] = filter(is_plan, namespace.kept["trainjobs"])
        begun = texts(plan, "metadata", "annotations")[LEASE]
        while texts(plan, "metadata", "annotations")[LEASE] == begun:
            clock.sleep(0.01)
        changes = list(namespace.changes)
        ClusterJobs(as_api(namespace)).jobs()
        renewals = f"patch trainjobs {name_of(plan)}"
        seen.append([one for one in namespace.changes if one not in {renewals, *changes}] == [])
        raise AccessDeniedError("you are not allowed to create and get pods/exec")

    monkeypatch.setattr(stop, "request_save", save)
    scaled = ClusterJobs(as_api(namespace)).scale(JOB, 2)
    assert seen == [True]
    assert scaled.num_nodes == 2
    [successor] = namespace.kept["trainjobs"]
    assert LEASE not in texts(successor, "metadata", "annotations")


def test_a_command_that_changes_jobs_stops_one_that_trains_with_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan was left by a killed `scale`."""
    namespace = with_plan(pods=[running_pod()], **lease(60))
    namespace.after = ends_pods(namespace)
    saves: list[object] = []

    def save(*_: object, **__: object) -> Any:
        saves.append(1)
        raise AccessDeniedError("you are not allowed to create and get pods/exec")

    monkeypatch.setattr(stop, "request_save", save)
    assert ClusterJobs(as_api(namespace)).scale(JOB, 2).num_nodes == 2
    assert saves == [1]


def test_a_command_that_stops_waiting_gives_the_lease_back(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = Kept(trainjobs=[trainjob()], pods=[running_pod()], persistentvolumeclaims=[CLAIM])

    def save(*_: object, **__: object) -> Any:
        raise AccessDeniedError("you are not allowed to create and get pods/exec")

    monkeypatch.setattr(stop, "request_save", save)
    with pytest.raises(WaitTimeoutError):
        ClusterJobs(as_api(namespace)).scale(JOB, 2, timeout_s=0.1)
    [plan] = filter(is_plan, namespace.kept["trainjobs"])
    assert LEASE not in texts(plan, "metadata", "annotations")


def test_only_one_of_two_commands_takes_a_free_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = with_plan(pods=[])
    versions: dict[str, int] = {}
    patched = namespace.patch

    def patch(kind: str, name: str, body: Object) -> Object:
        wanted = body["metadata"].pop("resourceVersion", None)
        if wanted != versions.get(name, wanted):
            raise ConflictError("the object has been modified")
        versions[name] = versions.get(name, 0) + 1
        return patched(kind, name, body)

    monkeypatch.setattr(namespace, "patch", patch)
    [document] = filter(is_plan, namespace.kept["trainjobs"])
    document["metadata"]["resourceVersion"] = 0
    plan = Successions(as_api(namespace)).plan(JOB)
    assert plan is not None
    seen = cast("Any", json.loads(json.dumps(plan.document)))
    one, other = PlanLease(as_api(namespace)), PlanLease(as_api(namespace))
    with one, other:
        again = replace(plan, document=seen)
        assert (one.takes(again), other.takes(again)) == (True, False)


def test_a_rule_of_the_cluster_that_refuses_the_lease_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a webhook. It is no other command that carries out the plan, so `scale` does not wait for that one."""
    namespace = with_plan(pods=[], **lease(60))
    [plan] = [item for item in namespace.kept["trainjobs"] if is_plan(item)]

    def refuse(kind: str, name: str, body: Any) -> Any:
        raise refused(Rule.WEBHOOK, 'admission webhook "a.b" denied the request: frozen')

    monkeypatch.setattr(namespace, "patch", refuse)
    with PlanLease(as_api(namespace)) as mine, pytest.raises(RefusedError, match="denied the request: frozen"):
        mine._write(plan)
