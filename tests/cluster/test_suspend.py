"""`suspend` and its receipt: which checkpoint there is, where, what was checked; and what has nothing to save."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from safepoint import TrainerClient
from safepoint.checkpoint.tools.receipt import check_checkpoint
from safepoint.errors import ExitCode
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.sdk.upstream import KubernetesBackendConfig
from tests.cluster.test_doctor import user
from tests.cluster.test_life import ON, TRAIN, submit, trains_at, wait
from tests.support.cluster.workspace import CLAIM, QUEUE, RUNTIME, Workspace, apply, queue_objects
from tests.support.commands import Outcome, safepoint
from tests.support.jobs import TINY, read_events
from tests.support.moto_server import moto_server

SLOW = ("--epochs", "9", "--step-ms", "250")
ONE_POD = ("--cpu", "1", "--memory", "1Gi")
"""With a core of its own, a pod also trains on a busy machine; it has no two."""
_TRAINER = "trainer.kubeflow.org"
WITHOUT_EXEC = [
    {"apiGroups": [_TRAINER], "resources": ["*"], "verbs": ["*"]},
    {"apiGroups": ["jobset.x-k8s.io", "batch", "kueue.x-k8s.io"], "resources": ["*"], "verbs": ["*"]},
    {"apiGroups": [""], "resources": ["pods", "pods/log", "events", "configmaps", "secrets"], "verbs": ["*"]},
    {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["get", "list"]},
]


def suspend(team: Workspace, name: str, *options: str) -> Outcome:
    return safepoint("suspend", *ON, team.namespace, *options, name)


def delete(team: Workspace, name: str) -> None:
    assert safepoint("delete", *ON, team.namespace, name).code == 0
    assert team.left_at_last() == []


def checked(team: Workspace, name: str, receipt: dict[str, Any]) -> dict[str, Any]:
    """The receipt, after what it says was compared with the claim."""
    found = check_checkpoint(str(team.folder / name), receipt["step"], deep=True)
    assert receipt["digest"] == found.digest
    assert receipt["checkpoint"] == f"pvc://{CLAIM}/{name}/{found.name}"
    return receipt


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [ONE_POD, ("--nnodes", "2")], ids=["one", "two"])
def test_a_save_is_requested_first(size: tuple[str, ...], team: Workspace) -> None:
    """The ranks wait after it: the last step of the attempt is that of the receipt, and every file was compared."""
    submit(team, "tiny", *size, program=SLOW)
    wait(team, "tiny", trains_at(4))
    done = suspend(team, "tiny", "--json")
    assert done.code == 0, done.stderr
    receipt = checked(team, "tiny", done.document["receipt"])
    assert (receipt["was_requested"], receipt["is_read"], receipt["reason"]) == (True, True, ""), receipt
    assert (done.document["was_saved"], done.document["safe_step"]) == (True, receipt["step"])
    output = team.folder / "tiny"
    [saved] = read_events(output, "saved")
    assert (saved["trigger"], saved["step"]) == ("on-demand", receipt["step"])
    assert [event["step"] for event in read_events(output, "interrupted")] == [receipt["step"]]
    shown = safepoint("status", *ON, team.namespace, "--json", "tiny").document
    assert shown["receipt"] == receipt
    again = suspend(team, "tiny")
    assert again.code == 0
    assert "it was suspended before, by " in again.stdout
    assert f"step {receipt['step']} was saved in {receipt['checkpoint']}" in again.stdout
    assert safepoint("resume", *ON, team.namespace, "tiny").code == 0
    assert safepoint("status", *ON, team.namespace, "--json", "tiny").document["receipt"] is None
    wait(team, "tiny", trains_at(receipt["step"] + 1), 180)
    assert [event["step"] for event in read_events(output, "resumed")] == [receipt["step"]]
    delete(team, "tiny")


@pytest.mark.timeout(400)
def test_without_the_right_the_pods_save_at_sigterm(
    team: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence says why, and the checkpoint was checked by the pod that ended."""
    submit(team, "tiny", *ONE_POD, program=SLOW)
    wait(team, "tiny", trains_at(4))
    with monkeypatch.context() as patched:
        patched.setenv("KUBECONFIG", str(user(team, tmp_path, WITHOUT_EXEC)))
        done = suspend(team, "tiny", "--json")
    assert done.code == 0, done.stderr
    receipt = checked(team, "tiny", done.document["receipt"])
    assert (receipt["was_requested"], receipt["is_read"]) == (False, False)
    assert receipt["reason"] == "you are not allowed to create and get pods/exec"
    assert "at SIGTERM because you are not allowed to create and get pods/exec" in done.document["message"]
    assert read_events(team.folder / "tiny", "saved")[-1]["trigger"] == "jit"
    assert safepoint("status", *ON, team.namespace, "--json", "tiny").document["receipt"] == receipt
    delete(team, "tiny")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("may_exec", [True, False])
