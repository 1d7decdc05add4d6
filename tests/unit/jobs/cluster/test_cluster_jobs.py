"""Tests of safepoint.jobs.cluster.cluster_jobs with an API that is injected; tests/cluster has the others."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from safepoint.cli.job_answers import useful_commands
from safepoint.errors import AccessDeniedError, ConflictError, NotFoundError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.objects import Object, name_of
from safepoint.jobs.cluster.spec import ClusterSpec
from safepoint.jobs.cluster.state import Observed, describe
from safepoint.jobs.cluster.transport.failures import AlreadyExistsError, BusyError, NotAdmittedError
from safepoint.jobs.cluster.watches.job_watch import JobWatch
from safepoint.jobs.model.states import JobState
from safepoint.settings.run_settings import RunSettings
from tests.support.cluster.plans import plan_for
from tests.support.cluster.workspace import runtime


class Namespace:
    """A namespace with the objects that are given, in a cluster with one runtime. It accepts new objects.

    Args:
        refused: the kinds of objects that you may not create.
        failure: what the creation of a TrainJob raises.
        objects: by kind.
    """

    has_trainer = True
    versions: tuple[str, ...] = ()

    namespace = "team"
    connection = SimpleNamespace(name="kind")

    def __init__(self, *, refused: str = "", failure: Exception | None = None, **objects: list[Any]) -> None:
        self._refused, self._failure, self._objects = refused, failure, objects
        self.deleted: list[str] = []
        self.requests: list[str] = []

    def check_name(self, name: str) -> None: ...

    def now_s(self) -> float:
        return clock.wall_s()

    def may(self, verb: str, kind: str) -> bool:
        self.requests.append(f"ask {kind}")
        return kind != self._refused

    def serves(self, kind: str) -> bool:
        return self.has_trainer

    def versions_of(self, kind: str) -> list[str]:
        return [*self.versions]

    def version_of(self, kind: str) -> str:
        return "v1alpha1"

    def asked_ahead(self, wanted: list[tuple[str, str]]) -> AbstractContextManager[None]:
        self.asked = [kind for kind, _ in wanted]
        return nullcontext()

    def find(self, kind: str, name: str) -> Object | None:
        self.requests.append(f"get {kind}")
        if kind == "clustertrainingruntimes":
            return runtime()
        return next((item for item in self._objects.get(kind, []) if name_of(item) == name), None)

    def get(self, kind: str, name: str) -> Object:
        found = self.find(kind, name)
        assert found is not None
        return found

    def objects(self, kind: str, **_: object) -> list[Object]:
        self.requests.append(f"list {kind}")
        return self._objects.get(kind, [])

    def create(self, kind: str, body: Object) -> Object:
        self.requests.append(f"create {kind}")
        if kind == self._refused:
            raise AccessDeniedError(f"you may not create {kind}")
        if kind == "trainjobs" and self._failure is not None:
            raise self._failure
        if any(name_of(item) == name_of(body) for item in self._objects.get(kind, [])):
            raise AlreadyExistsError(f"{kind} {name_of(body)} exists")
        return {**body, "metadata": {**body["metadata"], "uid": kind}}

    def patch(self, kind: str, name: str, change: Object) -> Object:
        self.requests.append(f"patch {kind}")
        return change

    def delete(self, kind: str, name: str, *, uid: str = "") -> None:
        self.deleted.append(kind)


def jobs_of(namespace: Namespace) -> ClusterJobs:
    return ClusterJobs(cast("ClusterApi", namespace))


CLAIM: dict[str, Any] = {"metadata": {"name": "ckpt"}, "spec": {"accessModes": ["ReadWriteMany"]}}
SPEC = ClusterSpec(
    name="tiny", program=("train.py",), files={"train.py": b""}, env={"HF_TOKEN": "secret"}, grace_s=90
)


def test_a_variable_that_may_be_a_secret_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """By every caller: the command and the SDK."""
    jobs_of(Namespace()).submit(SPEC)
    (record,) = caplog.records
    assert record.getMessage() == "env has HF_TOKEN, which all readers of the TrainJob can see: use a Secret"


def test_a_grace_period_that_the_job_does_not_get_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert jobs_of(Namespace(refused="trainingruntimes")).submit(SPEC).grace_s == 60
    assert "job tiny has the grace period of its runtime, 60 s, and not 90 s" in caplog.text


@pytest.mark.parametrize(
    ("interrupted", "is_carried_out", "deleted"),
    [
        ("create configmaps", False, []),
        ("create configmaps", True, []),
        ("create trainingruntimes", False, []),
        ("create trainingruntimes", True, ["trainingruntimes", "configmaps"]),
        ("create trainjobs", False, []),
        ("create trainjobs", True, []),
        ("patch configmaps", True, ["trainjobs", "trainingruntimes", "configmaps"]),
    ],
)
def test_an_interrupt_leaves_nothing_that_was_created(
    interrupted: str,
    is_carried_out: bool,
    deleted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Unless the job may exist, because its creation was not answered.

    The config map stays if another object may be created later: with it, the next submit finds that object.
    """
    namespace = Namespace()
    verb, kind = interrupted.split()
    method = getattr(namespace, verb)

    def request(what: str, *arguments: Any) -> Object:
        found = method(what, *arguments) if is_carried_out or what != kind else {}
        if verb == "create" and found:
            namespace._objects.setdefault(what, []).append(found)
        if what == kind:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(namespace, verb, request)
    with pytest.raises(KeyboardInterrupt):
        jobs_of(namespace).submit(SPEC)
    assert namespace.deleted == deleted
    assert ("job tiny was submitted: it may exist" in caplog.text) == (kind == "trainjobs")


