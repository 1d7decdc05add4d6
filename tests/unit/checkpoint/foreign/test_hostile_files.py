"""Checkpoints that a stranger has made: what they hold is found out without running, following or believing it."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from safepoint.checkpoint.foreign.describe import describe
from safepoint.checkpoint.foreign.examine import Examination, examine, is_foreign
from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.errors import CheckpointError
from safepoint.storage.location import Location, Scheme
from safepoint.storage.opening import open_store
from safepoint.storage.store import Store
from tests.support.foreign import write_foreign, write_tensors
from tests.support.pickles import add_call

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _store(output: Path) -> Store:
    return open_store(Location(scheme=Scheme.FILE, path=str(output)))


def _examine(folder: Path) -> Examination:
    return examine(_store(folder.parent), folder.name)


def _faults(folder: Path) -> dict[str, str]:
    return {fault.file: fault.reason for fault in _examine(folder).faults}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a Trainer on one rank has written, as far as it is looked at."""
    return write_foreign(tmp_path / "out", 4)


def test_a_whole_one(folder: Path) -> None:
    """It has no fault; its manifest is the same each time, with what the files state."""
    assert is_foreign(folder)
    found = _examine(folder)
    assert found.faults == ()
    assert not found.is_batch_known
    store = _store(folder.parent)
    manifest = describe(store, found)
    assert manifest == describe(store, _examine(folder))
    assert (manifest.step, manifest.epoch, manifest.metrics) == (4, 0.5, {"eval_loss": 1.5})
    assert sorted(entry.path for entry in manifest.files) == sorted(os.listdir(folder))


def test_no_manifest_of_safepoints_own(folder: Path) -> None:
    """A checkpoint of Safepoint without its manifest is damaged; it does not become a foreign one."""
    (folder / "safepoint_state_0.pt").touch()
    assert not is_foreign(folder)
    assert "its manifest is missing" in _faults(folder)["."]


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_pickles_run_nothing(name: str, folder: Path, tmp_path: Path) -> None:
    """A pickle that names a function is refused, and the function is not called."""
    add_call(folder / name, tmp_path / "called")
    assert "mkdir" in _faults(folder)[name]
    assert not (tmp_path / "called").exists()


def test_metadata_of_dcp_runs_nothing(folder: Path, tmp_path: Path) -> None:
    """Neither does DCP's metadata, which is a plain pickle."""
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        save({"w": torch.arange(4.0), "n": 3}, storage_writer=FileSystemWriter(folder / name), no_dist=True)
    assert _faults(folder) == {}
    add_call(folder / "optimizer_0" / ".metadata", tmp_path / "called")
    assert "mkdir" in _faults(folder)["optimizer_0/.metadata"]
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("name", ["../x.distcp", "/etc/hostname", "sub/x.distcp", "none.distcp"])
def test_metadata_of_dcp_names_its_own_files(name: str, folder: Path) -> None:
    """A shard elsewhere is not opened."""
    for place in ("pytorch_model_fsdp_0", "optimizer_0"):
        save({"w": torch.arange(4.0)}, storage_writer=FileSystemWriter(folder / place), no_dist=True)
    path = folder / "optimizer_0" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = name
    path.write_bytes(pickle.dumps(metadata))
    assert "names the file" in _faults(folder)["optimizer_0/.metadata"]


def test_a_shard_that_lacks_its_end(folder: Path) -> None:
    """The metadata says where each part ends."""
    for place in ("pytorch_model_fsdp_0", "optimizer_0"):
        save({"w": torch.arange(400.0)}, storage_writer=FileSystemWriter(folder / place), no_dist=True)
    shard = next((folder / "optimizer_0").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "ends at" in _faults(folder)["optimizer_0/.metadata"]


@pytest.mark.parametrize("at", ["file", "folder", "checkpoint", "pipe"])
def test_links_and_pipes(at: str, folder: Path, tmp_path: Path) -> None:
    """None is followed or opened."""
    if at == "file":
        (folder / "optimizer.pt").rename(tmp_path / "optimizer.pt")
        (folder / "optimizer.pt").symlink_to(tmp_path / "optimizer.pt")
    elif at == "folder":
        (folder / "more").symlink_to("/etc")
    elif at == "pipe":
        os.mkfifo(folder / "more")
    else:
        folder.rename(tmp_path / "checkpoint-4")
        folder.symlink_to(tmp_path / "checkpoint-4")
        assert not is_foreign(folder)
    assert any("link" in reason for reason in _faults(folder).values())


@pytest.mark.parametrize(
    ("header", "length"),
    [
        ({}, 1 << 60),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 80]}}, None),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, None),
        ({"w": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 8]}}, None),
        ({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, None),
        ({"w": {"dtype": 3, "shape": 4, "data_offsets": None}}, None),
        ({"w": []}, None),
        ({}, None),
    ],
)
def test_headers(header: Any, length: int | None, folder: Path) -> None:
    """A header that does not describe the file is a fault."""
    write_tensors(folder / "model.safetensors", header, bytes(8), length=length)
    assert "model.safetensors" in _faults(folder)


@pytest.mark.parametrize(
    "named", [None, [], {}, {"w": 1}, {"w": "../model.safetensors"}, {"w": "none.safetensors"}, {"other": "model"}]
)
def test_indices(named: Any, folder: Path) -> None:
    """An index names weights of files that are there."""
    shard = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": shard}}))
    assert _faults(folder) == {}
    index.write_text(json.dumps({"weight_map": {"other": shard} if named == {"other": "model"} else named}))
    assert index.name in _faults(folder)


@pytest.mark.parametrize(
    "state",
    [
        "[]",
        "{",
        '{"global_step": 5, "epoch": 1.0}',
        '{"global_step": 4, "epoch": NaN}',
        '{"global_step": 4.0}',
        "[" * 9999,
    ],
)
def test_states(state: str, folder: Path) -> None:
    """The Trainer's state is of this step."""
    (folder / "trainer_state.json").write_text(state)
    assert set(_faults(folder)) == {"trainer_state.json"}


def test_ranks_without_end(folder: Path) -> None:
    """A name that states a huge number of ranks costs nothing."""
    (folder / "rng_state.pth").rename(folder / "rng_state_999999.pth")
    faults = _faults(folder)
    assert 0 < len(faults) <= 101
    assert faults["rng_state_0.pth"] == "it is missing"


@pytest.mark.parametrize("latest", ["../other", "/etc", ".", "none", "global_step4\x00"])
def test_latest_of_deepspeed(latest: str, folder: Path) -> None:
    """It names a folder of the checkpoint."""
    (folder / "latest").write_text(latest)
    assert "latest" in _faults(folder)


def test_changed_while_it_is_read(folder: Path) -> None:
    """Files that another program still writes are not described."""
    found = _examine(folder)
    with (folder / "scheduler.pt").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="changed while it was read"):
        describe(_store(folder.parent), found)
    assert not (folder / MANIFEST_NAME).exists()