def test_in_a_bucket(may_exec: bool, team: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receipt names the checkpoint in the bucket: the one in the pod's own folder is lost with the pod."""
    with moto_server(tmp_path, team.cluster.host) as moto:
        secret = {"apiVersion": "v1", "kind": "Secret", "stringData": moto.variables}
        apply(team.cluster, [{**secret, "metadata": {"name": "models", "namespace": team.namespace}}])
        location = str(moto.location("run"))
        done = safepoint(
            *("submit", *ON, team.namespace, "--name", "tiny", "--code", str(TINY.parent)),
            *("--output-dir", location, "--connection", "models", *ONE_POD, "tiny.py", "--out", "/tmp/out", *SLOW),
        )
        assert done.code == 0, done.stderr
        wait(team, "tiny", trains_at(4))
        with monkeypatch.context() as patched:
            if not may_exec:
                patched.setenv("KUBECONFIG", str(user(team, tmp_path, WITHOUT_EXEC)))
            done = suspend(team, "tiny", "--json")
        assert done.code == 0, done.stderr
        receipt = done.document["receipt"]
        assert receipt["was_requested"] is may_exec, receipt
        assert receipt["checkpoint"] == f"{location}/checkpoint-{receipt['step']}"
        assert f"checkpoint-{receipt['step']}/safepoint-manifest.json" in [
            item.key for item in moto.store("run").list()
        ]
        assert safepoint("delete", *ON, team.namespace, "tiny").code == 0


@pytest.mark.timeout(400)
def test_a_job_of_a_queue_through_its_workload(team: Workspace) -> None:
    """First one that is not admitted, then one that trains."""
    apply(team.cluster, queue_objects(team.namespace, cpu="1"))
    queue = ("--queue", QUEUE, *ONE_POD)
    submit(team, "first", *queue, program=SLOW)
    wait(team, "first", trains_at(4))
    submit(team, "second", *queue, program=SLOW)
    wait(team, "second", lambda job: job["state"] == "Queued")
    waiting = suspend(team, "second", "--json")
    assert waiting.code == 0, waiting.stderr
    assert (waiting.document["state"], waiting.document["receipt"]) == ("Suspended", None)
    assert "it was not admitted, so nothing ran" in waiting.document["message"]
    done = suspend(team, "first", "--json")
    assert done.code == 0, done.stderr
    assert checked(team, "first", done.document["receipt"])["was_requested"]
    workloads = team.get("workloads.kueue.x-k8s.io")["items"]
    assert [item["spec"]["active"] for item in workloads] == [False, False]
    assert not any(job["spec"].get("suspend") is False for job in team.get("trainjobs")["items"])
    for name in ("first", "second"):
        assert safepoint("delete", *ON, team.namespace, name).code == 0


@pytest.mark.timeout(300)
def test_a_job_that_has_not_started_or_that_another_program_suspended(team: Workspace) -> None:
    submit(team, "stuck", "--image", "none.example/none:1", program=TRAIN)
    wait(team, "stuck", lambda job: job["state"] in {"Starting", "Inadmissible"})
    done = suspend(team, "stuck")
    assert done.code == 0, done.stderr
    assert "it did not train yet" in done.stdout or "it was not admitted" in done.stdout, done.stdout
    assert safepoint("resume", *ON, team.namespace, "stuck").code == 0
    team.kubectl("annotate", "trainjob", "stuck", "safepoint.dev/suspended-by-")
    team.kubectl("patch", "trainjob", "stuck", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    wait(team, "stuck", lambda job: job["state"] == "Suspended")
    done = suspend(team, "stuck")
    assert done.code == 0, done.stderr
    assert "it was suspended before, by another program than Safepoint" in done.stdout
    delete(team, "stuck")
    assert suspend(team, "stuck").code == ExitCode.NOT_FOUND


@pytest.mark.timeout(300)
def test_a_job_of_kubectl_is_suspended_without_a_receipt(team: Workspace) -> None:
    sleeps = "import time; time.sleep(600)"
    job = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "other", "namespace": team.namespace},
        "spec": {
            "runtimeRef": {"name": RUNTIME},
            "trainer": {"numNodes": 1, "command": ["python3", "-c", sleeps]},
        },
    }
    team.kubectl("create", "-f", "-", stdin=json.dumps(job))

    def runs(_: object) -> bool:
        return any(pod["status"]["phase"] == "Running" for pod in team.get("pods")["items"])

    wait(team, "other", runs)
    done = suspend(team, "other", "--json")
    assert done.code == 0, done.stderr
    document = done.document
    assert (document["state"], document["was_saved"], document["receipt"]) == ("Suspended", None, None)
    assert "without a receipt: Safepoint did not submit it" in document["message"]
    delete(team, "other")


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Kubeflow's client is never closed
def test_scale_and_the_sdk_have_the_receipt_too(team: Workspace) -> None:
    submit(team, "tiny", "--allow-batch-change", program=SLOW)
    wait(team, "tiny", trains_at(4))
    client = TrainerClient(
        KubernetesBackendConfig(namespace=team.namespace, config_file=str(team.cluster.kubeconfig))
    )
    scaled = client.scale_job("tiny", num_nodes=2)
    assert scaled.receipt is not None
    assert scaled.receipt.was_requested
    wait(team, "tiny", trains_at(scaled.receipt.step + 1), 180)
    suspended = client.suspend_job("tiny")
    assert suspended.receipt is not None
    assert suspended.receipt.step > scaled.receipt.step
    assert suspended.receipt.was_requested
    delete(team, "tiny")
    del client
    gc.collect()  # the warning belongs to this test