@pytest.mark.parametrize(
    ("failure", "deleted"),
    [
        (NotAdmittedError("failed calling webhook"), ["trainingruntimes", "configmaps"]),
        (BusyError("busy"), []),
    ],
)
def test_what_was_made_for_a_job_that_was_not_admitted_is_deleted(failure: Exception, deleted: list[str]) -> None:
    """If the cluster was busy, the job may be created later, so its objects stay."""
    namespace = Namespace(failure=failure)
    with pytest.raises(type(failure)):
        jobs_of(namespace).submit(SPEC)
    assert namespace.deleted == deleted


def test_a_cluster_without_trainer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty list would mean that there are no jobs; also when a job is named."""
    monkeypatch.setattr(Namespace, "has_trainer", False)
    jobs = jobs_of(Namespace())
    commands: list[Callable[[], object]] = [jobs.jobs, lambda: jobs.job("tiny"), lambda: jobs.delete("tiny")]
    for command in commands:
        with pytest.raises(NotFoundError, match="cluster kind has no Kubeflow Trainer"):
            command()
    monkeypatch.setattr(Namespace, "versions", ("v1beta1", "v1"))
    for command in commands:
        with pytest.raises(NotFoundError, match=r"has the API v1beta1, v1, and .* uses the API v1alpha1"):
            command()
    monkeypatch.setattr(Namespace, "has_trainer", True)
    assert jobs.jobs() == []


def test_the_requests_of_a_submit() -> None:
    """Kubeflow's client sends three: two for the runtime, and one that creates the TrainJob."""
    namespace = Namespace(localqueues=[{"metadata": {"name": "gpus"}}], persistentvolumeclaims=[CLAIM])
    settings = RunSettings(output_dir="pvc://ckpt/tiny")
    job = ClusterSpec(
        name="tiny", program=("train.py",), files={"train.py": b""}, num_nodes=2, queue="gpus", settings=settings
    )
    jobs_of(namespace).submit(job)
    assert namespace.requests == [
        "list configmaps",
        "get trainjobs",
        "get trainingruntimes",
        "get clustertrainingruntimes",
        "get persistentvolumeclaims",
        "get localqueues",
        "create configmaps",
        "create secrets",
        "create trainjobs",
        "patch secrets",
        "patch configmaps",
    ]
    # All at once, so that a slow answer is waited for only once.
    assert namespace.asked == [request.removeprefix("get ") for request in namespace.requests[1:6]]


def test_what_a_killed_submit_has_left_gets_the_owner_before_the_config_map() -> None:
    """The next `submit` looks for objects without an owner only if a config map has none."""
    config_map = dict(jobs_of(Namespace()).manifests(SPEC).before)["configmaps"]
    label = {"safepoint.dev/job": "tiny"}
    config_map["metadata"]["creationTimestamp"] = clock.utc_now()
    left = {"metadata": {"name": "tiny-nodes-00000000", "labels": label}}
    [own_runtime] = [item for kind, item in jobs_of(Namespace()).manifests(SPEC).before if kind == "trainingruntimes"]
    runtimes = [{**own_runtime, "metadata": {"name": name_of(own_runtime), "labels": label}}]
    namespace = Namespace(configmaps=[config_map], secrets=[left], trainingruntimes=runtimes)
    for item in (left, *runtimes):
        item["metadata"]["creationTimestamp"] = clock.utc_now()
    jobs_of(namespace).submit(replace(SPEC, grace_s=None))
    changes = [request for request in namespace.requests if request.split()[0] in {"create", "patch"}]
    assert changes == [
        "create configmaps",
        "create trainjobs",
        "patch secrets",
        "patch trainingruntimes",
        "patch configmaps",
    ]


