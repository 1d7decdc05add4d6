"""Tests of safepoint.jobs.cluster.examination; tests/cluster/test_doctor.py has those on a cluster."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.connection import connect_to
from safepoint.jobs.cluster.examination import _NEEDED, _OF_QUEUES, _runtimes
from tests.support.cluster.roles import documented_roles
from tests.support.cluster.workspace import runtime
from tests.unit.jobs.cluster.test_connection import kubeconfig


@pytest.mark.parametrize("kind", ["Role", "ClusterRole"])
def test_the_roles_of_the_documentation_have_what_is_checked(kind: str, tmp_path: Path) -> None:
    """No right is missing, and none is superfluous."""
    with ClusterApi(connect_to("x", file=kubeconfig(tmp_path, "x"))) as api:
        needed = {
            (api.group_of(what), f"{what}/{part}" if part else what, verb)
            for what, part, verbs, _ in (*_NEEDED, *_OF_QUEUES)
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


def test_the_copies_of_runtimes_that_jobs_have_are_not_listed() -> None:
    """A copy has the grace period of one job, and is deleted with it."""
    copy: dict[str, Any] = runtime("tiny-90s", 90)
    copy["metadata"]["labels"]["safepoint.dev/job"] = "tiny"
    api = SimpleNamespace(objects=lambda kind: [copy] if kind == "trainingruntimes" else [runtime()])
    assert _runtimes(cast("ClusterApi", api)).found == "torch-distributed (grace 60 s, fails at 100 restarts)"
