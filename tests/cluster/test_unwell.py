"""Clusters that are slow, refuse an old login, do not admit, or lack Trainer or Kueue: one sentence, in time."""

import contextlib
import json
import re
import socket
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import AccessDeniedError, ExitCode
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.connection import connect_to
from tests.cluster.test_broken import is_one_sentence, try_submit
from tests.cluster.test_doctor import user
from tests.cluster.test_killed import submission
from tests.cluster.test_life import ON, submit, trains_at, wait
from tests.support.cluster.running import RunningCluster, own_cluster
from tests.support.cluster.slow_server import slow_server
from tests.support.cluster.tokens import token_of
from tests.support.cluster.workspace import Workspace, apply, workspace
from tests.support.commands import safepoint
from tests.support.patience import PATIENCE

_NONE = "none.example/none:1"
"""An image that the node has not: what is tested needs no pod."""


@pytest.mark.timeout(300)
def test_a_slow_api_server(team: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request takes 0.7 s longer; all commands do what they do otherwise, and say nothing of it."""
    with slow_server(team.cluster, tmp_path, delay_s=0.7) as kubeconfig, monkeypatch.context() as patched:
        patched.setenv("KUBECONFIG", str(kubeconfig))
        done = try_submit(team, "--nnodes", "2", "--image", _NONE)
        assert (done.code, done.stderr) == (0, "")
        for words in (("list",), ("status", "tiny"), ("suspend", "tiny"), ("resume", "tiny"), ("delete", "tiny")):
            begun_s = time.monotonic()
            done = safepoint(words[0], *ON, team.namespace, *words[1:])
            print(f"{words[0]}: {time.monotonic() - begun_s:.1f} s")
            assert (done.code, done.stderr) == (0, ""), words
    assert team.left_at_last() == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("most_blocks", [0, 2], ids=["before", "after"])
def test_an_api_server_that_stops_to_answer(
    most_blocks: int, team: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after the handshake of TLS: the command ends within a minute."""
    with slow_server(team.cluster, tmp_path, most_blocks=most_blocks) as kubeconfig, monkeypatch.context() as patched:
        patched.setenv("KUBECONFIG", str(kubeconfig))
        for words in (("list",), ("suspend", "tiny")):
            begun_s = time.monotonic()
            done = safepoint(words[0], *ON, team.namespace, *words[1:])
            assert time.monotonic() - begun_s < 60 * PATIENCE
            assert done.code == ExitCode.STORAGE, done.stderr
            assert is_one_sentence(done, "cannot be reached")


RIGHTS = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]


