"""Someone who may create objects in a namespace, or replace a config map, and may not change TrainJobs.

Their names can be foreseen: a job must not run what such a person has put there.
"""

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")

from safepoint.errors import ConflictError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.changes.submission import create_job
from safepoint.jobs.cluster.connection import connect_to
from safepoint.jobs.cluster.manifests import Manifests, Runtime, manifests_for
from safepoint.jobs.cluster.objects import name_of
from safepoint.jobs.cluster.spec import ClusterSpec
from safepoint.settings.run_settings import RunSettings
from tests.attacks.test_hostile_clusters import Handler, Server, kubeconfig

_RUNTIME = {
    "kind": "ClusterTrainingRuntime",
    "metadata": {"name": "torch-distributed"},
    "spec": {
        "template": {
            "spec": {
                "replicatedJobs": [
                    {"name": "node", "template": {"spec": {"template": {"spec": {"containers": [{"name": "node"}]}}}}}
                ]
            }
        }
    },
}


def manifests() -> Manifests:
    """Of a job with all kinds of objects."""
    spec = ClusterSpec(
        name="train",
        program=("train.py", "--help"),
        files={"train.py": b"print()"},
        num_nodes=2,
        grace_s=90,
        settings=RunSettings(output_dir="s3://bucket/run"),
    )
    return manifests_for(spec, Runtime(document=_RUNTIME))


class Cluster:
    """An API server that keeps objects."""

    def __init__(self, server: Server) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.patched: list[str] = []
        server.answers(self.answer)

    def answer(self, request: Handler) -> None:
        path = request.path.partition("?")[0]
        if request.command == "POST":
            body = request.body
            key = f"{path}/{name_of(body)}"
            if key in self.objects:
                return request.send({"reason": "AlreadyExists", "message": f"{key} exists"}, 409)
            self.objects[key] = {**body, "metadata": {**body["metadata"], "uid": key}}
            return request.send(self.objects[key], 201)
        if request.command == "PATCH":
            self.patched.append(path)
        if request.command == "DELETE":
            self.objects.pop(path, None)
        found = self.objects.get(path)
        return request.send(found or {}, 200 if found else 404)

    def put(self, kind: str, item: dict[str, Any]) -> None:
        group = "api/v1" if kind != "trainingruntimes" else "apis/trainer.kubeflow.org/v1alpha1"
        self.objects[f"/{group}/namespaces/ns/{kind}/{name_of(item)}"] = item


@pytest.fixture
def server() -> Any:
    running = Server()
    yield running
    running.close()


@pytest.fixture
def api(server: Server, tmp_path: Path) -> Any:
    with ClusterApi(connect_to("c", file=kubeconfig(tmp_path, server.url))) as found:
        yield found


@pytest.mark.parametrize("kind", ["configmaps", "trainingruntimes"])
def test_an_object_of_this_name_and_of_another_content(kind: str, api: ClusterApi, server: Server) -> None:
    made = manifests()
    wanted = dict(made.before)[kind]
    cluster = Cluster(server)
    evil: dict[str, Any] = {"binaryData": {"safepoint.pyz": "ZXZpbA=="}} if kind == "configmaps" else {"spec": {}}
    cluster.put(kind, {**wanted, **evil})
    with pytest.raises(ConflictError, match=name_of(wanted)):
        create_job(api, made)
    assert not [path for path in cluster.objects if "trainjobs" in path]
    assert cluster.patched == []  # the job owns nothing of the other person's


def test_what_a_killed_submit_has_left_is_used(api: ClusterApi, server: Server) -> None:
    made = manifests()
    cluster = Cluster(server)
    for kind, item in made.before:
        if kind != "secrets":
            cluster.put(kind, item)
    assert name_of(create_job(api, made)) == "train"


def test_the_name_of_the_secret_cannot_be_foreseen() -> None:
    """A person who had made it would know by what the pods recognize each other, and could join them."""
    names = {name_of(dict(manifests().before)["secrets"]) for _ in range(3)}
    assert len(names) == 3
    made = manifests()
    name = name_of(dict(made.before)["secrets"])
    assert f'"secretName": "{name}"' in json.dumps(made.trainjob)


class TestThePodsProgram:
    """The program comes from a config map; its digest is in the job."""

    def _run(self, place: Path) -> "subprocess.CompletedProcess[str]":
        made = manifests()
        files: dict[str, str] = dict(made.before)["configmaps"]["binaryData"]
        for name, text in files.items():
            target = place / name
            if not target.exists():
                target.write_bytes(base64.b64decode(text))
        command: list[str] = made.trainjob["spec"]["trainer"]["command"]
        assert command[:3] == ["python3", "-P", "-c"]
        command = [sys.executable, *(str(place) if part == "/opt/safepoint" else part for part in command[1:6])]
        return subprocess.run([*command, "--version"], capture_output=True, text=True, check=False, timeout=60)

    def test_it_runs_as_it_was_submitted(self, tmp_path: Path) -> None:
        (tmp_path / "..data").mkdir()  # as the kubelet makes it
        ended = self._run(tmp_path)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert "safepoint" in ended.stdout

    @pytest.mark.parametrize("name", ["safepoint.pyz", "train.py", "sitecustomize.py"])
    def test_another_one_does_not_run(self, name: str, tmp_path: Path) -> None:
        (tmp_path / name).write_text("print('evil')")
        ended = self._run(tmp_path)
        assert ended.returncode == 1
        assert "has changed since the job was submitted" in ended.stderr
        assert "evil" not in ended.stdout
