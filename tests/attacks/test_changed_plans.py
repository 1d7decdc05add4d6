"""Someone who may change TrainJobs, and may not create any, changes the plan of a `scale` that another person began.

Trainer refuses to change `spec.trainer`, but not to remove it and then to add another one. So such a person can
change all of a TrainJob but its name. The next command of the other person must not create what is written there.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")

from safepoint.errors import ConflictError, NotFoundError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.successor import Successions
from safepoint.jobs.cluster.cluster_jobs import ClusterJobs
from safepoint.jobs.cluster.connection import connect_to
from safepoint.jobs.cluster.manifests import Runtime, manifests_for
from safepoint.jobs.cluster.objects import Object, at, name_of, texts
from safepoint.jobs.cluster.spec import ClusterSpec
from safepoint.jobs.cluster.state import Observed, describe
from tests.attacks.test_hostile_clusters import Handler, Server, kubeconfig
from tests.attacks.test_labels_of_others import Namespace
from tests.support.cluster.workspace import runtime

PLAN, LABEL, HISTORY = "safepoint.dev/succession", "safepoint.dev/successor-of", "safepoint.dev/history"


class Cluster(Namespace):
    """A namespace that carries out changes."""

    def answer(self, request: Handler) -> None:
        super().answer(request)
        kind, name = self._target(request.path.partition("?")[0])
        if request.command == "DELETE":
            self.objects[kind] = [item for item in self.objects[kind] if name_of(item) != name]
        if request.command == "PATCH":
            [item] = [item for item in self.objects[kind] if name_of(item) == name]
            merge(item, request.body)

    def trainjob(self, name: str = "a") -> Object | None:
        return next((item for item in self.objects["trainjobs"] if name_of(item) == name), None)

    @property
    def plan(self) -> Object:
        return next(item for item in self.objects["trainjobs"] if LABEL in texts(item, "metadata", "labels"))


def merge(item: Object, change: Object) -> None:
    for key, value in change.items():
        if isinstance(value, dict):
            merge(item.setdefault(key, {}), value)
        elif value is None:
            item.pop(key, None)
        else:
            item[key] = value


@pytest.fixture
def cluster() -> Cluster:
    """With a stopped job on one pod."""
    made = manifests_for(
        ClusterSpec(name="a", program=("train.py",), files={"train.py": b""}), Runtime(document=runtime())
    )
    found = Cluster()
    for kind, item in made.before:
        found.add(kind, item, ownerReferences=[{"uid": "old"}])
    trainjob = {**made.trainjob, "spec": {**made.trainjob["spec"], "suspend": True}}
    found.add("trainjobs", trainjob, namespace="ns", uid="old")
    return found


@pytest.fixture
def api(cluster: Cluster, tmp_path: Path) -> Iterator[ClusterApi]:
    server = Server()
    server.answers(cluster.answer)
    with ClusterApi(connect_to("c", file=kubeconfig(tmp_path, server.url)), within_s=0) as found:
        yield found
    server.close()


def scale(api: ClusterApi, cluster: Cluster) -> None:
    """The beginning of a `scale`: its process was killed, or waits for the pods."""
    old = cluster.trainjob()
    assert old is not None
    Successions(api).write(old, describe(Observed(trainjob=old), place="c"), 2)


def gone(api: ClusterApi, cluster: Cluster) -> None:
    """The same, and the old TrainJob was deleted."""
    scale(api, cluster)
    ClusterJobs(api).jobs()
    assert cluster.trainjob() is None


def evil(plan: Object) -> Object:
    """The content of the plan, but with another program."""
    data = json.loads(plan["metadata"]["annotations"][PLAN])
    successor = data["successor"] or {"metadata": {"name": "a"}, "spec": {}}
    successor["spec"]["trainer"] = {"numNodes": 1, "image": "evil.example/image", "command": ["sh"]}
    return {**data, "successor": successor}


def put(plan: Object, content: Object) -> None:
    plan["metadata"]["annotations"][PLAN] = json.dumps(content)


def of_another_job(plan: Object) -> None:
    """The plan of job `a` becomes one for job `b`, which does not exist."""
    content = evil(plan)
    content["successor"]["metadata"]["name"] = "b"
    plan["metadata"]["labels"][LABEL] = "b"
    put(plan, content)


def with_other_notes(plan: Object) -> None:
    """Each annotation that Safepoint has added later gets other texts."""
    for name in set(plan["metadata"]["annotations"]) - {PLAN}:
        notes = {"metadata": {"name": "b"}, "spec": {"trainer": {"image": "evil.example/image"}}, HISTORY: {"a": 1}}
        plan["metadata"]["annotations"][name] = json.dumps(notes)
    put(plan, evil(plan))


def commands(api: ClusterApi) -> list[Callable[[], object]]:
    jobs = ClusterJobs(api)
    return [jobs.jobs, lambda: jobs.job("a"), lambda: jobs.job("b"), lambda: jobs.resume("a")]


def look(api: ClusterApi) -> None:
    for command in commands(api):
        with contextlib.suppress(NotFoundError, ConflictError):
            command()


def images(cluster: Cluster) -> set[str]:
    """The images of all jobs; the plan runs nothing."""
    found = [item for item in cluster.objects["trainjobs"] if LABEL not in texts(item, "metadata", "labels")]
    return {str(at(item, "spec", "trainer", "image")) for item in found}


@pytest.mark.parametrize("change", [lambda plan: put(plan, evil(plan)), of_another_job, with_other_notes])
def test_a_plan_that_was_changed(
    change: Callable[[Object], None], cluster: Cluster, api: ClusterApi, caplog: pytest.LogCaptureFixture
) -> None:
    gone(api, cluster)
    change(cluster.plan)
    look(api)
    assert images(cluster) == set()
    assert f"`kubectl delete trainjob {name_of(cluster.plan)} -n {api.namespace}`" in caplog.text
    assert "--output-dir" in caplog.text
    assert caplog.text.count("someone changed the plan") == 1


def test_a_plan_that_a_finalizer_keeps(cluster: Cluster, api: ClusterApi) -> None:
    """The job was scaled, and is deleted later."""
    gone(api, cluster)
    cluster.plan["metadata"] |= {"deletionTimestamp": "2026-11-25T10:00:00Z", "finalizers": ["evil.example/keep"]}
    look(api)
    assert cluster.trainjob() is None


@pytest.mark.parametrize("is_gone", [False, True])
def test_only_the_name_of_a_trainjob_counts(is_gone: bool, cluster: Cluster, api: ClusterApi) -> None:
    """Each other part can be changed: the successor is the job that was scaled."""
    old = cluster.trainjob()
    assert old is not None
    before = json.loads(json.dumps(old["spec"]["trainer"]))
    (gone if is_gone else scale)(api, cluster)
    plan = cluster.plan
    content = plan["metadata"]["annotations"][PLAN]
    evil_trainer = {"numNodes": 7, "image": "evil.example/image", "env": [{"name": PLAN, "value": content}]}
    plan["spec"] = {"runtimeRef": {"name": "evil"}, "trainer": evil_trainer}
    plan["metadata"]["annotations"] |= {"safepoint.dev/ended": json.dumps({"safepoint.dev/job": "{}", HISTORY: "[]"})}
    for _ in range(3):
        ClusterJobs(api).jobs()
    found = cluster.trainjob()
    assert found is not None
    assert found["metadata"]["uid"] != "old"
    assert found["spec"]["trainer"] == {**before, "numNodes": 2}
    assert found["metadata"]["annotations"]["safepoint.dev/job"] != "{}"
    assert [name_of(item) for item in cluster.objects["trainjobs"]] == ["a"]


def test_a_job_that_is_changed_while_it_is_scaled(
    cluster: Cluster, api: ClusterApi, caplog: pytest.LogCaptureFixture
) -> None:
    """Its change may be a mistake or not: nothing is created, and nothing is deleted."""
    scale(api, cluster)
    old = cluster.trainjob()
    assert old is not None
    old["spec"]["trainer"] = {"numNodes": 1, "image": "evil.example/image"}
    with caplog.at_level(logging.WARNING):
        ClusterJobs(api).jobs()
    assert "its TrainJob was changed meanwhile" in caplog.text
    assert f"`kubectl get trainjob a -n {api.namespace} -o yaml`" in caplog.text
    ClusterJobs(api).jobs()
    assert [name_of(item) for item in cluster.objects["trainjobs"]] == ["a"]
    assert old["metadata"]["uid"] == "old"
    assert not [change for change in cluster.changes if change == "DELETE trainjobs/a"]


def test_a_plan_that_no_scale_has_written(
    cluster: Cluster, api: ClusterApi, caplog: pytest.LogCaptureFixture
) -> None:
    """Someone who may create TrainJobs cannot have a job of another person replaced by another one."""
    from tests.support.cluster.plans import plan_for

    old = cluster.trainjob()
    assert old is not None
    successor: Any = json.loads(json.dumps(old))
    successor["spec"]["trainer"]["image"] = "evil.example/image"
    del old["spec"]["suspend"]  # it runs
    planted = plan_for(successor, job="a", nodes=1)
    cluster.objects["trainjobs"].append(planted)
    with caplog.at_level(logging.WARNING):
        ClusterJobs(api).job("a")
    assert "another program than Safepoint wrote the plan" in caplog.text
    assert cluster.trainjob() is old
    assert "suspend" not in old["spec"]
    ClusterJobs(api).jobs()
    assert [name_of(item) for item in cluster.objects["trainjobs"]] == ["a"]