@pytest.mark.timeout(400)
def test_a_job_of_a_queue_with_kueues_own_role_for_users(
    team: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may only read Workloads. The job trains on, and no command stops it later."""
    apply(team.cluster, queue_objects(team.namespace, cpu="1"))
    submit(team, "tiny", "--queue", QUEUE, *ONE_POD, program=SLOW)
    wait(team, "tiny", trains_at(4))
    before = {name: team.get("trainjob", "tiny")["spec"].get(name) for name in ("suspend", "trainer")}
    [pod] = [pod["metadata"]["uid"] for pod in team.get("pods")["items"]]
    core = [{"apiGroups": [""], "resources": ["*"], "verbs": ["*"]}]
    api = "rbac.authorization.k8s.io"
    binding = {
        "apiVersion": f"{api}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "batch-user", "namespace": team.namespace},
        "subjects": [{"kind": "ServiceAccount", "name": "person", "namespace": team.namespace}],
        "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": "kueue-batch-user-role"},
    }
    with monkeypatch.context() as patched:
        patched.setenv("KUBECONFIG", str(user(team, tmp_path, core)))
        apply(team.cluster, [binding])
        for words in (("suspend", "tiny"), ("scale", "tiny", "--nnodes", "2")):
            done = safepoint(words[0], *ON, team.namespace, *words[1:])
            assert done.code == ExitCode.NOT_AUTHORISED, (words, done.stdout, done.stderr)
            assert "you are not allowed to patch workloads; nothing was done" in done.stderr
        assert safepoint("list", *ON, team.namespace).code == 0
        assert "not allowed to patch workloads" in safepoint("doctor", *ON, team.namespace).stdout
    job = team.get("trainjob", "tiny")
    assert {name: job["spec"].get(name) for name in before} == before
    assert [pod] == [one["metadata"]["uid"] for one in team.get("pods")["items"]]
    assert team.get("trainjobs", "", "-l", "safepoint.dev/successor-of")["items"] == []
    delete(team, "tiny")


@pytest.mark.timeout(400)
def test_another_person_resumes_the_job_meanwhile(team: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends with a message, and the job trains on."""
    submit(team, "tiny", *ONE_POD, program=SLOW)
    wait(team, "tiny", trains_at(4))
    asked = ClusterApi.patch

    def patch(api: ClusterApi, kind: str, name: str, body: Any) -> Any:
        done = asked(api, kind, name, body)
        if body.get("spec") == {"suspend": True}:  # the other person acts before the pods are gone
            team.kubectl("patch", "trainjob", "tiny", "--type=merge", "-p", '{"spec":{"suspend":false}}')
        return done

    monkeypatch.setattr(ClusterApi, "patch", patch)
    done = suspend(team, "tiny")
    assert done.code == ExitCode.CONFLICT, (done.stdout, done.stderr)
    assert "job tiny was resumed while it was being suspended" in done.stderr
    monkeypatch.undo()
    monkeypatch.setenv("KUBECONFIG", str(team.cluster.kubeconfig))
    wait(team, "tiny", trains_at(5), 180)
    delete(team, "tiny")