@pytest.mark.timeout(120)
def test_a_login_that_has_expired(team: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = user(team, tmp_path, RIGHTS)
    document = json.loads(place.read_text())
    document["users"][0]["user"]["token"] = token_of(team, "person", accepted_for_s=600)
    place.write_text(json.dumps(document))
    monkeypatch.setenv("KUBECONFIG", str(place))
    assert safepoint("list", *ON, team.namespace).code == 0
    document["users"][0]["user"]["token"] = token_of(team, "person", accepted_for_s=-5)
    place.write_text(json.dumps(document))
    for words in (("list",), ("status", "tiny"), ("delete", "tiny")):
        done = safepoint(words[0], *ON, team.namespace, *words[1:])
        assert done.code == ExitCode.NOT_AUTHORISED, done.stderr
        assert is_one_sentence(done, "the cluster does not accept your login", "log in again")
    assert try_submit(team).code == ExitCode.NOT_AUTHORISED
    assert team.left() == []


@pytest.mark.timeout(200)
def test_a_login_that_expires_meanwhile(team: Workspace, tmp_path: Path) -> None:
    """A token in a file is read again, as that of a pod, which the kubelet renews; another one cannot be renewed."""
    place, file = user(team, tmp_path, RIGHTS), tmp_path / "token"
    document = json.loads(place.read_text())
    token = token_of(team, "person", accepted_for_s=8)
    file.write_text(token)
    fixed = tmp_path / "fixed.kubeconfig"
    document["users"][0]["user"] = {"token": token}
    fixed.write_text(json.dumps(document))
    document["users"][0]["user"] = {"tokenFile": str(file)}
    place.write_text(json.dumps(document))
    with (
        ClusterApi(connect_to(namespace=team.namespace, file=place)) as renewed,
        ClusterApi(connect_to(namespace=team.namespace, file=fixed)) as expired,
    ):
        assert renewed.objects("trainjobs") == expired.objects("trainjobs") == []
        deadline_s = time.monotonic() + 60 * PATIENCE
        while _is_accepted(expired):
            assert time.monotonic() < deadline_s
            time.sleep(1)
        file.write_text(token_of(team, "person", accepted_for_s=600))
        assert renewed.objects("trainjobs") == []


def _is_accepted(api: ClusterApi) -> bool:
    try:
        api.objects("trainjobs")
    except AccessDeniedError:
        return False
    return True


@contextlib.contextmanager
def silent_webhook(team: Workspace) -> Generator[None]:
    """A webhook for the TrainJobs of the namespace that accepts connections and never answers."""
    name = f"silent-{team.namespace}"
    with socket.create_server((team.cluster.host, 0)) as listener:
        webhook = {
            "name": "silent.example.com",
            "clientConfig": {"url": f"https://{team.cluster.host}:{listener.getsockname()[1]}/"},
            "rules": [
                {
                    "apiGroups": ["trainer.kubeflow.org"],
                    "apiVersions": ["*"],
                    "resources": ["trainjobs"],
                    "operations": ["CREATE", "UPDATE"],
                }
            ],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": team.namespace}},
            "timeoutSeconds": 3,
            "failurePolicy": "Fail",
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        }
        api = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
        apply(team.cluster, [{**api, "metadata": {"name": name}, "webhooks": [webhook]}])
        try:
            time.sleep(2)  # the API server reads it some time later
            yield
        finally:
            team.cluster.kubectl("delete", "validatingwebhookconfiguration", name)


@pytest.mark.timeout(300)
def test_a_webhook_that_does_not_answer(team: Workspace, tmp_path: Path) -> None:
    """Nothing is left of a `submit`; a job that is there is suspended by the next command."""
    existing = submission(team, tmp_path / "train.py")
    assert existing.run().code == 0
    names = re.compile(r"[a-z.0-9-]+/a(-.*)?")  # what belongs to this job
    with silent_webhook(team):
        for done in (try_submit(team, "--nnodes", "2"), safepoint("suspend", *ON, team.namespace, "a")):
            assert done.code == ExitCode.STORAGE, done.stderr
            assert is_one_sentence(done, "failed calling webhook", "nothing was changed")
        assert [name for name in team.left() if not names.fullmatch(name)] == []
    deadline_s = time.monotonic() + 30 * PATIENCE
    while safepoint("suspend", *ON, team.namespace, "a").code != 0:
        assert time.monotonic() < deadline_s
        time.sleep(1)
    assert safepoint("delete", *ON, team.namespace, "a").code == 0
    assert team.left_at_last() == []


# ---- clusters that lack something ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_trainer() -> Iterator[RunningCluster]:
    """Kubernetes alone."""
    with own_cluster({}) as cluster:
        yield cluster


@pytest.mark.long
@pytest.mark.timeout(200)
def test_without_trainer(without_trainer: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(without_trainer.kubeconfig))
    script = tmp_path / "train.py"
    script.write_text("print()\n")
    commands: tuple[tuple[str, ...], ...] = (
        *(("list",), ("status", "a"), ("events", "a"), ("logs", "a"), ("suspend", "a")),
        *(("resume", "a"), ("scale", "a", "--nnodes", "2"), ("delete", "a"), ("submit", "--name", "a", str(script))),
    )
    kinds = "configmaps,secrets,pods,jobs"
    before = without_trainer.kubectl("-n", "default", "get", kinds, "-o", "name")
    for name, *words in commands:
        done = safepoint(name, *ON, "default", *words)
        assert done.code == ExitCode.NOT_FOUND, (name, done.stdout, done.stderr)
        assert is_one_sentence(done, "ask the cluster's administrator to install Kubeflow Trainer"), name
    watched = safepoint("watch", "--json", *ON, "default")
    assert (watched.code, "has no Kubeflow Trainer" in watched.stderr) == (ExitCode.NOT_FOUND, True), watched.stderr
    assert without_trainer.kubectl("-n", "default", "get", kinds, "-o", "name") == before
    done = safepoint("doctor", *ON, "default", "--json")
    assert done.code == 1, done.stderr
    found: dict[str, Any] = {one["check"]: one for one in done.document["findings"]}
    assert [found[name]["status"] for name in ("trainer", "jobset", "kueue")] == ["failure", "failure", "ok"]
    assert "install Kubeflow Trainer" in found["trainer"]["fix"]


@pytest.fixture(scope="module")
def without_kueue() -> Iterator[RunningCluster]:
    """A cluster that has no queues."""
    with own_cluster({"jobset": "0.12.0", "trainer": "2.3.0"}) as cluster:
        yield cluster


@pytest.mark.long
@pytest.mark.timeout(500)
def test_without_kueue(without_kueue: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole life, except for queues, which are refused."""
    monkeypatch.setenv("KUBECONFIG", str(without_kueue.kubeconfig))
    with workspace(without_kueue, tmp_path) as team:
        for options in (("--queue", "gpus"), ("--queue", "gpus", "--priority-class", "low")):
            done = try_submit(team, *options)
            assert done.code == ExitCode.NOT_FOUND, done.stderr
            assert is_one_sentence(done, "there is no queue gpus", "the namespace has no queues")
        done = safepoint("doctor", *ON, team.namespace, "--json")
        assert done.code == 0, done.stdout
        [found] = [one for one in done.document["findings"] if one["check"] == "kueue"]
        assert found["found"] == "not installed"
        submit(team, "tiny", "--nnodes", "2")
        wait(team, "tiny", trains_at(4))
        done = safepoint("suspend", *ON, team.namespace, "--json", "tiny")
        assert done.code == 0, done.stderr
        assert done.document["was_saved"] is True
        assert safepoint("resume", *ON, team.namespace, "tiny").code == 0
        wait(team, "tiny", lambda job: job["state"] == "Complete", 240)
        assert len(safepoint("list", *ON, team.namespace, "--json").document) == 1
        assert safepoint("delete", *ON, team.namespace, "tiny").code == 0
        assert team.left_at_last() == []
