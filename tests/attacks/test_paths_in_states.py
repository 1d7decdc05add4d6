"""Training states that name files elsewhere: frameworks would delete them, load code from them, or write to them.

The states contain nothing but plain data, and their digests are right.
"""

import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from safepoint.errors import CheckpointError, ExitCode
from safepoint.training.integrations.deepspeed.partitions import Partitions
from safepoint.training.integrations.deepspeed.universal import Universal
from safepoint.training.state.data_only import only_data
from tests.support.checkpoints import reseal
from tests.support.jobs import Job, no_orphans, safepoint, tiny
from tests.support.pickles import Call
from tests.support.zero import random_states, write_zero

_DCP: Any = dcp
_LIGHTNING = Path(__file__).parent.parent / "programs" / "lightning_loop.py"

# ---- DeepSpeed ---------------------------------------------------------------------------------------------------


def _load_as_deepspeed_does(folder: Path, name: str) -> None:
    with only_data(folder):
        tag = (folder / name).read_text().strip()
        torch.load(os.path.join(folder, tag, "mp_rank_00_model_states.pt"), weights_only=False)


@pytest.mark.parametrize("name", ["latest", "latest_universal"])
@pytest.mark.parametrize("tag", ["../elsewhere", "absolute", "", ".", "a/../../elsewhere", "link"])
def test_the_folder_that_deepspeed_loads(tag: str, name: str, tmp_path: Path) -> None:
    """DeepSpeed joins it with the checkpoint's path, and loads the pickles in it without a restriction."""
    folder, elsewhere = tmp_path / "checkpoint-2", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    torch.save({"called": Call(tmp_path / "called")}, elsewhere / "mp_rank_00_model_states.pt")
    if tag == "link":
        (tmp_path / "tag").write_text("global_step2")
        (folder / name).symlink_to(tmp_path / "tag")
    else:
        (folder / name).write_text(str(elsewhere) if tag == "absolute" else tag)
    with pytest.raises((CheckpointError, OSError)):
        _load_as_deepspeed_does(folder, name)
    assert not (tmp_path / "called").exists()


