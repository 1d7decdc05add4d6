"""A stranger's file or object lies among those of a checkpoint: it is reported, never loaded, and does no harm."""

import io
import json
import os
import uuid
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from safepoint.checkpoint.format.catalog import newest_valid
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.tools.copy import copy
from safepoint.checkpoint.tools.export import export_item
from safepoint.checkpoint.tools.inventory import Inventory, open_inventory
from safepoint.cli.commands.checkpoints import app
from safepoint.foundation.environment import Place
from safepoint.settings.run_settings import RunSettings
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.storage.options import StorageOptions
from safepoint.training.collective.peers import Peers
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.copies import verify_copy
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from tests.support.checkpoints import commit, prepared
from tests.support.moto_server import MotoServer


@pytest.fixture(params=["folder", "moto"])
def inventory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """Two good checkpoints, and a stray file in each of them."""
    output = prepared(tmp_path / "out")
    for step in (10, 20):
        commit(output, step)
    here = Inventory(open_store(Location.of_folder(output.root)))
    if request.param == "moto":
        server: MotoServer = request.getfixturevalue("moto")
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        target = server.location(f"strays/{uuid.uuid4().hex}")
        for item in here.items():
            copy(here, item, target)
        here = Inventory(open_store(target, StorageOptions.from_environment(server.variables)))
    for name in ("checkpoint-10/.DS_Store", "checkpoint-20/sub/scaler.pt", "checkpoint-20/safepoint-part.json"):
        here.store.write(name, b"stranger")
    return here


def _run(*arguments: str):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_strays_are_no_damage(inventory: Inventory) -> None:
    """`verify` reports them and succeeds; `repair --drop-damaged` deletes neither them nor the checkpoints."""
    where = str(inventory.store.location)
    result = _run("verify", where, "--deep", "--json")
    assert result.exit_code == 0
    documents = {item["name"]: item for item in json.loads(result.stdout)}
    assert documents["checkpoint-20"]["valid"]
    assert documents["checkpoint-20"]["strays"] == ["safepoint-part.json", "sub/scaler.pt"]
    before = sorted(item.key for item in inventory.store.list() if not item.key.startswith(".safepoint"))
    result = _run("repair", where, "--drop-damaged", "--deep", "--idle", "0")
    assert result.exit_code == 0
    assert "sub/scaler.pt" in result.stdout
    assert sorted(item.key for item in inventory.store.list() if not item.key.startswith(".safepoint")) == before
    assert [item.is_complete for item in inventory.items()] == [True, True]


def test_a_missing_file_is_damage_beside_strays(inventory: Inventory) -> None:
    """A stray file does not take the place of one that is missing."""
    inventory.store.delete("checkpoint-20/model.safetensors")
    faults = inventory.verify(inventory.item("checkpoint-20"))
    assert [str(fault) for fault in faults] == ["model.safetensors: it is missing"]


def test_what_a_folder_alone_can_hold(tmp_path: Path) -> None:
    """Links, pipes and folders that the manifest does not name are no damage either."""
    folder = commit(prepared(tmp_path), 10)
    (folder / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe")
    (folder / "empty").mkdir()
    verdict = verify(folder)
    assert verdict.is_valid
    assert verdict.strays == ("link", "pipe")
    assert newest_valid(tmp_path, rejected=lambda path, fault: None) is not None


def test_a_resume_does_not_load_strays(tmp_path: Path) -> None:
    """A copy with strays is not used in place: its named files become a copy without them."""
    folder = commit(prepared(tmp_path), 10)
    manifest = verify(folder).manifest
    assert manifest is not None
    assert verify_copy(folder, manifest, None).is_complete
    (folder / "scaler.pt").write_bytes(b"stranger")
    copy_ = verify_copy(folder, manifest, None)
    assert not copy_.is_complete
    assert copy_.fault is None
    assert copy_.good == {entry.path for entry in manifest.files}


@pytest.mark.parametrize("way", ["newest", "named", "named elsewhere"])
def test_a_resume_goes_on_without_strays(way: str, tmp_path: Path) -> None:
    """The run resumes from the checkpoint; the stray file is kept where no framework reads it."""
    output = prepared(tmp_path / "out")
    commit(output, 10)
    folder = commit(output, 20)
    (folder / "scaler.pt").write_bytes(b"stranger")
    place = prepared(tmp_path / "new") if way == "named elsewhere" else output
    settings = RunSettings() if way == "newest" else RunSettings(resume=str(folder))
    peers = Peers(Place(), timeout_s=1)
    first = FirstStart(peers, place, None, settings)
    point = CheckpointChooser(peers, place, Folders(), None, settings, first, lambda event: None).choose()
    assert point is not None
    assert point.path == place.root / "checkpoint-20"
    verdict = verify(point.path)
    assert verdict.is_valid
    assert verdict.strays == ()
    assert len(list(tmp_path.rglob("scaler.pt"))) == 1


def _saved(value: object) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


@pytest.mark.parametrize(
    "strays",
    [
        ["tokenizer.json", "chat_template.jinja", "generation_config.json"],
        [".metadata"],
        ["pytorch_model_fsdp_0/.metadata"],
        ["pytorch_model_fsdp_1/__0_0.distcp"],
        ["model.safetensors"],
        ["lightning.ckpt", "pytorch_model_fsdp.bin"],
        ["latest", "x/zero_pp_rank_0_mp_rank_00_optim_states.pt"],
        ["link.json"],
    ],
    ids=lambda strays: strays[0],
)
@pytest.mark.parametrize("way", ["a location", "a checkpoint"])
def test_an_export_of_pieces_leaves_strays_out(strays: list[str], way: str, tmp_path: Path) -> None:
    """A session has written the checkpoint, so the model is in a file of `torch.save`."""
    output = prepared(tmp_path / "out")
    folder = commit(output, 10, {0: {"model.pt": _saved({"weight": torch.ones(2)}), "config.json": b"{}"}})
    for name in strays:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    if strays == ["link.json"]:
        (folder / "link.json").unlink()
        (folder / "link.json").symlink_to("/etc/passwd")
    target = tmp_path / "model"
    if way == "a location":
        inventory, _ = open_inventory(str(output.root))
        export_item(inventory, inventory.item(), Location.of_folder(target))
    else:
        assert _run("export", str(folder), str(target)).exit_code == 0
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
