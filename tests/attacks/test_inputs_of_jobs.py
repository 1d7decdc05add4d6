"""Data sets and models that are fetched for a job: fetches that are cut off, buckets that change, keys, strangers."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.errors import SafepointError
from safepoint.foundation.processes import processes_of
from safepoint.jobs.local.attempt import fetch as fetch_module
from safepoint.jobs.local.attempt import workspace
from safepoint.jobs.local.attempt.inputs import fetch_inputs, fetched
from safepoint.jobs.local.attempt.steps import JobStoppedError
from safepoint.jobs.local.history import History
from safepoint.jobs.local.paths import cache_folder, job_folder
from safepoint.jobs.local.supervisor import Supervisor
from safepoint.jobs.model.inputs import Input
from safepoint.jobs.model.states import JobState
from safepoint.sdk import LocalConfig, TransformersTrainer
from safepoint.sdk.local import inputs as sdk_inputs
from safepoint.sdk.local.spec import local_job
from safepoint.sdk.upstream import trainer as kubeflow
from tests.support.hub import cached_repository
from tests.support.job_values import job_spec
from tests.support.moto_server import MotoServer
from tests.support.patience import PATIENCE


def train() -> None:
    print("trained")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("STATE", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


def dataset(moto: MotoServer, prefix: str) -> Input:
    return Input(kind="dataset", source=f"s3://{moto.bucket}/{prefix}", target="/workspace/dataset")


def test_a_fetch_that_is_killed(folder: Path, moto: MotoServer) -> None:
    """Nothing counts as fetched; the next fetch is whole."""
    store = moto.store("killed")
    for number in range(40):
        store.write(f"{number}", os.urandom(200_000))
    one = dataset(moto, "killed")
    environ = {**os.environ, **moto.variables}

    def kill() -> None:
        deadline = time.monotonic() + 30 * PATIENCE
        while not list(cache_folder().glob("inputs/.unfinished-*/*")) and time.monotonic() < deadline:
            time.sleep(0.001)
        for pid in processes_of(folder):
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(SafepointError, match="its process ended with exit code -9"):
        fetch_inputs(job_spec(inputs=(one,)), folder, environ)
    thread.join()
    assert fetched(folder, one) is None
    assert [name for name in os.listdir(cache_folder() / "inputs") if not name.startswith(".unfinished-")] == []
    fetch_inputs(job_spec(inputs=(one,)), folder, environ)
    path = fetched(folder, one)
    assert path is not None
    assert sum(file.stat().st_size for file in Path(path).iterdir()) == 40 * 200_000
    assert os.listdir(cache_folder() / "inputs") == [Path(path).name], "what the killed fetch has left is deleted"


def test_a_download_that_was_interrupted(folder: Path, tmp_path: Path) -> None:
    """What it has left in the cache of the Hub counts as nothing: neither offline, nor when the server has gone."""
    cached_repository(tmp_path / "hub", "somebody/rows", {"a.jsonl": b"{}"}, kind="dataset")
    repository = tmp_path / "hub" / "hub" / "datasets--somebody--rows"
    (repository / "blobs" / f"{'0' * 64}.incomplete").write_bytes(b"half")
    spec = job_spec(inputs=(Input(kind="dataset", source="hf://somebody/rows", target="/workspace/dataset"),))
    environ = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_ENDPOINT": "http://127.0.0.1:1"}
    for is_offline, message in (("1", "was interrupted, and files may be missing"), ("0", "was not fetched")):
        with pytest.raises(SafepointError, match=message):
            fetch_inputs(spec, folder, {**environ, "HF_HUB_OFFLINE": is_offline})
        assert fetched(folder, spec.inputs[0]) is None


def test_a_cache_that_lacks_a_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client returns it as if it were whole, but the server has named another file."""
    snapshot = cached_repository(tmp_path / "hub", "somebody/rows", {"a.jsonl": b"{}"}, kind="dataset")
    info = SimpleNamespace(sha=snapshot.name, siblings=[SimpleNamespace(rfilename=name) for name in ("a.jsonl", "b")])
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **__: info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    one = Input(kind="dataset", source="hf://somebody/rows", target="/workspace/dataset")
    with pytest.raises(SafepointError, match="lacks b — delete"):
        fetch_module.fetch(one, tmp_path, tmp_path / "working")