def test_a_path_that_leads_out_by_its_dots(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    torch.save({"called": Call(tmp_path / "called")}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="could run code"), only_data(folder):
        torch.load(f"{folder}/../a.pt", weights_only=False)
    assert not (tmp_path / "called").exists()


def test_the_folder_that_deepspeed_has_written(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step20\n")
    with only_data(tmp_path):
        pass


@pytest.mark.parametrize("place", ["buffer", "frozen", "moment", "weight"])
@pytest.mark.parametrize("name", ["../../outside", "a/../../../outside", "/absolute", "", 5])
def test_names_in_partitions_of_zero(place: str, name: Any, tmp_path: Path) -> None:
    """A start with another number of ranks writes a file for each of them."""
    name = str(tmp_path / "outside") if name == "/absolute" else name
    states = random_states((name, "exp_avg_sq") if place == "moment" else ("exp_avg", "exp_avg_sq"))
    tensor = {name: torch.ones(3)}
    source = tmp_path / "saved"
    written = write_zero(
        source, states, stage=3 if place == "frozen" else 2, ranks=1,
        module=tensor if place == "buffer" else None,
        frozen=tensor if place == "frozen" else None,
    )  # fmt: skip
    if place == "weight":
        path = written / "mp_rank_00_model_states.pt"
        content = torch.load(path)
        shapes = content["param_shapes"]
        shapes[1] = {name if old == "scale" else old: shape for old, shape in shapes[1].items()}
        torch.save(content, path)
    before = set(tmp_path.iterdir())
    copy = tmp_path / "a" / "b" / "copy"
    with pytest.raises(CheckpointError, match="cannot be used as the name of a file"):
        Universal(Partitions(source, ranks=1), copy, stage=2).write(0, 1)
    assert set(tmp_path.iterdir()) == before


# ---- weights of another model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize("name", ["../other/model.safetensors", "/other/model.safetensors", "a/../../b", "", 5])
def test_an_index_of_weights(name: Any, index: str, tmp_path: Path) -> None:
    """A framework joins each name with the path of the checkpoint, and loads the weights of that file."""
    (tmp_path / index).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": name}}))
    with pytest.raises(CheckpointError, match="names the file"), only_data(tmp_path):
        pass


@pytest.mark.parametrize("content", ["", "5", "{}", '{"weight_map": 5}', '{"weight_map": {"a": []}}', '{"a":' * 9999])
def test_an_index_that_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="was not loaded"), only_data(tmp_path):
        pass


def test_a_good_index(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b-1.safetensors"}}))
    with only_data(tmp_path):
        pass


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["../other/{}", "{folder}/other/{}", ""])
def test_files_of_dcp(name: str, tmp_path: Path) -> None:
    folder, other = tmp_path / "checkpoint", tmp_path / "other"
    state = {"w": torch.ones(3)}
    for place in (folder, other):
        _DCP.save(state, checkpoint_id=str(place))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = name.format(place.relative_path, folder=tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="names the file"), only_data(folder):
        _DCP.load(state, checkpoint_id=str(folder))


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_the_best_model_of_another_run(tmp_path: Path) -> None:
    """The Trainer ends with the weights of the checkpoint that its state says is the best one."""
    output, other = tmp_path / "run", tmp_path / "other"
    options = ("--save-strategy", "steps", "--save-steps", "2")
    program = ("--best", "--eval-strategy", "steps", "--eval-steps", "2", "--end", "end", "--max-steps")
    for place, steps in ((other, "2"), (output, "2"), (output, "4")):
        job = safepoint(place, *options, program=tiny(place, *program, steps))
        with no_orphans(job):
            assert job.wait(200) == ExitCode.OK, job.text
        if (place, steps) == (output, "2"):
            path = output / "checkpoint-2" / "trainer_state.json"
            state = json.loads(path.read_text())
            state |= {"best_model_checkpoint": str(other / "checkpoint-2"), "best_metric": -1e9}
            path.write_text(json.dumps(state))
            reseal(path.parent)
    assert "This path is outside the output folder" in job.text
    assert "Loading best model from" not in job.text or str(other) not in job.text.split("Loading best model")[1]


# ---- Lightning ---------------------------------------------------------------------------------------------------


def _run(output: Path, *options: str) -> Job:
    program = [str(_LIGHTNING), "--out", str(output), "--stop-early", "--step-ms", "1", *options]
    return safepoint(output, "--save-strategy", "steps", "--save-steps", "2", program=program)


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_files_that_lightning_deletes(tmp_path: Path) -> None:
    """ModelCheckpoint deletes what its state says was its own file, also a folder; `..` leads out of its folder."""
    pytest.importorskip("lightning")
    output, victim = tmp_path / "run", tmp_path / "victim"
    job = _run(output, "--max-steps", "6")
    with no_orphans(job):
        assert job.wait() == ExitCode.OK, job.text
    (victim / "papers").mkdir(parents=True)
    newest = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    state = torch.load(newest / "lightning.ckpt", weights_only=True)
    key = next(key for key in state["callbacks"] if str(key).startswith("ModelCheckpoint"))
    path = f"{output}/best/../../victim"
    worst = torch.tensor(float("inf"))
    state["callbacks"][key] |= {
        "kth_best_model_path": path, "best_k_models": {path: worst}, "kth_value": worst, "best_model_path": path,
        "best_model_score": worst,
    }  # fmt: skip
    torch.save(state, newest / "lightning.ckpt")
    reseal(newest)
    job = _run(output, "--max-steps", "14")
    with no_orphans(job):
        assert job.wait() == ExitCode.OK, job.text
    assert (victim / "papers").is_dir(), job.text
    assert "ModelCheckpoint names" in job.text
    assert len(list((output / "best").iterdir())) >= 1


_OTHERS = {
    "dots": "{own}/../victim.ckpt",
    "a folder": "{own}/../victim",
    "elsewhere": "/etc/passwd.ckpt",
    "another file of its folder": "{own}/checkpoint-4",
    "the folder itself": "{own}",
    "a sibling": "{own}-2/a.ckpt",
    "the web": "http://127.0.0.1:1/a.ckpt",
    "a bucket": "s3://bucket/a.ckpt",
    "a chain of file systems": "simplecache::http://127.0.0.1:1/a.ckpt",
    "file": "file://{own}/a.ckpt",
    "the web, with dots": "http://127.0.0.1:1/../../../../../../../../../../../../../..{own}/a.ckpt",
    "a bucket, with dots": "s3://bucket/../../../../../../../../../../../../../..{own}/a.ckpt",
    "memory, with dots": "memory://../../../../../../../../../../../../../..{own}/a.ckpt",
    "a home, with dots": "~/../../../../../../../../../../../../../..{own}/a.ckpt",
    "dots to its folder": "{own}/../best/a.ckpt",
    "dots to its folder, from another": "{own}-2/../best/a.ckpt",
    "an empty name": "{own}//a.ckpt",
    "an empty name above": "/{own}/a.ckpt",
    "a chain in its folder": "{own}/a::memory::b.ckpt",
    "a name that ends early": "{own}/a\0.ckpt",
    "a name without bytes": "{own}/\ud800.ckpt",
    "a long name": "{own}/" + "a" * 300 + ".ckpt",
    "a number": 5,
}


@pytest.mark.parametrize("other", _OTHERS)
@pytest.mark.parametrize("field", ["best_model_path", "kth_best_model_path", "last_model_path", "best_k_models"])
def test_states_of_lightning(field: str, other: str, tmp_path: Path) -> None:
    """`Trainer.test(ckpt_path="best")` loads `best_model_path`, from the web too, and may call what is in it."""
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    from safepoint.training.integrations.lightning.lightning_parts import LightningParts

    callback = ModelCheckpoint(tmp_path / "best", monitor="loss")
    own = str(tmp_path / "best")
    path = _OTHERS[other]
    path = path.format(own=own) if isinstance(path, str) else path
    good = {
        "dirpath": own, "best_model_path": f"{own}/a.ckpt", "best_model_score": None, "kth_best_model_path": "",
        "last_model_path": f"{own}/sub/last.ckpt", "best_k_models": {f"{own}/a.ckpt": torch.ones(())},
    }  # fmt: skip
    bad = {path: torch.ones(())} if field == "best_k_models" else path
    parts: Any = LightningParts.__new__(LightningParts)
    connector = SimpleNamespace(_loaded_checkpoint={})
    parts._trainer = SimpleNamespace(callbacks=[callback], _checkpoint_connector=connector)
    with parts._checked_callbacks():
        if other == "a number":
            with pytest.raises(ValueError, match=f"'{field}' of ModelCheckpoint"):
                callback.load_state_dict({**good, field: bad})
        else:
            callback.load_state_dict({**good, field: bad})
        assert (callback.best_model_path, callback.last_model_path) == ("", "")
        callback.load_state_dict(good)
        assert (callback.best_model_path, callback.last_model_path) == (f"{own}/a.ckpt", f"{own}/sub/last.ckpt")
    assert "load_state_dict" not in vars(callback)


@pytest.mark.parametrize(
    ("folder", "path", "expected"),
    [
        ("/data/best", "/data/best/val/loss=1.ckpt", "/data/best/val/loss=1.ckpt"),
        ("{cwd}/best", "best/a.ckpt", "{cwd}/best/a.ckpt"),
        ("best", "{cwd}/best/a.ckpt", "best/a.ckpt"),
        ("../logs/best", "../logs/best/a.ckpt", "../logs/best/a.ckpt"),
        ("{cwd}", "~/a.ckpt", "{cwd}/~/a.ckpt"),
        ("{cwd}", "file:/a.ckpt", "{cwd}/file:/a.ckpt"),
        ("{cwd}", "http:/a.ckpt", "{cwd}/http:/a.ckpt"),
        ("s3://bucket/best", "s3://bucket/best/a-v1.ckpt", "s3://bucket/best/a-v1.ckpt"),
        ("s3://bucket/best", "s3://bucket/best/*.ckpt", None),
        ("s3://bucket/best", "s3://bucket/best/../a.ckpt", None),
    ],
)
def test_the_path_that_lightning_gets(folder: str, path: str, expected: str | None) -> None:
    """It is built from the script's folder, so a library cannot read it in another way than the check did."""
    pytest.importorskip("lightning")
    from safepoint.training.integrations.lightning.checkpoint_files import own_path

    folder, path = folder.format(cwd=os.getcwd()), path.format(cwd=os.getcwd())
    callback: Any = SimpleNamespace(dirpath=folder, FILE_EXTENSION=".ckpt")
    assert own_path(path, callback) == (expected and expected.format(cwd=os.getcwd()))
