"""A namespace whose objects are kept in memory, in place of `ClusterApi`. It carries out changes at once."""

import itertools
import json
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.errors import AccessDeniedError, NotFoundError
from safepoint.foundation import clock
from safepoint.jobs.cluster.objects import Object, name_of, texts, uid_of
from safepoint.jobs.cluster.pod_archive import command_of
from safepoint.jobs.cluster.pods.pod_fields import JOBSET_LABEL
from safepoint.jobs.cluster.suspension import pod_requests
from safepoint.jobs.cluster.transport.failures import AlreadyExistsError
from tests.support.cluster.workspace import runtime

JOB = "tiny"
IMAGE_OF_POD = {
    "name": "image-1",
    "path": "/mnt/x/images/image-1",
    "created": "2026-11-27T10:00:00Z",
    "program": "python3",
    "num_processes": 4,
    "size_bytes": 10,
    "memory_bytes": 20,
    "num_pages": 3,
    "num_stored": 2,
    "needs": [],
    "safe_step": 4,
}
"""What a pod answers of an image that it has made."""


def trainjob(name: str = JOB, uid: str = "old", *, output: str = "pvc://ckpt/x", **labels: str) -> Any:
    """The TrainJob of a job that Safepoint submitted."""
    metadata = {"name": name, "namespace": "team", "uid": uid, "creationTimestamp": "2026-11-23T10:00:00Z"}
    record = '{"program": ["train.py"], "settings": {}}'
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {**metadata, "annotations": {"safepoint.dev/job": record}, "labels": labels},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "suspend": False,
            "trainer": {"numNodes": 1, "env": [{"name": "SAFEPOINT_OUTPUT_DIR", "value": output}]},
        },
    }


def job_with_images(**labels: str) -> Any:
    """The TrainJob of a job whose pods can make process images."""
    job = trainjob(**labels)
    record = {"program": ["train.py"], "settings": {"SAFEPOINT_FREEZE_AS_LAST_RESORT": "1"}}
    job["metadata"]["annotations"]["safepoint.dev/job"] = json.dumps(record)
    job["spec"]["trainer"]["command"] = [*command_of("/opt/safepoint", {"safepoint.pyz": b""}), "run", "train.py"]
    return job


