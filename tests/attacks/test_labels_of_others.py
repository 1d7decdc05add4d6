"""Objects of a cluster with Safepoint's labels, which other people added: they are neither deleted nor taken over.

A person who may change only metadata can add the labels to any object. The commands of another person then act with
the rights of that person.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("lightkube")

from safepoint.errors import SafepointError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.made_objects import has_derived_name
from safepoint.jobs.cluster.changes.plans import plans_among
from safepoint.jobs.cluster.changes.submission import create_job, is_gone, repair
from safepoint.jobs.cluster.changes.successor import Successions
from safepoint.jobs.cluster.connection import connect_to
from safepoint.jobs.cluster.helper import helper
from safepoint.jobs.cluster.manifests import Manifests, Runtime, manifests_for
from safepoint.jobs.cluster.objects import Object, name_of, texts
from safepoint.jobs.cluster.pods.pod_fields import JOBSET_LABEL, own_pods
from safepoint.jobs.cluster.spec import ClusterSpec
from safepoint.jobs.cluster.state import UID_LABEL, Observed, describe
from safepoint.jobs.cluster.suspension import pod_requests, save_request
from safepoint.jobs.cluster.suspension.stop import request_stop
from safepoint.jobs.cluster.watches.job_objects import objects_of_jobs
from safepoint.jobs.cluster.watches.pod_ends import PodEnds
from tests.attacks.test_hostile_clusters import Handler, Server, kubeconfig
from tests.support.cluster.plans import plan_for
from tests.support.cluster.workspace import runtime

_LABEL = "safepoint.dev/job"
_OLD = "2020-01-01T00:00:00Z"
_SPEC = ClusterSpec(
    name="gone",
    program=("train.py",),
    files={"train.py": b"1"},
    num_nodes=2,
    grace_s=5,
    initializer={"model": {"storageUri": "hf://a/b"}},
    initializer_secrets={"model": {"token": "x"}},
)


class Namespace:
    """A namespace behind a server, with label and field selectors. Notes the requests that change objects."""

    def __init__(self) -> None:
        self.objects: dict[str, list[Object]] = {}
        self.changes: list[str] = []

    def add(self, kind: str, document: Object, *, label: str = "", **metadata: Any) -> Object:
        item = copy.deepcopy(document)
        given = item.setdefault("metadata", {})
        given |= {"uid": f"uid-of-{given['name']}", "creationTimestamp": _OLD, **metadata}
        given["labels"] = {**given.get("labels", {}), **({_LABEL: label} if label else {})}
        self.objects.setdefault(kind, []).append(item)
        return item

    def answer(self, request: Handler) -> None:
        url = urlsplit(request.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        kind, name = self._target(url.path)
        if request.command == "GET" and name:
            found = [item for item in self.objects.get(kind, []) if name_of(item) == name]
            request.send(found[0] if found else {"kind": "Status", "code": 404}, 200 if found else 404)
        elif request.command == "GET":
            request.send({"items": [one for one in self.objects.get(kind, []) if self._matches(one, query)]})
        elif kind == "selfsubjectaccessreviews":
            request.send({"status": {"allowed": False}})
        elif request.command == "POST":
            self.changes.append(f"POST {kind}")
            request.send(self.add(kind, request.body), 201)
        else:
            self.changes.append(f"{request.command} {kind}/{name}")
            request.send({"metadata": {"name": name}})

    def _target(self, path: str) -> tuple[str, str]:
        parts = path.partition("/namespaces/ns/")[2].split("/") if "/namespaces/ns/" in path else path.split("/")[-1:]
        return parts[0], "/".join(parts[1:])

    def _matches(self, item: Object, query: dict[str, str]) -> bool:
        key, is_given, value = query.get("labelSelector", "").partition("=")
        labels = texts(item, "metadata", "labels")
        if key and (key not in labels or (is_given and labels[key] != value)):
            return False
        fields = {"type": item.get("type", "Opaque"), "metadata.name": name_of(item)}
        wanted = [one.split("=", 1) for one in query.get("fieldSelector", "").split(",") if one]
        return all(fields[name] == text for name, text in wanted)


@pytest.fixture
def namespace() -> Namespace:
    return Namespace()


@pytest.fixture
def api(namespace: Namespace, tmp_path: Path) -> Iterator[ClusterApi]:
    server = Server()
    server.answers(namespace.answer)
    with ClusterApi(connect_to("c", file=kubeconfig(tmp_path, server.url))) as found:
        yield found
    server.close()


def made() -> Manifests:
    document = copy.deepcopy(runtime())
    jobs = document["spec"]["template"]["spec"]["replicatedJobs"]
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "model-initializer"}
    jobs.append({"name": "model-initializer", "template": {"metadata": {"labels": labels}}})
    return manifests_for(_SPEC, Runtime(document=document))


def of_others(namespace: Namespace, label: str) -> None:
    """Objects that Safepoint did not make, with its label: some even have names that it would derive."""
    known = {name_of(item) for found in namespace.objects.values() for item in found}
    for name in {"prod-db-password", f"{label}-model", f"{label}-nodes-0123abcd"} - known:
        namespace.add("secrets", {"metadata": {"name": name}, "immutable": True, "data": {"a": "YQ=="}}, label=label)
    for name in ("shared-runtime", f"{label}-30s"):
        namespace.add("trainingruntimes", {**runtime(), "metadata": {"name": name}}, label=label)
    for name in ("settings", f"{label}-0123456789ab"):
        data = {"binaryData": {"train.py": "YQ=="}, "immutable": True}
        namespace.add("configmaps", {"metadata": {"name": name}, **data}, label=label)


def test_the_job_of_the_label_does_not_exist(namespace: Namespace, api: ClusterApi) -> None:
    of_others(namespace, "gone")
    repair(api)
    assert namespace.changes == []


def test_the_job_of_the_label_exists(namespace: Namespace, api: ClusterApi) -> None:
    """With an owner, they would be deleted together with it."""
    of_others(namespace, "tiny")
    namespace.add("trainjobs", trainjob("tiny"), label="tiny")
    repair(api)
    assert namespace.changes == []


def test_the_label_of_another_job(namespace: Namespace, api: ClusterApi) -> None:
    """Objects that Safepoint made for one job, with the label of another."""
    for kind, item in made().before:
        namespace.add(kind, item, label="other")
    repair(api)
    assert namespace.changes == []


def test_what_a_killed_submit_has_left_is_deleted(namespace: Namespace, api: ClusterApi) -> None:
    for kind, item in made().before:
        assert has_derived_name(kind, item)
        namespace.add(kind, item)
    of_others(namespace, "gone")
    repair(api)
    deleted = [f"DELETE {kind}/{name_of(item)}" for kind, item in made().before if kind != "secrets"]
    secrets = [f"DELETE secrets/{name_of(item)}" for item in namespace.objects["secrets"] if "type" in item]
    assert len(secrets) == 2
    assert sorted(namespace.changes) == sorted([*deleted, *secrets])
    assert namespace.changes[-1].startswith("DELETE configmaps/")


def test_a_submit_owns_only_what_it_made(namespace: Namespace, api: ClusterApi) -> None:
    of_others(namespace, "gone")
    manifests = made()
    [config_map] = [item for kind, item in manifests.before if kind == "configmaps"]
    namespace.add("configmaps", config_map)  # a killed submit made it, so this one looks for what else is left
    create_job(api, manifests)
    patched = {change.rpartition("/")[2] for change in namespace.changes if change.startswith("PATCH")}
    assert patched == {name_of(item) for _, item in manifests.before}


def test_an_interrupted_submit_keeps_an_object_of_another_person(
    namespace: Namespace, api: ClusterApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It exists under the name of an object whose creation was not answered."""
    of_others(namespace, "gone")
    create = api.create

    def interrupted(kind: str, body: Object) -> Object:
        if name_of(body) == "gone-model":
            raise KeyboardInterrupt
        return create(kind, body)

    monkeypatch.setattr(api, "create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        create_job(api, made())
    assert "DELETE secrets/gone-model" not in namespace.changes


def trainjob(name: str, *, uid: str = "old", labels: dict[str, str] | None = None, **annotations: str) -> Object:
    metadata = {"name": name, "namespace": "ns", "uid": uid, "creationTimestamp": _OLD}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {**metadata, "labels": labels or {}, "annotations": annotations},
        "spec": {"runtimeRef": {"name": "torch"}, "trainer": {"numNodes": 1}, "suspend": True},
    }


