"""What is fetched before the launchers start: from folders, from S3, and from the cache and the server of the Hub."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from safepoint.errors import SafepointError
from safepoint.foundation.processes import processes_of
from safepoint.jobs.local.attempt.inputs import fetch_inputs, fetched
from safepoint.jobs.local.attempt.steps import JobStoppedError
from safepoint.jobs.local.attempt.workspace import content_of, point, provide_workspace
from safepoint.jobs.local.paths import cache_folder
from safepoint.jobs.model.inputs import Input
from safepoint.jobs.model.spec import JobSpec
from tests.support.hub import cached_repository, hub_with
from tests.support.job_values import job_spec
from tests.support.moto_server import MotoServer


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job, on a machine of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


def spec_of(source: str, **fields: object) -> JobSpec:
    one = Input(kind="dataset", source=source, target="/workspace/dataset", **fields)  # type: ignore[arg-type]
    return job_spec(inputs=(one,))


def environment(more: Mapping[str, str]) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("AWS_", "HF_"))}
    return {**kept, **more}


def fetch(spec: JobSpec, folder: Path, more: Mapping[str, str] | None = None) -> Path:
    fetch_inputs(spec, folder, environment(more or {}))
    found = fetched(folder, spec.inputs[0])
    assert found is not None
    return Path(found)


def log_of(folder: Path) -> str:
    return (folder / "logs" / "dataset-initializer.log").read_text()


def test_the_record_of_a_job_keeps_its_inputs() -> None:
    """Also in the history; a job of an earlier release has none."""
    spec = spec_of("s3://bucket/data", ignore=("*.bin",), env={"AWS_REGION": "x"})
    assert JobSpec.from_json(spec.to_json()) == spec
    record = json.loads(spec.to_json())
    del record["inputs"]
    assert JobSpec.from_json(json.dumps(record)).inputs == ()


def test_a_folder_is_used_where_it_is(folder: Path, tmp_path: Path) -> None:
    """It is not copied; if it is deleted, the job fails and says so."""
    (tmp_path / "data").mkdir()
    spec = spec_of(str(tmp_path / "data"))
    assert fetch(spec, folder) == tmp_path / "data"
    assert "is used where it is" in log_of(folder)
    (tmp_path / "data").rmdir()
    with pytest.raises(SafepointError, match=r"the dataset /.*/data was not fetched: there is no folder .*log"):
        fetch_inputs(spec, folder, environment({}))


def test_a_bucket(folder: Path, tmp_path: Path, moto: MotoServer) -> None:
    """Each file once, also for another job; the job keeps its files when the bucket changes."""
    store = moto.store("inputs")
    for key, data in {"train/a.jsonl": b"one", "empty": b"", "model.bin": b"ignored", "cache/x": b"ignored"}.items():
        store.write(key, data)
    spec = spec_of(f"s3://{moto.bucket}/inputs", ignore=("*.bin", "cache/"))
    path = fetch(spec, folder, moto.variables)
    assert {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()} == {
        "train/a.jsonl": b"one",
        "empty": b"",
    }
    assert "fetching 2 files" in log_of(folder)
    store.write("train/a.jsonl", b"other")
    assert fetch(spec, folder, moto.variables) == path, "the job has its files already, and sends no request"
    store.write("train/a.jsonl", b"one")
    (tmp_path / "second").mkdir()
    assert fetch(spec, tmp_path / "second", moto.variables).parent == path.parent
    shutil.rmtree(path)
    assert fetch(spec, folder, moto.variables).is_dir(), "what was deleted is fetched again"
    one = spec_of(f"s3://{moto.bucket}/inputs/train/a.jsonl")
    (tmp_path / "third").mkdir()
    assert os.listdir(fetch(one, tmp_path / "third", moto.variables)) == ["a.jsonl"]


def test_keys_of_an_initializer_go_to_its_server_only(folder: Path, moto: MotoServer) -> None:
    """They replace those of the environment, with its server; they are removed when the fetch is complete."""
    moto.store("keys").write("a", b"one")
    spec = spec_of(f"s3://{moto.bucket}/keys", env={"AWS_ENDPOINT_URL_S3": moto.endpoint})
    keys = {"AWS_ACCESS_KEY_ID": moto.keys[0], "AWS_SECRET_ACCESS_KEY": moto.keys[1]}
    file = folder / spec.inputs[0].keys_file
    file.write_text(json.dumps(keys))
    elsewhere = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_PROFILE": "other", "AWS_ACCESS_KEY_ID": "x"}
    assert (fetch(spec, folder, elsewhere) / "a").read_bytes() == b"one"
    assert not file.exists()


def test_what_cannot_be_fetched(folder: Path, moto: MotoServer) -> None:
    """The cause is in the message and in the log of the step, and nothing is left."""
    spec = spec_of(f"s3://{moto.bucket}/nothing-here")
    with pytest.raises(SafepointError, match="was not fetched: there are no objects at this location") as error:
        fetch(spec, folder, moto.variables)
    assert error.value.exit_code == 13
    assert "safepoint: error: there are no objects" in log_of(folder)
    store = moto.store("both")
    store.write("a", b"1")
    store.write("a/b", b"2")
    with pytest.raises(SafepointError, match="is both an object and a folder of objects"):
        fetch(spec_of(f"s3://{moto.bucket}/both"), folder, moto.variables)
    assert os.listdir(cache_folder() / "inputs") == []


def test_the_cache_of_the_hub(folder: Path, tmp_path: Path) -> None:
    """Without a network; a file that the cache has lost is noticed, and so is a repository that it does not have."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    snapshot = cached_repository(tmp_path / "hub", "somebody/rows", {"train.jsonl": b"{}"}, kind="dataset")
    spec = spec_of("hf://somebody/rows")
    assert fetch(spec, folder, offline) == snapshot
    assert "HF_HUB_OFFLINE is set: whether the cache has all files" in log_of(folder)
    (tmp_path / "second").mkdir()
    with pytest.raises(SafepointError, match="hf download somebody/absent --repo-type dataset"):
        fetch(spec_of("hf://somebody/absent"), tmp_path / "second", offline)
    os.unlink(os.path.realpath(snapshot / "train.jsonl"))
    (tmp_path / "third").mkdir()
    with pytest.raises(SafepointError, match=r"lacks train\.jsonl"):
        fetch(spec, tmp_path / "third", offline)


