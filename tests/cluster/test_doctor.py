"""`safepoint doctor --on`: what a namespace lacks, by name."""

import base64
import json
from pathlib import Path

import pytest

from tests.support.cluster.roles import documented_roles
from tests.support.cluster.workspace import CLAIM, QUEUE, RUNTIME, Workspace, apply, queue_objects
from tests.support.commands import Outcome, safepoint


def user(team: Workspace, folder: Path, rules: list[dict[str, list[str]]]) -> Path:
    """The kubeconfig of a service account with these rights in the namespace."""
    api = "rbac.authorization.k8s.io"
    metadata = {"name": "person", "namespace": team.namespace}
    subject = {"kind": "ServiceAccount", **metadata}
    apply(
        team.cluster,
        [
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
            {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
            {
                "apiVersion": f"{api}/v1",
                "kind": "RoleBinding",
                "metadata": metadata,
                "subjects": [subject],
                "roleRef": {"apiGroup": api, "kind": "Role", "name": "person"},
            },
        ],
    )
    document = json.loads(team.cluster.kubeconfig.read_text())
    token = team.kubectl("create", "token", "person").strip()
    document["users"] = [{"name": "test", "user": {"token": token}}]
    place = folder / "person.kubeconfig"
    place.write_text(json.dumps(document))
    assert base64.b64decode(document["clusters"][0]["cluster"]["certificate-authority-data"])
    return place


def doctor(team: Workspace, *options: str) -> Outcome:
    return safepoint("doctor", "--on", ".", "--namespace", team.namespace, *options)


@pytest.mark.timeout(120)
def test_a_namespace_that_has_everything(team: Workspace) -> None:
    apply(team.cluster, queue_objects(team.namespace, cpu="1"))
    done = doctor(team, "--json")
    assert done.code == 0, done.stdout + done.stderr
    found = {one["check"]: one for one in done.document["findings"]}
    assert {one["status"] for one in found.values()} == {"ok"}, found
    assert "Kubernetes v1." in found["cluster"]["found"]
    for name in ("trainer", "jobset", "kueue"):
        assert "API v1" in found[name]["found"] or "API v1alpha" in found[name]["found"], found[name]
    assert f"{RUNTIME} (grace 60 s, fails at restart 100)" in found["runtimes"]["found"]
    assert f"{CLAIM} (ReadWriteMany, Bound)" in found["storage"]["found"]
    assert found["queues"]["found"] == QUEUE
    assert team.left() == []


@pytest.mark.timeout(200)
def test_the_documented_roles_suffice(team: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with them has all rights, and submits, reads and deletes a job of each kind."""
    apply(team.cluster, queue_objects(team.namespace, cpu="1"))
    of_namespace, of_cluster = documented_roles()
    name, api = f"person-{team.namespace}", "rbac.authorization.k8s.io"
    binding = {
        "apiVersion": f"{api}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "subjects": [{"kind": "ServiceAccount", "name": "person", "namespace": team.namespace}],
        "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": name},
    }
    apply(team.cluster, [{**of_cluster, "metadata": {"name": name}}, binding])
    try:
        monkeypatch.setenv("KUBECONFIG", str(user(team, tmp_path, of_namespace["rules"])))
        done = doctor(team, "--json")
        rights = [one for one in done.document["findings"] if one["check"] == "rights"]
        assert [one["status"] for one in rights] == ["ok"], rights
        script = tmp_path / "train.py"
        script.write_text("print('never')\n")
        place, output = ("--on", ".", "--namespace", team.namespace), ("--output-dir", f"pvc://{CLAIM}/x")
        asked = ("--nnodes", "2", "--grace", "45", "--queue", QUEUE, "--priority-class", "low", "--gpu", "8")
        done = safepoint("submit", *place, "--name", "x", *output, *asked, str(script))
        assert (done.code, done.stderr) == (0, "")
        for words in (
            ("list",),
            ("status", "x"),
            ("events", "x"),
            ("suspend", "x"),
            ("resume", "x"),
            ("delete", "x"),
        ):
            done = safepoint(words[0], *place, *words[1:])
            assert done.code == 0, (words, done.stderr)
        assert team.left_at_last() == []
    finally:
        team.cluster.kubectl("delete", "clusterrole,clusterrolebinding", name)


@pytest.mark.timeout(120)
def test_each_right_that_is_missing_is_named(
    team: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [
        {"apiGroups": ["trainer.kubeflow.org"], "resources": ["trainjobs"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["configmaps", "pods", "persistentvolumeclaims"], "verbs": ["*"]},
    ]
    monkeypatch.setenv("KUBECONFIG", str(user(team, tmp_path, rules)))
    done = doctor(team)
    assert done.code == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    lacks = "you are not allowed to "
    found = {line.partition(lacks)[2]: number for number, line in enumerate(lines) if lacks in line}
    assert "create, patch, delete trainjobs" in found, done.stdout
    assert "get jobsets" in found
    assert "get pods/log" in found
    assert not any(line.endswith((" configmaps", " pods", "persistentvolumeclaims")) for line in found)
    number = found["create, patch, delete trainjobs"]
    assert lines[number].startswith("failure")
    fix = "apiGroups [trainer.kubeflow.org], resources [trainjobs], verbs [create, patch, delete]"
    assert fix in lines[number + 2]
    assert lines[found["get, list, create, patch, delete secrets"]].startswith("warning")
