"""`safepoint checkpoints … --on` and `delete --checkpoints --on`, through a pod with the claim or directly."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import ExitCode
from tests.cluster.test_doctor import user
from tests.cluster.test_life import ON, submit, wait
from tests.support.checkpoints import commit, prepared
from tests.support.cluster import killed
from tests.support.cluster.workspace import CLAIM, Workspace, apply, restrict
from tests.support.commands import Outcome, safepoint
from tests.support.moto_server import moto_server
from tests.support.patience import PATIENCE


def saved(team: Workspace, name: str = "out") -> Path:
    """A folder of the claim with three checkpoints, which every user may read and change, as a job's pods make it."""
    output = prepared(team.folder / name)
    for step in (10, 20, 30):
        commit(output, step)
    for path in [output.root, *output.root.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)
    return output.root


def there(team: Workspace, command: str, *words: object, path: str = "out") -> Outcome:
    return safepoint("checkpoints", command, *ON, team.namespace, *words, f"pvc://{CLAIM}/{path}")


def here(team: Workspace, command: str, *words: object, path: str = "out") -> Outcome:
    """The same command for the claim's folder, with the claim's address in place of the folder."""
    done = safepoint("checkpoints", command, *words, team.folder / path)
    shown = [text.replace(str(team.folder), f"pvc://{CLAIM}") for text in (done.stdout, done.stderr)]
    return Outcome(code=done.code, stdout=shown[0], stderr=shown[1])


def without_ages(text: str) -> list[list[str]]:
    return [[word for word in line.split() if not word[:1].isdigit()] for line in text.splitlines()]


def nothing_left(team: Workspace) -> None:
    deadline_s = time.monotonic() + 60 * PATIENCE
    while (found := left(team)) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    assert found == []


def left(team: Workspace) -> list[str]:
    """What the helpers have left."""
    return [name for name in team.left() if "safepoint-helper" in name]


@pytest.mark.timeout(400)
def test_the_answers_are_those_of_a_folder(team: Workspace) -> None:
    """As text and JSON, with the same exit codes; also of a damaged checkpoint and of commands that change."""
    output = saved(team)
    done = there(team, "list")
    assert done.code == 0, done.stderr
    assert without_ages(done.stdout) == without_ages(here(team, "list").stdout)
    assert there(team, "show", "--json") == here(team, "show", "--json")
    damaged = output / "checkpoint-10" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    for words in (["--deep"], ["--deep", "--json"]):
        done = there(team, "verify", *words)
        assert done.code == ExitCode.NOTHING_VALID
        assert done == here(team, "verify", *words)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    assert there(team, "prune", "--keep", "newest=1", "--dry-run").stdout.count("would delete pvc://") == 2
    expected = here(team, "prune", "--keep", "newest=1", "--json", "--dry-run").document
    done = there(team, "prune", "--keep", "newest=1", "--json")
    assert done.code == 0, done.stderr
    assert done.document == {**expected, "dry_run": False}
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-30"]
    done = there(team, "list", path="none")
    assert (done.code, done.stderr) == (ExitCode.STORAGE, here(team, "list", path="none").stderr)
    nothing_left(team)


