"""Tests of safepoint.jobs.cluster.changes.submission with an API that is injected; tests/cluster has the others."""

from typing import Any, cast

import pytest

from safepoint.errors import AccessDeniedError, TransientError, UsageError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes import submission
from safepoint.jobs.cluster.changes.successor import Successions
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.helper.helper_objects import HelperRequest, PodBasis, helper_job
from safepoint.jobs.cluster.manifests import Manifests, Runtime, manifests_for
from safepoint.jobs.cluster.objects import name_of, owners_of
from safepoint.jobs.cluster.spec import ClusterSpec
from safepoint.jobs.cluster.state import Observed, describe
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


@pytest.mark.parametrize("ahead_s", [-86400, 0, 86400])
@pytest.mark.parametrize(("age_s", "is_left"), [(60, True), (3600, False)])
def test_the_age_of_an_object_is_by_the_clock_of_the_cluster(
    age_s: float, is_left: bool, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of a laptop may be wrong, and another `submit` may be about to create the job of a new object."""
    namespace = Kept()
    for kind, item in manifests().before:
        namespace.create(kind, item)
    created_s = clock.parse_utc(namespace.kept["configmaps"][0]["metadata"]["creationTimestamp"])
    monkeypatch.setattr(namespace, "now_s", lambda: created_s + age_s)
    monkeypatch.setattr(clock, "wall_s", lambda: created_s + age_s + ahead_s)
    submission.repair(as_api(namespace))
    assert any(namespace.kept.values()) is is_left


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


def test_a_helper_whose_creation_was_not_answered_is_found() -> None:
    """The API server adds defaults to a Job, so its content is not the one that was sent."""
    request = HelperRequest(arguments=("x",), claims=("ckpt",), is_read_only=True)
    wanted = helper_job("safepoint-helper-0", request, PodBasis(pod={}, container={}, image="i", origin="x"))
    made = {**wanted, "metadata": {"name": "safepoint-helper-0", "uid": "u"}}
    namespace = Kept(jobs=[{**made, "spec": {**wanted["spec"], "parallelism": 1, "suspend": False}}])

    def lose(*_: object) -> Any:
        raise TransientError("lost")

    namespace.create = lose
    assert submission.create(as_api(namespace), "jobs", wanted)["metadata"]["uid"] == "u"


def test_the_objects_of_a_job_stay_if_its_plan_is_deleted_before_the_job() -> None:
    """`scale` was killed, and a person deletes the plan by hand."""
    namespace, made = Kept(), manifests()
    job = submission.create_job(as_api(namespace), made)
    plans = Successions(as_api(namespace))
    plan = plans.write(job, describe(Observed(trainjob=job), place="kind"), 2)
    namespace.denied = {"delete trainjobs"}
    with pytest.raises(AccessDeniedError):
        plans.release(plan, job, describe(Observed(trainjob=job), place="kind"))
    kept = [item for kind in ("configmaps", "trainingruntimes") for item in namespace.kept[kind]]
    assert [owners_of(item) for item in kept] == [{job["metadata"]["uid"], plan.uid}] * 2


@pytest.mark.parametrize("address", ["https://kim:hunter2@index.example/simple", "https://token@index.example"])
def test_a_password_in_an_address_does_not_get_into_a_trainjob(address: str) -> None:
    """The message names what pods can use: they have no configuration of pip, and no ~/.netrc."""
    for given in ({"env": {"PIP_INDEX_URL": address}}, {"packages": ("peft",), "package_indexes": (address,)}):
        with pytest.raises(UsageError) as raised:
            ClusterSpec(name=JOB, program=("a.py",), **given)  # pyright: ignore[reportArgumentType]
        said = f"{raised.value} {raised.value.hint}"
        assert address not in said
        assert "netrc" not in said
        assert "add the key PIP_INDEX_URL with the whole address to a Secret" in said
    ClusterSpec(name=JOB, program=("a.py",), env={"PIP_INDEX_URL": "https://index.example/simple", "MAIL": "a@b.c"})
