"""Tests of safepoint.jobs.cluster.examination; tests/cluster/test_doctor.py has those on a cluster."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from safepoint.doctor.finding import Status
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.connection import connect_to
from safepoint.jobs.cluster.examination import (
    _NEEDED,
    _OF_METRICS,
    _OF_PLACES,
    _OF_QUEUES,
    _runtimes,
    examine_cluster,
)
from tests.support.cluster.roles import documented_roles
from tests.support.cluster.workspace import runtime
from tests.unit.jobs.cluster.test_connection import kubeconfig


@pytest.mark.parametrize("kind", ["Role", "ClusterRole"])
def test_the_roles_of_the_documentation_have_what_is_checked(kind: str, tmp_path: Path) -> None:
    """No right is missing, and none is superfluous."""
    with ClusterApi(connect_to("x", file=kubeconfig(tmp_path, "x"))) as api:
        needed = {
            (api.group_of(what), api.resource_of(what) + (f"/{part}" if part else ""), verb)
            for what, part, verbs, _ in (*_NEEDED, *_OF_QUEUES, *_OF_PLACES, *_OF_METRICS)
            for verb in verbs
            if api.is_of_cluster(what) == (kind == "ClusterRole")
        }
    [role] = [role for role in documented_roles() if role["kind"] == kind]
    found = {
        (group, what, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for what in rule["resources"]
        for verb in rule["verbs"]
    }
    assert found == needed


class Cluster:
    """A cluster with these API groups, whose user may do everything except what is denied."""

    namespace = "team"
    connection = SimpleNamespace(name="kind")
    group_of, resource_of, is_of_cluster = ClusterApi.group_of, ClusterApi.resource_of, ClusterApi.is_of_cluster
    version_of = ClusterApi.version_of

    def __init__(self, *groups: str, denied: str = "", version: str = "v1beta1") -> None:
        self._groups, self._denied, self._version = groups, denied, version
        self.asked: list[str] = []

    def read(self, path: str) -> Any:
        versions = [{"version": self._version}]
        return (
            {"groups": [{"name": group, "versions": versions} for group in self._groups]} if path == "/apis" else {}
        )

    def objects(self, kind: str) -> list[Any]:
        return []

    def rights(self) -> Any:
        return lambda verb, kind, subresource: False

    def may(self, verb: str, kind: str, *, subresource: str = "") -> bool:
        self.asked.append(f"{verb} {kind}/{subresource}")
        return self.asked[-1] != self._denied


def test_an_api_of_a_later_release_is_a_failure() -> None:
    """Without it, all jobs would seem to be in no queue."""
    for version, status in (("v1beta1", Status.OK), ("v1", Status.FAILURE)):
        cluster = Cluster("kueue.x-k8s.io", version=version)
        [found] = [one for one in examine_cluster(cast("ClusterApi", cluster)) if one.check == "kueue"]
        assert found.status is status
        assert found.found.endswith(f"API {version}")
    assert "uses the API v1beta1, which the cluster does not have" in found.why


_PLACE = "get localqueues.visibility.kueue.x-k8s.io/pendingworkloads"


def test_the_right_to_see_the_place_in_a_queue_is_named() -> None:
    """It is in an API group of its own, whose server also has LocalQueues."""
    cluster = Cluster("kueue.x-k8s.io", "visibility.kueue.x-k8s.io", denied=_PLACE)
    [found] = [one for one in examine_cluster(cast("ClusterApi", cluster)) if one.check == "rights"]
    assert (found.status, found.found) == (Status.WARNING, "you are not allowed to get localqueues/pendingworkloads")
    assert "does not show the position of a job" in found.why
    assert found.fix is not None
    assert "apiGroups [visibility.kueue.x-k8s.io], resources [localqueues/pendingworkloads]" in found.fix


@pytest.mark.parametrize("groups", [(), ("kueue.x-k8s.io",)])
def test_no_right_is_asked_for_a_server_that_the_cluster_does_not_have(groups: tuple[str, ...]) -> None:
    cluster = Cluster(*groups)
    [found] = [one for one in examine_cluster(cast("ClusterApi", cluster)) if one.check == "rights"]
    assert found.status is Status.OK
    assert _PLACE not in cluster.asked


def test_a_right_is_asked_for_by_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a review of one right, and among the rules that the cluster lists."""
    sent: list[Any] = []
    rule = {
        "verbs": ["get"],
        "apiGroups": ["visibility.kueue.x-k8s.io"],
        "resources": ["localqueues/pendingworkloads"],
    }

    def create(_: ClusterApi, kind: str, body: Any) -> Any:
        sent.append(body["spec"])
        return {"status": {"allowed": True, "resourceRules": [rule]}}

    monkeypatch.setattr(ClusterApi, "create", create)
    kind = "localqueues.visibility.kueue.x-k8s.io"
    with ClusterApi(connect_to("x", file=kubeconfig(tmp_path, "x"))) as api:
        assert api.may("get", kind, subresource="pendingworkloads")
        is_allowed = api.rights()
        assert is_allowed("get", kind, "pendingworkloads")
        assert not is_allowed("get", "localqueues", "pendingworkloads")
    asked = sent[0]["resourceAttributes"]
    assert (asked["group"], asked["resource"]) == ("visibility.kueue.x-k8s.io", "localqueues")


def test_the_copies_of_runtimes_that_jobs_have_are_not_listed() -> None:
    """A copy has the grace period of one job, and is deleted with it."""
    copy: dict[str, Any] = runtime("tiny-90s", 90)
    copy["metadata"]["labels"]["safepoint.dev/job"] = "tiny"
    api = SimpleNamespace(objects=lambda kind: [copy] if kind == "trainingruntimes" else [runtime()])
    assert _runtimes(cast("ClusterApi", api)).found == "torch-distributed (grace 60 s, fails at restart 100)"