@pytest.mark.timeout(300)
def test_under_the_restricted_standard(team: Workspace) -> None:
    """With the runtime's user id, read-only root, and no package of the control side."""
    saved(team)
    restrict(team)
    done = there(team, "list", "--json")
    assert done.code == 0, done.stderr
    assert [item["name"] for item in done.document] == ["checkpoint-30", "checkpoint-20", "checkpoint-10"]
    assert done.document[0]["where"] == f"pvc://{CLAIM}/out/checkpoint-30"
    nothing_left(team)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_killed_leaves_nothing(how: signal.Signals, team: Workspace) -> None:
    """Its pod waits for an image that does not exist, so only the cluster can end it."""
    # A shell lets the programs in its background ignore SIGINT.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from safepoint.cli.main import main; main()"
    program = [sys.executable, "-P", "-c", code, "checkpoints", "list", *ON, team.namespace]
    command = subprocess.Popen(
        [*program, "--image", "registry.invalid/none:1", f"pvc://{CLAIM}/out"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline_s = time.monotonic() + 60 * PATIENCE
    while not any("pod/" in name for name in left(team)):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    command.send_signal(how)
    ended = command.wait(30)
    assert ended == (-9 if how is signal.SIGKILL else 130)
    seconds = (180 if how is signal.SIGKILL else 45) * PATIENCE
    begun_s = time.monotonic()
    while (found := left(team)) and time.monotonic() - begun_s < seconds:
        time.sleep(1)
    print(f"{how.name}: nothing is left after {time.monotonic() - begun_s:.0f} s")
    assert found == []


@pytest.mark.timeout(400)
def test_what_cannot_work_is_said(team: Workspace, tmp_path: Path) -> None:
    """One sentence each, with the reason; nothing is left."""
    pending = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"namespace": team.namespace}
    document: Any = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "spec": {**pending, "storageClassName": "no"},
    }
    apply(team.cluster, [{**document, "metadata": {**metadata, "name": "pending"}}])
    team.kubectl("wait", "--for=jsonpath={.status.phase}=Bound", f"pvc/{CLAIM}", "--timeout=60s")

    def fails(code: int, *words: str, options: tuple[object, ...] = (), claim: str = CLAIM) -> None:
        done = safepoint("checkpoints", "list", *ON, team.namespace, *options, f"pvc://{claim}/out")
        assert done.code == code, done
        *before, error = done.stderr.strip().splitlines()
        assert all("has not started yet" in line for line in before), done.stderr
        assert all(word in error for word in words), error
        nothing_left(team)

    fails(ExitCode.NOT_FOUND, "there is no claim nope", claim="nope")
    fails(ExitCode.CONFLICT, "claim pending is Pending", "no volume", claim="pending")
    fails(ExitCode.CONFLICT, "no node has room for the pod", options=("--memory", "900Gi"))
    fails(ExitCode.CONFLICT, "cannot be pulled", "--image", options=("--image", "registry.invalid/none:1"))
    fails(ExitCode.USAGE, "--memory", options=("--memory", "much"))
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "spec": {"hard": {"count/pods": "0", "pods": "0"}}}
    apply(team.cluster, [{**quota, "metadata": {**metadata, "name": "few"}}])
    while not team.get("resourcequota", "few").get("status"):
        time.sleep(0.2)
    fails(ExitCode.CONFLICT, "a quota of the namespace is used up", "pods")
    team.kubectl("delete", "resourcequota", "few")