def answer_with_image(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let each program in a pod answer with `IMAGE_OF_POD`. Returns the list of their last three arguments."""
    commands: list[list[str]] = []

    def run_in_pod(api: object, pod: str, container: str, command: list[str], **_: object) -> Iterator[str]:
        commands.append(command[-3:])
        yield json.dumps({"waits": "the image"})
        yield json.dumps({"image": IMAGE_OF_POD})

    monkeypatch.setattr(pod_requests, "run_in_pod", run_in_pod)
    return commands


def running_pod(job: str = JOB, node: int = 0, **spec: Any) -> Any:
    """A pod that trains."""
    labels = {JOBSET_LABEL: job, "batch.kubernetes.io/job-completion-index": str(node)}
    state = {"running": {"startedAt": "2026-11-23T10:00:10Z"}}
    return {
        "metadata": {"name": f"{job}-node-0-{node}-abcde", "uid": f"pod-{node}", "labels": labels},
        "spec": {"containers": [{"name": "node"}], **spec},
        "status": {
            "phase": "Running",
            "containerStatuses": [{"name": "node", "restartCount": 0, "state": state}],
        },
    }


def workload_of(job: Any, *, is_active: bool = True) -> Any:
    """The Workload of an admitted job."""
    uid = uid_of(job)
    return {
        "metadata": {
            "name": f"trainjob-{name_of(job)}-0a1b2",
            "uid": "workload",
            "labels": {"kueue.x-k8s.io/job-uid": uid},
            "ownerReferences": [{"uid": uid}],
        },
        "spec": {"active": is_active},
        "status": {"conditions": [{"type": "Admitted", "status": "True"}]},
    }


class Kept:
    """A namespace of a cluster with Trainer and Kueue, and one runtime.

    Args:
        objects: by kind.
        denied: the requests that you may not send, such as `patch workloads`.
    """

    namespace = "team"
    connection = SimpleNamespace(name="kind")

    def __init__(self, *, denied: Set[str] = frozenset(), **objects: list[Any]) -> None:
        self.denied, self.kept = denied, objects
        self.changes: list[str] = []
        """Each change that was carried out: verb, kind, name."""
        self.after: Callable[[str], None] = lambda change: None
        """Called after each change."""
        self._numbers = itertools.count()

    def _check(self, verb: str, kind: str) -> None:
        if f"{verb} {kind}" in self.denied:
            raise AccessDeniedError(f"you are not allowed to do this: {verb} {kind}")

    def _note(self, *change: str) -> None:
        self.changes.append(" ".join(change))
        self.after(self.changes[-1])

    def close(self) -> None:
        """Nothing is open."""

    def check_name(self, name: str) -> None:
        """Accept every name."""

    def group_of(self, kind: str) -> str:
        """The group of a kind."""
        return f"group-of-{kind}"

    def now_s(self) -> float:
        """The time of this machine."""
        return clock.wall_s()

    def serves(self, kind: str) -> bool:
        """Every kind exists."""
        return True

    def may(self, verb: str, kind: str, *, subresource: str = "") -> bool:
        """Whether the request is not denied."""
        return f"{verb} {kind}" not in self.denied

    def asked_ahead(self, wanted: object) -> AbstractContextManager[None]:
        """Nothing is asked ahead."""
        return nullcontext()

    def find(self, kind: str, name: str) -> Object | None:
        """The object, or None."""
        self._check("get", kind)
        if kind == "clustertrainingruntimes":
            return runtime()
        return next((item for item in self.kept.get(kind, []) if name_of(item) == name), None)

    def get(self, kind: str, name: str) -> Object:
        """The object."""
        found = self.find(kind, name)
        if found is None:
            raise NotFoundError(f'{kind} "{name}" not found')
        return found

    def objects(self, kind: str, *, labels: str = "", fields: str = "", has_content: bool = True) -> list[Object]:
        """All objects, or those with the label."""
        self._check("list", kind)
        key, has_value, value = labels.partition("=")

        def is_chosen(item: Object) -> bool:
            found = texts(item, "metadata", "labels")
            return not key or (found.get(key) == value if has_value else key in found)

        return [item for item in self.kept.get(kind, []) if is_chosen(item)]

    def objects_at(self, kind: str, *, labels: str = "") -> tuple[list[Object], str]:
        """The objects, and the version of the list."""
        return self.objects(kind, labels=labels), "1"

    def create(self, kind: str, body: Object, *, is_dry_run: bool = False) -> Object:
        """Keep an object."""
        self._check("create", kind)
        if any(name_of(item) == name_of(body) for item in self.kept.get(kind, [])):
            raise AlreadyExistsError(f'{kind} "{name_of(body)}" already exists')
        added = {"uid": f"new-{next(self._numbers)}", "creationTimestamp": "2026-11-23T11:00:00Z"}
        item = {**body, "metadata": {**body["metadata"], **added}}
        self.kept.setdefault(kind, []).append(item)
        self._note("create", kind, name_of(item))
        return item

    def patch(self, kind: str, name: str, body: Object) -> Object:
        """Merge a change into an object."""
        self._check("patch", kind)
        item = self.get(kind, name)
        _merge(item, body)
        self._note("patch", kind, name)
        return item

    def delete(self, kind: str, name: str, *, uid: str | None = None) -> None:
        """Delete an object, and what it owns."""
        self._check("delete", kind)
        found = self.find(kind, name)
        if found is None:
            return
        owner = uid_of(found)
        for key, listed in self.kept.items():
            self.kept[key] = [item for item in listed if item is not found and not _is_owned(item, owner)]
        self._note("delete", kind, name)

    def watch(self, kind: str, **_: Any) -> Iterator[tuple[str, Object]]:
        """No change is seen."""
        yield from ()


def _is_owned(item: Object, owner: str) -> bool:
    return owner in {one.get("uid") for one in item["metadata"].get("ownerReferences", [])}


def _merge(item: Object, change: Object) -> None:
    for key, value in change.items():
        if isinstance(value, dict):
            _merge(item.setdefault(key, {}), value)
        elif value is None:
            item.pop(key, None)
        else:
            item[key] = value
