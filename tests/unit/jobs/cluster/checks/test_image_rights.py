"""Tests of safepoint.jobs.cluster.checks.image_rights: what is known of images before a pod runs."""

import copy
import re
from typing import Any, cast

import pytest

from safepoint.errors import AccessDeniedError, SafepointError, UnsupportedError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.checks.image_rights import (
    check_may_make_images,
    is_about_rights,
    refusal_of_pod,
    why_not_in_namespace,
    why_not_with,
)
from safepoint.jobs.cluster.checks.requirements import manifests_of
from safepoint.jobs.cluster.examination import _images
from safepoint.jobs.cluster.manifests import Runtime
from safepoint.jobs.cluster.spec import ClusterSpec
from safepoint.jobs.cluster.transport.admission import Rule, refused
from safepoint.jobs.cluster.transport.failures import BusyError
from safepoint.settings.run_settings import RunSettings
from tests.support.cluster.kept import Kept
from tests.support.cluster.workspace import runtime

OK = "possible with runtime torch-distributed, if its container image"


class Namespace(Kept):
    """A namespace with labels, whose cluster may refuse a pod."""

    def __init__(self, *, refuses: SafepointError | None = None, **labels: str) -> None:
        claim = {
            "metadata": {"name": "data"},
            "spec": {"accessModes": ["ReadWriteOnce"]},
            "status": {"phase": "Bound"},
        }
        super().__init__(trainingruntimes=[runtime()], persistentvolumeclaims=[claim])
        self.labels, self.refuses = labels, refuses
        self.created: list[tuple[str, Any, bool]] = []

    def read(self, path: str) -> Any:
        assert path == "/api/v1/namespaces/team"
        self._check("get", "namespaces")
        return {
            "metadata": {"labels": {f"pod-security.kubernetes.io/{name}": text for name, text in self.labels.items()}}
        }

    def create(self, kind: str, body: Any, *, is_dry_run: bool = False) -> Any:
        self.created.append((kind, body, is_dry_run))
        if self.refuses is not None:
            raise self.refuses
        return body

    @property
    def api(self) -> ClusterApi:
        return cast("ClusterApi", self)


def runtime_with(pod: dict[str, Any] | None = None, container: dict[str, Any] | None = None) -> Runtime:
    """A runtime with these fields in its pods, and in their container that trains."""
    found = Runtime(document=copy.deepcopy(runtime()))
    found.pod.update(pod or {})
    found.container.update(container or {})
    return found


def patch(pod: dict[str, Any]) -> Any:
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    return {"manager": "me", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}


@pytest.mark.parametrize(
    ("labels", "is_refused"),
    [
        ({"enforce": "baseline"}, True),
        ({"enforce": "restricted"}, True),
        ({"enforce": "privileged"}, False),
        ({"warn": "restricted"}, False),
        ({}, False),
    ],
)
def test_a_namespace_with_a_security_standard(labels: dict[str, Any], is_refused: bool) -> None:
    why = why_not_in_namespace(Namespace(**labels).api)
    assert (why is not None) is is_refused
    if why is not None:
        assert f"namespace team enforces the Pod Security Standard {labels['enforce']}" in why
        assert "SYS_ADMIN" in why


def test_a_namespace_that_you_may_not_read() -> None:
    """Nothing is known against images."""
    namespace = Namespace(enforce="restricted")
    namespace.denied = {"get namespaces"}
    assert why_not_in_namespace(namespace.api) is None


@pytest.mark.parametrize(
    ("pod", "container", "why"),
    [
        ({"securityContext": {"runAsUser": 1000}}, None, "do not run as root, but as user 1000"),
        ({"securityContext": {"runAsNonRoot": True}}, None, "do not run as root"),
        (None, {"securityContext": {"runAsUser": 7}}, "as user 7"),
        ({"securityContext": {"runAsUser": 1000}}, {"securityContext": {"runAsUser": 0}}, None),
        ({"securityContext": {"fsGroup": 1000}}, None, None),
        (None, {"securityContext": {"allowPrivilegeEscalation": False}}, "allowPrivilegeEscalation: false"),
        ({"hostUsers": False}, None, "hostUsers: false"),
        (None, None, None),
    ],
)
def test_a_runtime(pod: dict[str, Any] | None, container: dict[str, Any] | None, why: str | None) -> None:
    found = why_not_with(runtime_with(pod, container))
    assert found is None if why is None else found is not None and why in found


