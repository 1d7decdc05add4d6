"""Tests of safepoint.jobs.cluster.changes.submission with an API that is injected; tests/cluster has the others."""

from typing import Any, cast

import pytest

from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes import submission
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.manifests import Manifests, Runtime, manifests_for
from safepoint.jobs.cluster.objects import name_of, owners_of
from safepoint.jobs.cluster.spec import ClusterSpec
from tests.support.cluster.kept import JOB, Kept
from tests.support.cluster.workspace import runtime


def manifests() -> Manifests:
    spec = ClusterSpec(name=JOB, program=("a.py",), files={"a.py": b""}, grace_s=90)
    return manifests_for(spec, Runtime(document=runtime()))


def as_api(namespace: Kept) -> ClusterApi:
    return cast("ClusterApi", namespace)


@pytest.mark.parametrize("num_owned", [0, 1, 2])
def test_delete_deletes_what_a_killed_submit_has_left(num_owned: int) -> None:
    """It was killed after the TrainJob was created, and before all objects had an owner."""
    namespace, made = Kept(), manifests()
    job = namespace.create("trainjobs", made.trainjob)
    for kind, item in made.before:
        namespace.create(kind, item)
    submission.own(as_api(namespace), job, [*reversed(made.before)][:num_owned])
    other = namespace.create("configmaps", {"metadata": {"name": "tiny-0", "labels": {"safepoint.dev/job": JOB}}})
    ClusterJobs(as_api(namespace)).delete(JOB)
    assert [name_of(item) for listed in namespace.kept.values() for item in listed] == [name_of(other)]


def test_an_object_that_the_cluster_is_about_to_delete_is_not_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same job was deleted just before: its config map has the same name."""
    namespace, made = Kept(), manifests()
    [(_, config_map)] = [one for one in made.before if one[0] == "configmaps"]
    left: Any = {**config_map["metadata"], "ownerReferences": [{"uid": "deleted"}]}
    namespace.kept["configmaps"] = [{**config_map, "metadata": {**left, "uid": "left"}}]
    pauses: list[float] = []

    def collect(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            namespace.kept["configmaps"] = []

    monkeypatch.setattr(clock, "sleep", collect)
    job = submission.create_job(as_api(namespace), made)
    [kept] = namespace.kept["configmaps"]
    assert kept["metadata"]["uid"] != "left"
    assert owners_of(kept) == {job["metadata"]["uid"]}