@pytest.mark.timeout(400)
def test_without_each_right(team: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the right, and nothing is left."""
    saved(team)
    needed = {
        ("", "persistentvolumeclaims"): ["get"],
        ("", "configmaps"): ["create"],
        ("", "pods"): ["list"],
        ("", "pods/log"): ["get"],
        ("batch", "jobs"): ["get", "create", "patch", "delete"],
        ("trainer.kubeflow.org", "trainjobs"): ["list"],
        ("trainer.kubeflow.org", "trainingruntimes"): ["get", "list"],
        ("", "events"): ["list"],
    }
    runtime = {**team.get("clustertrainingruntime", "torch-distributed"), "kind": "TrainingRuntime"}
    runtime["metadata"] = {"name": "torch-distributed", "namespace": team.namespace}
    apply(team.cluster, [runtime])

    def done_with(rights: dict[tuple[str, str], list[str]]) -> Outcome:
        rules = [
            {"apiGroups": [group], "resources": [kind], "verbs": verbs} for (group, kind), verbs in rights.items()
        ]
        with monkeypatch.context() as patched:
            patched.setenv("KUBECONFIG", str(user(team, tmp_path, rules)))
            return there(team, "list")

    done = done_with(needed)
    assert done.code == 0, done.stderr
    for group, kind in (("", "persistentvolumeclaims"), ("", "configmaps"), ("batch", "jobs"), ("", "pods/log")):
        rights = {key: ["watch"] if key == (group, kind) else verbs for key, verbs in needed.items()}
        done = done_with(rights)
        assert done.code == ExitCode.NOT_AUTHORISED, (kind, done)
        assert kind.partition("/")[0] in done.stderr
        assert "you are not allowed" in done.stderr
        nothing_left(team)


@pytest.mark.timeout(400)
def test_the_checkpoints_of_a_job_and_their_deletion(team: Workspace, tmp_path: Path) -> None:
    """`job:NAME`; then `delete --checkpoints`, killed after two of its requests. No node has room for the job."""
    saved(team, "tiny")
    submit(team, "tiny", "--memory", "900Gi")
    wait(team, "tiny", lambda job: "no node has room" in job["message"])
    done = safepoint("checkpoints", "list", *ON, team.namespace, "--json", "job:tiny")
    assert done.code == 0, done.stderr
    assert done.document[0]["where"].startswith(f"pvc://{CLAIM}/tiny/checkpoint-")
    refused = safepoint("delete", *ON, team.namespace, "--checkpoints", "tiny")
    assert refused.code == ExitCode.CONFLICT
    assert f"pvc://{CLAIM}/tiny cannot be undone" in refused.stderr
    (team.folder / "tiny" / "mine.txt").write_text("x")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    jobs = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{team.namespace}/trainjobs/tiny"
    words = ["delete", *ON, team.namespace, "--checkpoints", "--yes", "tiny"]
    for fatal in (("PATCH", jobs, "1"), ("POST", f"/apis/batch/v1/namespaces/{team.namespace}/jobs", "1")):
        command = [sys.executable, "-P", killed.__file__, str(tmp_path / "log"), *fatal, "--", *words]
        done = subprocess.run(command, env=environ, check=False, capture_output=True, text=True, timeout=200)
        assert done.returncode == -9, done.stderr
    status = safepoint("status", *ON, team.namespace, "--json", "tiny").document
    assert "its checkpoints are being deleted" in status["message"]
    refused = safepoint("resume", *ON, team.namespace, "tiny")
    assert refused.code == ExitCode.CONFLICT
    assert "delete tiny --checkpoints" in refused.stderr
    done = safepoint(*words)
    assert done.code == 0, done.stderr
    assert "deleted" in done.stdout
    assert not list((team.folder / "tiny").glob("checkpoint-*"))
    assert (team.folder / "tiny" / "mine.txt").exists()
    assert safepoint("status", *ON, team.namespace, "tiny").code == ExitCode.NOT_FOUND


@pytest.mark.timeout(300)
def test_an_object_store_directly(team: Workspace, tmp_path: Path) -> None:
    """With the keys of a Secret; a copy from a claim goes through a pod with the same keys."""
    saved(team)
    with moto_server(tmp_path, team.cluster.host) as moto:
        secret = {"apiVersion": "v1", "kind": "Secret", "stringData": moto.variables}
        apply(team.cluster, [{**secret, "metadata": {"name": "models", "namespace": team.namespace}}])
        keys = ("--connection", "models")
        target = str(moto.location("run"))
        done = safepoint("checkpoints", "copy", *ON, team.namespace, *keys, f"pvc://{CLAIM}/out", target)
        assert done.code == 0, done.stderr
        done = safepoint("checkpoints", "list", *ON, team.namespace, *keys, "--deep", "--json", target)
        assert done.code == 0, done.stderr
        assert [item["state"] for item in done.document] == ["verified"] * 3
        done = safepoint("checkpoints", "list", *ON, team.namespace, "--connection", "none", target)
        assert done.code == ExitCode.NOT_FOUND
        assert "there is no Secret none" in done.stderr
        assert json.dumps(moto.variables["AWS_SECRET_ACCESS_KEY"]) not in team.kubectl("get", "jobs", "-o", "json")


@pytest.mark.timeout(400)
def test_code_beyond_a_config_map(team: Workspace, tmp_path: Path) -> None:
    """It goes to the claim, and to an object store, under its digest; the pod has it byte for byte."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "data.bin").write_bytes(random.Random(1).randbytes(3_000_000))
    digest = hashlib.sha256((folder / "data.bin").read_bytes()).hexdigest()
    (folder / "main.py").write_text(
        "import hashlib; print(hashlib.sha256(open('data.bin', 'rb').read()).hexdigest())\n"
    )

    def runs(name: str, *options: str) -> None:
        words = (
            "submit",
            *ON,
            team.namespace,
            "--name",
            name,
            *options,
            "--cpu",
            "1",
            "--code",
            str(folder),
            "main.py",
        )
        done = safepoint(*words)
        assert done.code == 0, done.stderr
        wait(team, name, lambda job: job["state"] == "Complete", 120)
        assert digest in safepoint("logs", *ON, team.namespace, name).stdout

    runs("a", "--output-dir", f"pvc://{CLAIM}/a")
    (stored,) = (team.folder / "a" / ".safepoint" / "code").iterdir()
    assert stored.stem == hashlib.sha256(stored.read_bytes()).hexdigest()
    with moto_server(tmp_path, team.cluster.host) as moto:
        secret = {"apiVersion": "v1", "kind": "Secret", "stringData": moto.variables}
        apply(team.cluster, [{**secret, "metadata": {"name": "models", "namespace": team.namespace}}])
        runs("b", "--output-dir", str(moto.location("run")), "--connection", "models")
        assert f".safepoint/code/{stored.name}" in [item.key for item in moto.store("run").list()]
    refused = safepoint("submit", *ON, team.namespace, "--code", str(folder), "main.py")
    assert refused.code == ExitCode.USAGE
    assert "3,0" in refused.stderr
    nothing_left(team)