@pytest.mark.parametrize("step", ["release", "finish", "drop"])
def test_a_scale_owns_only_what_was_made_for_the_job(step: str, namespace: Namespace, api: ClusterApi) -> None:
    """And what the old TrainJob owns, because it would be deleted with it: a Secret that an older Safepoint made."""
    for kind, item in made().before:
        namespace.add(kind, item)
    of_others(namespace, "gone")
    older = {"metadata": {"name": "gone-nodes-ffffffff"}, "immutable": True}
    namespace.add("secrets", older, label="gone", ownerReferences=[{"uid": "old"}])
    [plan] = plans_among([plan_for(trainjob("gone"), job="gone")])
    old = trainjob("gone")
    successions = Successions(api)
    if step == "release":
        successions.release(plan, old, describe(Observed(trainjob=old), place="c"))
    elif step == "finish":
        successions.finish(plan, trainjob("gone", uid="new"))
    else:
        namespace.objects["trainjobs"] = [old]
        successions.drop(plan)
    patched = {change.removeprefix("PATCH ") for change in namespace.changes if change.startswith("PATCH")}
    expected = {f"{kind}/{name_of(item)}" for kind, item in made().before if kind != "secrets"}
    expected |= {f"secrets/{name_of(item)}" for item in namespace.objects["secrets"] if "type" in item}
    if step != "drop":  # the old TrainJob owns it already
        expected.add("secrets/gone-nodes-ffffffff")
    assert {one for one in patched if not one.startswith("trainjobs/")} == expected