def test_a_patch_of_the_user_counts() -> None:
    of_user = runtime_with({"securityContext": {"runAsUser": 1000}})
    assert why_not_with(of_user, [patch({"securityContext": {"runAsUser": 0}})]) is None
    assert why_not_with(runtime_with(), [patch({"hostUsers": False})]) is not None
    user = {"securityContext": {"runAsUser": 7}}
    assert why_not_with(runtime_with(), [patch({"containers": [{"name": "node", **user}]})]) is not None
    assert why_not_with(runtime_with(), [patch({"containers": [{"name": "logs", **user}]})]) is None


def test_a_pod_that_the_cluster_refuses() -> None:
    """Such as OpenShift, by its security context constraints. Nothing is created."""
    namespace = Namespace(refuses=AccessDeniedError("unable to validate against any security context constraint"))
    error = refusal_of_pod(namespace.api)
    assert error is namespace.refuses
    assert error is not None
    assert is_about_rights(error)
    [(kind, pod, is_dry_run)] = namespace.created
    assert (kind, is_dry_run) == ("pods", True)
    assert "SYS_ADMIN" in pod["spec"]["containers"][0]["securityContext"]["capabilities"]["add"]
    namespace.denied = {"create pods"}
    assert refusal_of_pod(namespace.api) is None
    assert len(namespace.created) == 1


@pytest.mark.parametrize(
    ("namespace", "found"),
    [
        (Namespace(), OK),
        (Namespace(enforce="baseline"), "not possible: namespace team enforces"),
        (Namespace(refuses=AccessDeniedError("policy")), "not possible: the cluster refuses a pod .*: policy"),
    ],
)
def test_the_finding_of_the_doctor(namespace: Namespace, found: str) -> None:
    """Jobs do not need images, so none of these is a fault."""
    finding = _images(namespace.api)
    assert finding.status == "ok"
    assert re.search(found, finding.found), finding.found


QUOTA = 'pods "d" is forbidden: exceeded quota: few, requested: pods=1, used: pods=2, limited: pods=2'


@pytest.mark.parametrize(
    ("error", "is_known"),
    [
        (refused(Rule.QUOTA, QUOTA), False),
        (refused(Rule.LIMITS, "minimum cpu usage per Container is 1, but request is 1m"), False),
        (refused(Rule.DELETION, "being terminated"), False),
        (BusyError("no answer"), False),
        (refused(Rule.POD_SECURITY, 'violates PodSecurity "baseline"'), True),
        (refused(Rule.SECURITY_CONTEXT, "unable to validate"), True),
        (refused(Rule.POLICY, "denied"), True),
        (refused(Rule.WEBHOOK, "denied"), True),
    ],
)
def test_a_pod_that_is_refused_for_another_reason_than_its_rights(error: SafepointError, is_known: bool) -> None:
    """A quota that is used up says nothing about the rights that CRIU needs."""
    finding = _images(Namespace(refuses=error).api)
    assert error.message in finding.found
    assert finding.found.startswith("not possible" if is_known else "not known")
    assert finding.status == ("ok" if is_known else "warning")
    if error.message.startswith("a quota"):
        assert "pods: 2 of 2 used, 1 more needed" in finding.found
        assert "larger quota" in finding.fix


def test_a_job_with_images_is_refused_before_anything_is_created() -> None:
    settings = RunSettings(output_dir="pvc://data/a", freeze_as_last_resort=True)
    spec = ClusterSpec(name="tiny", program=("train.py",), files={"train.py": b""}, settings=settings)
    namespace = Namespace(enforce="baseline")
    with pytest.raises(UnsupportedError, match=r"enforces the Pod Security Standard baseline.*nothing was submitted"):
        manifests_of(namespace.api, spec)
    assert namespace.created == []
    assert manifests_of(Namespace().api, spec).trainjob["metadata"]["name"] == "tiny"
    with pytest.raises(UnsupportedError, match="do not run as root"):
        check_may_make_images(Namespace().api, runtime_with({"securityContext": {"runAsNonRoot": True}}))
