"""A later release has written a checkpoint: this one neither replaces nor deletes it, in a store and in a folder."""

import json
import uuid
from pathlib import Path

import pytest

from safepoint.checkpoint.format.catalog import set_aside
from safepoint.checkpoint.local.final_model import final_folder
from safepoint.checkpoint.local.retention import parse_policies, prune
from safepoint.checkpoint.remote.remote_folder import UNFINISHED, Claim, RemoteFolder
from safepoint.checkpoint.remote.uploader import Uploader
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.checkpoint.tools.repair import repair
from safepoint.errors import SaveError, StorageError
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from tests.support.checkpoints import commit, keep_final, prepared, sealed
from tests.support.stores import FaultyStore

_MANIFEST = "safepoint-manifest.json"


def _later(path: Path) -> bytes:
    """Make the manifest at `path` one of a later format; returns its bytes."""
    path.write_bytes(sealed({**json.loads(path.read_bytes()), "version": 2, "news": "x"}))
    return path.read_bytes()


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    return FaultyStore(tmp_path / "store")


def _uploader(store: FaultyStore, output, keep: str | None = None) -> Uploader:
    remote = RemoteFolder(store)
    remote.claim(Claim(run_id="run", attempt=1, attempt_id=uuid.uuid4().hex, since="", host="here"))
    return Uploader(output, remote, policies=parse_policies(keep), report=lambda event: None)


@pytest.mark.parametrize("name", ["checkpoint-20", "final"])
def test_an_upload_does_not_replace_it(name: str, store: FaultyStore, tmp_path: Path) -> None:
    """The checkpoint, or the final model, is not uploaded, with the reason."""
    output = prepared(tmp_path / "out")
    folder = keep_final(output, config_json=b"{}") if name == "final" else commit(output, 20)
    store.write(f"{name}/{_MANIFEST}", (folder / _MANIFEST).read_bytes())
    later = _later(tmp_path / "store" / name / _MANIFEST)
    uploader = _uploader(store, output)
    uploader.with_final = True
    with pytest.raises(StorageError, match="later release"):
        uploader.upload_next()
    assert bytes(store.read(f"{name}/{_MANIFEST}")) == later


def test_a_store_is_pruned_and_cleaned_around_it(store: FaultyStore, tmp_path: Path) -> None:
    """Neither retention, nor a start's clean-up, nor repair deletes it."""
    output = prepared(tmp_path / "out")
    commit(output, 10)
    uploader = _uploader(store, output, "newest=1")
    assert uploader.upload_next()
    later = _later(tmp_path / "store" / "checkpoint-10" / _MANIFEST)
    before = [item.key for item in store.list("checkpoint-10")]
    commit(output, 20)
    assert uploader.upload_next()
    store.write(f"{UNFINISHED}/checkpoint-10", b"")
    RemoteFolder.as_guest(store).clean(keep=())
    assert not RemoteFolder.as_guest(store).delete("checkpoint-10")
    assert bytes(store.read(f"checkpoint-10/{_MANIFEST}")) == later
    assert [item.key for item in store.list("checkpoint-10")] == before


@pytest.mark.parametrize("deep", [False, True])
def test_repair_leaves_it(deep: bool, tmp_path: Path) -> None:
    """It is listed as what it is, and not among the damaged ones."""
    output = prepared(tmp_path)
    later = _later(commit(output, 10) / _MANIFEST)
    found = repair(
        Inventory(open_store(Location.of_folder(tmp_path))), deep=deep, drop_damaged=True, dry_run=False, idle_s=0
    )
    assert [item.name for item in found.newer] == ["checkpoint-10"]
    assert found.damaged == ()
    assert (tmp_path / "checkpoint-10" / _MANIFEST).read_bytes() == later


def test_a_save_does_not_replace_it(tmp_path: Path) -> None:
    """A save of the same step fails with the reason; after it was moved aside, it succeeds."""
    output = prepared(tmp_path)
    folder = commit(output, 10)
    later = _later(folder / _MANIFEST)
    with pytest.raises(SaveError, match="later release"):
        commit(output, 10)
    assert (folder / _MANIFEST).read_bytes() == later
    assert not output.delete("checkpoint-10")
    for step in (20, 30):
        commit(output, step)
    prune(output, parse_policies("newest=1"), lambda event: None)
    assert (folder / _MANIFEST).read_bytes() == later
    assert set_aside(tmp_path, [folder]).place is not None
    commit(output, 10)


def test_a_final_model_that_waits(tmp_path: Path) -> None:
    """A final model of a later release in the control folder is not replaced either."""
    output = prepared(tmp_path)
    keep_final(output, config_json=b"{}")
    later = _later(final_folder(output) / _MANIFEST)
    with pytest.raises(SaveError, match="later release"):
        keep_final(output, config_json=b"[]")
    assert (final_folder(output) / _MANIFEST).read_bytes() == later
