"""Tests of safepoint.planning.inputs.job_model: only a model that is certainly the job's is found."""

import json
import os
from pathlib import Path

import pytest

from safepoint.errors import UsageError
from safepoint.planning.inputs import find_model

CONFIG = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
REVISION = "0123456789abcdef0123456789abcdef01234567"


def _model(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def _cached(cache: Path, name: str) -> Path:
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    return _model(repository / "snapshots" / REVISION)


def test_an_absolute_path(tmp_path: Path) -> None:
    folder = _model(tmp_path / "model")
    for path in (folder, folder / "config.json"):
        found = find_model(str(path), environ={})
        assert found is not None
        assert (found.label, found.named_by, found.is_certain) == (str(path), "--model_name_or_path", True)


def test_a_relative_path_counts_only_in_the_folder_that_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _model(tmp_path / "code" / "model")
    _model(tmp_path / "outside")
    monkeypatch.chdir(tmp_path / "code")
    environ = {"HF_HOME": str(tmp_path / "none")}
    assert find_model("model", environ=environ) is None
    assert find_model("model", code=tmp_path / "code", environ=environ) is not None
    for outside in ("../outside", "link"):
        assert find_model(outside, code=tmp_path / "code", environ=environ) is None
        if not (tmp_path / "code" / "link").exists():
            (tmp_path / "code" / "link").symlink_to("../outside")


@pytest.mark.parametrize(
    "variables", [{"HF_HUB_CACHE": "c"}, {"HF_HOME": "h"}, {"XDG_CACHE_HOME": "x"}, {"HOME": "o"}]
)
def test_a_name_of_the_hub_is_looked_up_in_the_cache(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"HF_HUB_CACHE": "c", "HF_HOME": "h/hub", "XDG_CACHE_HOME": "x/huggingface/hub"}
    (name, value), *_ = variables.items()
    _cached(tmp_path / places.get(name, "o/.cache/huggingface/hub"), "org/tiny")
    monkeypatch.setenv("HOME", str(tmp_path / "o"))
    environ = {name: str(tmp_path / value)}
    found = find_model("org/tiny", environ=environ)
    assert found is not None
    assert found.label == "org/tiny"
    assert find_model("org/other", environ=environ) is None
    named = find_model(None, uri="hf://org/tiny", environ=environ)
    assert named is not None
    assert (named.label, named.named_by) == ("hf://org/tiny", "the model of `initializer`")


@pytest.mark.parametrize("revision", ["", "../../../etc", "main", REVISION + "0", "é"])
def test_a_damaged_cache_has_no_model(revision: str, tmp_path: Path) -> None:
    folder = _cached(tmp_path, "org/tiny")
    (folder.parents[1] / "refs" / "main").write_text(revision)
    assert find_model("org/tiny", environ={"HF_HUB_CACHE": str(tmp_path)}) is None


def test_a_pipe_in_the_cache_is_not_read(tmp_path: Path) -> None:
    folder = _cached(tmp_path, "org/tiny")
    main = folder.parents[1] / "refs" / "main"
    main.unlink()
    os.mkfifo(main)
    assert find_model("org/tiny", environ={"HF_HUB_CACHE": str(tmp_path)}) is None


def test_a_path_of_the_pods_is_that_of_the_initializer(tmp_path: Path) -> None:
    _cached(tmp_path, "org/tiny")
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    assert find_model("/workspace/model-of-pods", uri="hf://org/tiny", environ=environ) is not None
    assert find_model("another/model", uri="hf://org/tiny", environ=environ) is None
    assert find_model("/workspace/model-of-pods", uri="s3://bucket/model", environ=environ) is None
    assert find_model("/workspace/model-of-pods", environ=environ) is None


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_folder_of_an_initializer(scheme: str, tmp_path: Path) -> None:
    found = find_model("/workspace/model-of-pods", uri=f"{scheme}{_model(tmp_path / 'model')}", environ={})
    assert found is not None
    assert found.named_by == "the model of `initializer`"


def test_the_only_model_in_the_folder_is_not_certain(tmp_path: Path) -> None:
    assert find_model(None, code=tmp_path, environ={}) is None
    _model(tmp_path / "model")
    (tmp_path / "config.json").write_text('{"lr": 1}')
    _model(tmp_path / ".hidden" / "model")
    found = find_model(None, code=tmp_path, environ={})
    assert found is not None
    assert (found.label, found.is_certain) == ("model", False)
    _model(tmp_path / "second")
    assert find_model(None, code=tmp_path, environ={}) is None


def test_a_model_that_cannot_be_planned_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unheard"):
        find_model(str(_model(tmp_path / "model", model_type="unheard")), environ={})
