"""A store has the manifest of a checkpoint, and not all of its files. That is not taken for the checkpoint."""

import shutil
from pathlib import Path

import pytest

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.checkpoint.format.verify import read_manifest, verify
from safepoint.checkpoint.remote.publish import Published, publish
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.remote.verified_upload import UploadRecord
from safepoint.checkpoint.tools import copy as copying
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.errors import ConflictError, SafepointError, TransientError
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location, Scheme
from tests.support.checkpoints import commit, prepared
from tests.support.stores import FaultyStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return commit(prepared(tmp_path / "out"), 4)


@pytest.fixture
def copy(tmp_path: Path, folder: Path) -> Path:
    """A complete copy in a store."""
    return Path(shutil.copytree(folder, tmp_path / "store" / folder.name))


_LOSSES = {
    "one": lambda copy: (copy / "model.safetensors").unlink(),
    "shortened": lambda copy: (copy / "model.safetensors").write_bytes(b"x"),
    "all": lambda copy: [path.unlink() for path in copy.rglob("*") if path.is_file() and path.name != MANIFEST_NAME],
}


def _publish(folder: Path, store: LocalStore) -> Published:
    return publish(RemoteFolder(store), folder, read_manifest(folder), name=folder.name, sent=UploadRecord(None))


@pytest.mark.parametrize("loss", _LOSSES)
def test_a_run_uploads_what_is_missing(loss: str, folder: Path, copy: Path) -> None:
    """And nothing else; the manifest stays in its place all the time."""
    _LOSSES[loss](copy)
    store = FaultyStore(copy.parent)
    assert _publish(folder, store) is Published.NOW
    assert verify(copy).is_valid
    sent = {key for name, key in store.calls if name == "upload"}
    assert "model.safetensors" in {Path(key).name for key in sent}
    assert len(sent) == (4 if loss == "all" else 1)
    assert not any(name == "delete" and key.endswith(MANIFEST_NAME) for name, key in store.calls)
    assert sorted(item.key for item in store.list(".safepoint")) == []
    store.calls.clear()
    assert _publish(folder, store) is Published.BEFORE
    assert not any(name == "upload" for name, _ in store.calls)


def test_a_completion_that_fails_deletes_nothing(folder: Path, copy: Path) -> None:
    """The files that are there stay."""
    (copy / "rng_state_1.pth").unlink()
    left = sorted(path.name for path in copy.rglob("*"))

    def refuse(name: str, key: str) -> None:
        if name == "upload":
            raise TransientError("the network is gone")

    with pytest.raises(SafepointError):
        _publish(folder, FaultyStore(copy.parent, refuse))
    assert sorted(path.name for path in copy.rglob("*")) == left


@pytest.mark.parametrize("loss", _LOSSES)
def test_a_copy_to_a_folder(loss: str, folder: Path, copy: Path) -> None:
    """Nothing in a folder is replaced, so the command says what is wrong, and what to do."""
    _LOSSES[loss](copy)
    source = Inventory(LocalStore(Location.of_folder(folder.parent)))
    with pytest.raises(ConflictError, match=r"is a damaged copy of this checkpoint: .*; nothing was copied"):
        copying.copy(source, source.items()[0], Location.of_folder(copy.parent))


@pytest.mark.parametrize("loss", _LOSSES)
def test_a_copy_to_an_object_store(loss: str, folder: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is completed, and reported as new."""
    _LOSSES[loss](copy)
    store = FaultyStore(copy.parent)
    monkeypatch.setattr(copying, "open_store", lambda location: store)
    source = Inventory(LocalStore(Location.of_folder(folder.parent)))
    target = Location(scheme=Scheme.S3, bucket="bucket", path="run")
    assert copying.copy(source, source.items()[0], target)
    assert verify(copy).is_valid
    assert not copying.copy(source, source.items()[0], target)