def test_a_submit_continues_a_scale_although_there_is_no_trainjob() -> None:
    """`scale` has deleted the TrainJob, and was killed before it created the next one."""
    successor = trainjob("tiny", "")
    owner = {"metadata": {"name": "x", "labels": {"safepoint.dev/job": "tiny"}, "ownerReferences": [{"uid": "plan"}]}}
    namespace = Namespace(configmaps=[owner], trainjobs=[plan_for(successor, job="tiny")])
    created = namespace.create

    def create(kind: str, body: Object) -> Object:
        item = created(kind, body)
        namespace._objects[kind] = [*namespace._objects[kind], item]
        return item

    def delete(kind: str, name: str, *, uid: str = "") -> None:
        namespace._objects[kind] = [item for item in namespace._objects[kind] if name_of(item) != name]

    setattr(namespace, "create", create)  # noqa: B010
    setattr(namespace, "delete", delete)  # noqa: B010
    with pytest.raises(ConflictError, match="there is a job tiny"):
        jobs_of(namespace).submit(SPEC)
    assert [name_of(item) for item in namespace.objects("trainjobs")] == ["tiny"]


def trainjob(name: str, uid: str, **labels: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "team", "uid": uid, "creationTimestamp": "2026-11-23T10:00:00Z"}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {**metadata, "annotations": {}, "labels": labels},
        "spec": {"runtimeRef": {"name": "torch"}, "trainer": {"numNodes": 1}, "suspend": True},
    }


@pytest.mark.parametrize("is_old_gone", [False, True])
def test_a_watch_sees_that_a_stopped_job_is_being_scaled(is_old_gone: bool) -> None:
    """It is not suspended: a watch of it must go on. While neither TrainJob exists, the plan describes the job."""
    old, successor = trainjob("tiny", "old"), trainjob("tiny", "")
    plan = plan_for(successor, job="tiny", is_released=is_old_gone)
    trainjobs = [plan] if is_old_gone else [old, plan]
    watch = JobWatch(cast("ClusterApi", Namespace()))
    for item in [*trainjobs, trainjob("other", "o")]:
        watch._note("trainjobs", "ADDED", item)
    found = [describe(seen, place="kind") for seen in watch.jobs()]
    assert {job.name: (job.state, job.message) for job in found} == {
        "tiny": (JobState.RESTARTING, "its number of nodes changes to 3"),
        "other": (JobState.SUSPENDED, ""),
    }


def event(kind: str, name: str, minute: int) -> dict[str, Any]:
    about = {"kind": kind, "name": name}
    return {
        "involvedObject": about,
        "reason": "R",
        "message": name,
        "lastTimestamp": f"2026-11-23T10:{minute:02}:00Z",
    }


def test_events_of_deleted_objects_are_events_of_their_job() -> None:
    own = [
        event("TrainJob", "tiny", 0),
        event("JobSet", "tiny", 1),
        event("Job", "tiny-node-0", 2),
        event("Pod", "tiny-node-0-0-abcde", 3),
        event("Pod", "tiny-node-0-11-x2345", 4),
        event("Pod", "tiny-model-initializer-0-0-abcde", 5),
        event("Workload", "trainjob-tiny-0a1b2", 6),
    ]
    of_others = [
        event("TrainJob", "tiny-node", 7),
        event("Pod", "tiny-node-node-0-0-abcde", 7),
        event("Pod", "tiny-2-node-0-0-abcde", 7),
        event("Pod", "tiny-node-0-0-abcde-0", 7),
        event("Workload", "trainjob-tiny-node-0a1b2", 7),
        {**event("Pod", "tiny-node-0-0-abcde", 0), "lastTimestamp": "2026-11-23T09:59:59Z"},
    ]
    namespace = Namespace(trainjobs=[trainjob("tiny", "u")], events=[*reversed(own), *of_others])
    found = jobs_of(namespace).events("tiny")
    assert [one.cause for one in found] == [one["message"] for one in own]


def test_only_a_job_that_can_be_resumed_is_offered_to_be_resumed() -> None:
    failed = trainjob("tiny", "u")
    failed["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    for document, commands in ((failed, ["logs", "delete"]), (trainjob("tiny", "u"), ["resume", "logs", "delete"])):
        job = describe(Observed(trainjob=document), place="kind")
        assert [line.split()[1] for line in useful_commands(job)] == commands


@pytest.mark.parametrize("ask", [ClusterJobs.job, ClusterJobs.delete, ClusterJobs.storage_of])
def test_a_misspelt_name_suggests_the_nearest_job(ask: Callable[[ClusterJobs, Any], object]) -> None:
    """If the jobs cannot be listed, the error has no suggestion."""
    trainjobs = [{"metadata": {"name": name, "uid": name}} for name in ("train", "other")]
    jobs = jobs_of(Namespace(trainjobs=trainjobs))
    with pytest.raises(NotFoundError, match="there is no job trian in namespace team") as raised:
        ask(jobs, "trian")
    shows = "`safepoint list` with the same --on and --namespace shows the jobs"
    assert raised.value.hint == f"did you mean train? {shows}"

    class Unlisted(Namespace):
        def objects(self, kind: str, **_: object) -> list[Object]:
            raise AccessDeniedError(f"you may not list {kind}")

    with pytest.raises(NotFoundError, match="there is no job trian") as raised:
        ask(jobs_of(Unlisted(trainjobs=trainjobs)), "trian")
    assert raised.value.hint == "`safepoint list` with the same --on and --namespace shows the jobs"
