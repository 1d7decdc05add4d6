"""Tests of safepoint.jobs.cluster.examination; tests/cluster/test_doctor.py has those on a cluster."""

from pathlib import Path

import pytest

from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.connection import connect_to
from safepoint.jobs.cluster.examination import _NEEDED, _OF_QUEUES
from tests.support.cluster.roles import documented_roles
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