def test_a_workload_that_another_job_owns(namespace: Namespace, api: ClusterApi) -> None:
    """A `suspend` would stop the other job."""
    old = trainjob("tiny")
    workload = {"metadata": {"name": "w", "labels": {UID_LABEL: "old"}, "ownerReferences": [{"uid": "another"}]}}
    [seen] = objects_of_jobs([old], [], [workload])
    request_stop(api, seen)
    assert namespace.changes == ["PATCH trainjobs/tiny"]
    workload["metadata"]["ownerReferences"] = [{"uid": "old"}]
    [seen] = objects_of_jobs([old], [], [workload])
    assert seen.workload is workload


def pod_of(job: str, name: str, state: Object, *, index: int | None = 0, part: str = "node") -> Object:
    labels = {JOBSET_LABEL: job, "jobset.sigs.k8s.io/replicatedjob-name": part}
    if index is not None:
        labels["batch.kubernetes.io/job-completion-index"] = str(index)
    status = {"phase": "Running", "containerStatuses": [{"name": "node", "state": state}]}
    return {"metadata": {"name": name, "labels": labels}, "spec": {"containers": []}, "status": status}


class TestPods:
    """A pod of another person with the labels of a job. Its name cannot be changed, so it is not one of the job."""

    RUNNING: ClassVar[Object] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    OTHERS = ("debug", "other-node-0-0-abcde", "tiny-node-0-1-abcde", "tiny-node-0-0", "tiny-node-0-0-abcde-x")

    @pytest.mark.parametrize("name", OTHERS)
    def test_suspend_asks_the_job_s_own_pod(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Otherwise the program of `suspend` would run in the other pod, whose answer would be the receipt."""
        command = ["python3", "-P", "-c", "x", "/p", "0" * 64]
        job = trainjob("tiny")
        job["spec"] = {**job.get("spec", {}), "trainer": {"numNodes": 1, "command": command}}
        asked: list[str] = []

        def run_in_pod(api: object, pod: str, *_: object, **options: object) -> Iterator[str]:
            asked.append(pod)
            yield json.dumps({"receipt": {"step": 7, "name": "checkpoint-7", "digest": "d", "is_read": True}})

        monkeypatch.setattr(pod_requests, "run_in_pod", run_in_pod)
        others, own = pod_of("tiny", name, self.RUNNING), pod_of("tiny", "tiny-node-0-0-x2345", self.RUNNING)
        [seen] = objects_of_jobs([job], [others, own], [])
        save_request.request_save(cast("ClusterApi", None), describe(seen, place="c"), seen, within_s=5)
        assert asked == ["tiny-node-0-0-x2345"]
        [seen] = objects_of_jobs([job], [others], [])
        with pytest.raises(SafepointError, match="its first pod does not run"):
            save_request.request_save(cast("ClusterApi", None), describe(seen, place="c"), seen, within_s=5)

    @pytest.mark.parametrize("name", OTHERS)
    def test_a_suspended_job_can_be_resumed(self, name: str) -> None:
        """Otherwise it would be shown as `Suspending` as long as the other pod runs."""
        job = trainjob("tiny")
        job["spec"] = {**job.get("spec", {}), "suspend": True}
        [seen] = objects_of_jobs([job], [pod_of("tiny", name, self.RUNNING)], [])
        assert describe(seen, place="c").can_resume

    def test_the_end_of_the_other_pod_saves_nothing(self) -> None:
        message = {
            "currentStep": 9,
            "checkpoint": {"step": 9, "name": "checkpoint-9", "digest": "d", "is_read": True},
        }
        ended = {"terminated": {"startedAt": "x", "exitCode": 75, "message": json.dumps(message)}}
        ends = PodEnds(cast("ClusterApi", None), "tiny")
        ends._note(pod_of("tiny", "debug", ended), is_deleted=False)
        assert (ends.is_saved, ends.safe_step, ends.checkpoint) == (None, None, None)
        ends._note(pod_of("tiny", "tiny-node-0-0-abcde", ended), is_deleted=False)
        assert (ends.is_saved, ends.safe_step) == (True, 9)

    def test_scale_does_not_wait_for_the_other_pod(self, namespace: Namespace, api: ClusterApi) -> None:
        namespace.add("pods", pod_of("tiny", "debug", self.RUNNING))
        assert is_gone(api, "tiny", "old")
        namespace.add("pods", pod_of("tiny", "tiny-node-0-0-abcde", self.RUNNING))
        assert not is_gone(api, "tiny", "old")

    def test_the_job_s_own_pods(self) -> None:
        own = [
            pod_of("a.b", "a.b-node-0-12-x2345", self.RUNNING, index=12),
            pod_of("a.b", "a.b-model-initializer-0-0-x2345", self.RUNNING, part="model-initializer"),
            pod_of("a.b", "a.b-model-initializer-0-x2345", self.RUNNING, index=None, part="model-initializer"),
        ]
        assert own_pods("a.b", own) == own
        assert own_pods("axb", own) == []

    def test_the_log_of_the_other_pod_is_no_answer_of_a_helper(self, namespace: Namespace, api: ClusterApi) -> None:
        """Otherwise another pod would say which checkpoints are in a claim, and whether they are valid."""
        job = {"metadata": {"name": "safepoint-helper-0123456789", "uid": "of-helper"}}
        labels = {helper.HELPER_LABEL: "safepoint-helper-0123456789"}
        for name in ("debug", "safepoint-helper-0123456789-abcde"):
            pod = {"metadata": {"name": name, "labels": labels, "ownerReferences": [{"uid": "of-helper"}]}}
            namespace.objects.setdefault("pods", []).append(pod)
        assert name_of(helper._pod_of(api, job)) == "safepoint-helper-0123456789-abcde"
        namespace.objects["pods"].pop()
        assert helper._pod_of(api, job) is None
