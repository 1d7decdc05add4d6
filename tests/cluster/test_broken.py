"""Clusters that refuse or lack something, or restart: one clear sentence, the documented exit code, nothing left."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import ExitCode
from tests.cluster.test_doctor import user
from tests.cluster.test_life import ON, submit, trains_at, wait
from tests.support.cluster.faults import restart
from tests.support.cluster.workspace import CLAIM, Workspace, apply
from tests.support.commands import Outcome, safepoint
from tests.support.jobs import TINY

_TRAINER = "trainer.kubeflow.org"
_NEEDED = {
    (_TRAINER, "trainjobs"): ["get", "list", "create"],
    (_TRAINER, "trainingruntimes"): ["get", "create", "patch"],
    ("", "configmaps"): ["create", "patch"],
    ("", "persistentvolumeclaims"): ["get"],
}
"""What `submit --grace` cannot do without, in the namespace."""


def try_submit(team: Workspace, *options: str) -> Outcome:
    return safepoint(
        *("submit", *ON, team.namespace, "--name", "tiny", "--output-dir", f"pvc://{CLAIM}/tiny"),
        *("--code", str(TINY.parent), *options, "tiny.py"),
    )


def is_one_sentence(done: Outcome, *words: str) -> bool:
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    return done.stderr.startswith("safepoint: error: ")


@pytest.mark.timeout(200)
def test_without_each_right(team: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the right, and nothing is submitted."""
    read = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "watch", "delete"]}]
    runtimes = {"apiGroups": [_TRAINER], "resources": ["clustertrainingruntimes"], "verbs": ["get", "list"]}
    api, name = "rbac.authorization.k8s.io", f"reader-{team.namespace}"
    subject = {"kind": "ServiceAccount", "name": "person", "namespace": team.namespace}
    role: dict[str, Any] = {"apiVersion": f"{api}/v1", "metadata": {"name": name}}
    reference = {"apiGroup": api, "kind": "ClusterRole", "name": name}
    apply(
        team.cluster,
        [
            {**role, "kind": "ClusterRole", "rules": [runtimes]},
            {**role, "kind": "ClusterRoleBinding", "subjects": [subject], "roleRef": reference},
        ],
    )
    for (group, kind), verbs in _NEEDED.items():
        for lacking in verbs if len(verbs) > 1 else ():  # a rule has at least one verb
            rules = [
                {"apiGroups": [one], "resources": [what], "verbs": [verb for verb in all_of if verb != lacking]}
                if (one, what) == (group, kind)
                else {"apiGroups": [one], "resources": [what], "verbs": all_of}
                for (one, what), all_of in _NEEDED.items()
            ]
            if lacking in {"create", "patch"}:
                rules += read
            with monkeypatch.context() as patched:
                patched.setenv("KUBECONFIG", str(user(team, tmp_path, rules)))
                done = try_submit(team, "--grace", "45")
            if (kind, lacking) == ("trainingruntimes", "create"):  # then the runtime's own grace period counts
                assert done.code == 0, done.stderr
                team.kubectl("delete", "trainjobs,configmaps", "-l", "safepoint.dev/job=tiny", "--wait=true")
            else:
                assert done.code == ExitCode.NOT_AUTHORISED, (kind, lacking, done.stdout, done.stderr)
                assert is_one_sentence(done, "you are not allowed", kind)
            assert team.left_at_last() == [], (kind, lacking)
    team.cluster.kubectl("delete", "clusterrole,clusterrolebinding", name)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["configmaps", "secrets", "trainjobs.trainer.kubeflow.org"])
def test_a_quota_that_is_used_up(kind: str, team: Workspace) -> None:
    name = {"name": "few", "namespace": team.namespace}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": name, "spec": {"hard": {f"count/{kind}": "0"}}}
    apply(team.cluster, [quota])
    deadline_s = time.monotonic() + 30
    while "status" not in team.get("resourcequota", "few") or not team.get("resourcequota", "few")["status"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    done = try_submit(team, "--nnodes", "2")
    assert done.code == ExitCode.CONFLICT, done.stderr
    assert is_one_sentence(done, "quota", kind)
    assert team.left_at_last() == []


@pytest.mark.timeout(120)
def test_an_image_that_cannot_be_pulled(team: Workspace) -> None:
    """The state says so within 30 seconds, and the job can be deleted."""
    assert try_submit(team, "--image", "registry.invalid/none:1").code == 0
    begun_s = time.monotonic()
    wait(team, "tiny", lambda job: "image" in job["message"], 30)
    print(f"{time.monotonic() - begun_s:.1f} s")
    assert safepoint("delete", *ON, team.namespace, "tiny").code == 0
    assert team.left_at_last() == []


@pytest.mark.timeout(60)
def test_there_is_no_queue(team: Workspace) -> None:
    done = try_submit(team, "--queue", "gpus")
    assert done.code == ExitCode.NOT_FOUND
    assert is_one_sentence(done, "there is no queue gpus")
    assert team.left_at_last() == []


@pytest.mark.timeout(400)
def test_the_api_server_restarts(team: Workspace) -> None:
    """In the middle of `logs -f` and of `suspend`, of which the second one succeeds."""
    submit(team, "tiny", program=("--epochs", "4", "--step-ms", "1000"))
    wait(team, "tiny", trains_at(2))
    program = [sys.executable, "-P", "-m", "safepoint.cli.main"]
    follow = subprocess.Popen(
        [*program, "logs", *ON, team.namespace, "-f", "tiny"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(3)
    restarts = threading.Thread(target=restart, args=(team.cluster, "api_server", 5.0))
    suspended = subprocess.Popen(
        [*program, "suspend", *ON, team.namespace, "--json", "tiny"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(1.5)
    restarts.start()
    said = follow.communicate(timeout=120)[1]
    assert follow.returncode in {0, 13}, said
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 1, said
    answer, error = suspended.communicate(timeout=200)
    restarts.join()
    assert suspended.returncode in {0, 3}, error
    assert '"state": "Suspended"' in answer
    assert "Traceback" not in error
    assert safepoint("delete", *ON, team.namespace, "tiny").code == 0
    assert team.left_at_last() == []