def test_a_bucket_that_changes_meanwhile(tmp_path: Path, moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two halves of two versions never count as one."""
    store = moto.store("changes")
    for name in ("a", "b"):
        store.write(name, b"first")
    whole: Any = fetch_module._fetch_object

    def changing(*args: Any) -> None:
        whole(*args)
        store.write("a", b"later")

    monkeypatch.setattr(fetch_module, "_fetch_object", changing)
    for name, text in moto.variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(SafepointError, match="objects were changed while they were fetched"):
        fetch_module.fetch(dataset(moto, "changes"), tmp_path, tmp_path / "working")
    assert {path.name for path in tmp_path.iterdir()} <= {"job", "working"}


def test_keys_of_initializers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the history, nor a message, nor the description of the job has them."""
    targets = {kind: str(tmp_path / "workspace" / kind) for kind in sdk_inputs.TARGETS}
    monkeypatch.setattr(sdk_inputs, "TARGETS", targets)
    initializer = kubeflow.Initializer(
        dataset=kubeflow.S3DatasetInitializer("s3://b/x", access_key_id="AKIA7", secret_access_key="very-secret-7"),
        model=kubeflow.HuggingFaceModelInitializer("hf://a/b", access_token="hf_very-secret-7"),
    )
    job = local_job(TransformersTrainer(train), LocalConfig(), None, initializer)
    with History() as history:
        history.add(job.spec, actor="me")
    stored = b"".join(path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file())
    for secret in ("AKIA7", "very-secret-7"):
        assert secret not in repr(job)
        assert secret not in job.spec.to_json()
        assert secret.encode() not in stored
        assert any(secret.encode() in data for data in job.files.values())
    assert not job_folder(job.spec.name).exists()
    refused = kubeflow.S3DatasetInitializer("s3://b/x", secret_access_key="very-secret-7")
    with pytest.raises(SafepointError) as error:
        local_job(TransformersTrainer(train), LocalConfig(), None, kubeflow.Initializer(dataset=refused))
    assert "very-secret-7" not in str(error.value)


def test_what_others_have_put_at_the_paths_of_pods(tmp_path: Path) -> None:
    """A link to a folder of another user is not followed, and not changed."""
    planted = tmp_path / "planted"
    planted.mkdir()
    target = tmp_path / "workspace" / "dataset"
    target.parent.mkdir()
    target.symlink_to(planted)
    with pytest.raises(SafepointError, match="exists on this machine, and is no link to"):
        workspace.provide_workspace([str(target)])
    with pytest.raises(SafepointError, match="no longer points to"):
        workspace.point(str(target), str(tmp_path))
    assert os.readlink(target) == str(planted)


def test_two_jobs_that_need_other_files_at_one_path(tmp_path: Path) -> None:
    """The path does not change while a job uses it; the other job waits, and begins when the first has ended."""
    target = str(tmp_path / "workspace" / "dataset")
    workspace.provide_workspace([target])
    with History() as history:
        supervisors: dict[str, Supervisor] = {}
        for name in ("a", "b", "same"):
            source = tmp_path / ("b" if name == "b" else "a")
            source.mkdir(exist_ok=True)
            one = Input(kind="dataset", source=str(source), target=target)
            history.add(job_spec(name, inputs=(one,)), actor="me")
            history.become(name, JobState.RUNNING, actor="me")
            job_folder(name).mkdir(parents=True)
            fetch_inputs(history.job(name).spec, job_folder(name), os.environ)
            supervisors[name] = Supervisor(name, history)
        assert supervisors["a"]._enter_workspace(history.job("a")) is None
        assert supervisors["same"]._enter_workspace(history.job("same")) is None
        assert supervisors["b"]._enter_workspace(history.job("b")) in {("a", target), ("same", target)}
        assert os.path.realpath(target) == str(tmp_path / "a")
        supervisors["b"].was_asked_to_leave = True
        with pytest.raises(JobStoppedError):
            supervisors["b"]._wait_for_workspace(history.job("b"))
        assert "waits for job a, which uses other files at" in history.job("b").message
        for name in ("a", "same"):
            history.become(name, JobState.COMPLETE, actor="me")
        assert supervisors["b"]._enter_workspace(history.job("b")) is None
        assert os.path.realpath(target) == str(tmp_path / "b")


def test_the_message_names_the_path_of_the_other_files(tmp_path: Path) -> None:
    """Also if the conflict is at the second input."""
    targets = [str(tmp_path / "workspace" / name) for name in ("dataset", "model")]
    workspace.provide_workspace(targets)
    for name in ("data", "model-a", "model-b"):
        (tmp_path / name).mkdir()
    with History() as history:
        for name in ("a", "b"):
            inputs = (
                Input(kind="dataset", source=str(tmp_path / "data"), target=targets[0]),
                Input(kind="model", source=str(tmp_path / f"model-{name}"), target=targets[1]),
            )
            history.add(job_spec(name, inputs=inputs), actor="me")
            history.become(name, JobState.RUNNING, actor="me")
            job_folder(name).mkdir(parents=True)
            fetch_inputs(history.job(name).spec, job_folder(name), os.environ)
        assert Supervisor("a", history)._enter_workspace(history.job("a")) is None
        waiting = Supervisor("b", history)
        waiting.was_asked_to_leave = True
        with pytest.raises(JobStoppedError):
            waiting._wait_for_workspace(history.job("b"))
        assert history.job("b").message == f"waits for job a, which uses other files at {targets[1]}"


def test_a_record_that_is_damaged(folder: Path, tmp_path: Path) -> None:
    """It counts as none."""
    one = Input(kind="dataset", source=str(tmp_path), target="/workspace/dataset")
    record = folder / "dataset-initializer.fetched.json"
    for content in (b"", b"{", b"[]", b"3", b"null", b'{"path": 3}', json.dumps({"path": "/absent"}).encode()):
        record.write_bytes(content)
        assert fetched(folder, one) is None, content