def test_the_server_of_the_hub(folder: Path, tmp_path: Path) -> None:
    """With the token of the initializer; each file once, without those that are ignored; the revision stays."""
    files = {"train.jsonl": b"{}", "data/more.jsonl": b"[]", "model.bin": b"ignored"}
    with hub_with("somebody/rows", files, kind="dataset", token="hf_mine") as (endpoint, sent):
        online = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
        spec = spec_of("hf://somebody/rows", ignore=("*.bin",))
        with pytest.raises(SafepointError, match=r"hf://somebody/rows was not fetched: \w+"):
            fetch(spec, folder, online)
        (folder / spec.inputs[0].keys_file).write_text(json.dumps({"HF_TOKEN": "hf_mine"}))
        path = fetch(spec, folder, online)
        assert {name: (path / name).read_bytes() for name in files if (path / name).exists()} == {
            "train.jsonl": b"{}",
            "data/more.jsonl": b"[]",
        }
        assert sorted(sent) == ["data/more.jsonl", "train.jsonl"]
    (tmp_path / "second").mkdir()
    with pytest.raises(SafepointError, match="to use only the cache, set HF_HUB_OFFLINE=1"):
        fetch(spec, tmp_path / "second", online)
    assert fetch(spec, folder, online) == path, "the server is gone, and is not needed any more"
    assert "hf_mine" not in log_of(folder)


def test_a_job_that_has_to_stop(folder: Path, moto: MotoServer) -> None:
    """The fetch ends at once, without a record."""
    moto.store("stop").write("a", b"one")
    spec = spec_of(f"s3://{moto.bucket}/stop")
    with pytest.raises(JobStoppedError):
        fetch_inputs(spec, folder, environment(moto.variables), may_continue=lambda: False)
    assert processes_of(folder) == []
    assert fetched(folder, spec.inputs[0]) is None


def test_the_workspace(tmp_path: Path) -> None:
    """A link to the cache, or links in a folder that exists; nothing that exists is changed."""
    target = str(tmp_path / "workspace" / "dataset")
    provide_workspace([target])
    point(target, str(tmp_path))
    assert (os.path.realpath(target), content_of(target)) == (str(tmp_path), str(tmp_path))
    provide_workspace([target])
    os.unlink(tmp_path / "workspace")
    with pytest.raises(SafepointError, match=r"no longer points to"):
        point(target, str(tmp_path))
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "model").mkdir()
    provide_workspace([target])
    assert os.path.realpath(target) == str(tmp_path)
    with pytest.raises(SafepointError, match=r"workspace/model exists on this machine, .* nothing was started"):
        provide_workspace([str(tmp_path / "workspace" / "model")])
