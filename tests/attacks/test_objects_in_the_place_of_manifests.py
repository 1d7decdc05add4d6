"""An object that is too large to be a manifest has the name of one. A person who may only create objects can do so.

It must not end a start of the run, an upload, or a command: there is no checkpoint, and no other one depends on it.
"""

import dataclasses
import uuid
from pathlib import Path

import pytest

from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from safepoint.checkpoint.format.verify import read_manifest, verify
from safepoint.checkpoint.remote.publish import NodeUploaders, Published, finish_parts, publish
from safepoint.checkpoint.remote.remote_folder import PARTS, Claim, RemoteFolder
from safepoint.checkpoint.remote.verified_upload import UploadRecord
from safepoint.checkpoint.tools.copy import is_there
from safepoint.checkpoint.tools.inventory import Inventory, open_inventory
from safepoint.errors import ConflictError, ManifestError, TransientError
from tests.support.checkpoints import commit, prepared
from tests.support.stores import FaultyStore


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    return FaultyStore(prepared(tmp_path / "bucket").root)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint in the folder of a run."""
    return commit(prepared(tmp_path / "out"), 20)


def plant(store: FaultyStore, name: str = "checkpoint-20") -> None:
    path = store.location.folder / name / MANIFEST_NAME
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)


def claimed(store: FaultyStore) -> RemoteFolder:
    remote = RemoteFolder(store)
    remote.claim(Claim(run_id="run", attempt=1, attempt_id=uuid.uuid4().hex, since="now", host="here"))
    return remote


@pytest.mark.parametrize("name", ["checkpoint-20", "final"])
def test_a_start(name: str, store: FaultyStore, saved: Path) -> None:
    """A mark says that all parts of the checkpoint are uploaded."""
    plant(store, name)
    data = read_manifest(saved).to_bytes()
    store.write(f"{PARTS}/{name}/{digest_bytes(data).rpartition(':')[2]}/0-of-1", data)
    assert finish_parts(claimed(store)) == []


def test_an_upload_replaces_it(store: FaultyStore, saved: Path) -> None:
    plant(store)
    found = publish(claimed(store), saved, read_manifest(saved), name="checkpoint-20", sent=UploadRecord(None))
    assert found is Published.NOW
    assert verify(store.location.folder / "checkpoint-20").is_valid


def test_a_node_waits(store: FaultyStore, saved: Path) -> None:
    """The message names the checkpoint."""
    plant(store)
    nodes = NodeUploaders(claimed(store), count=2, run_id="run")
    nodes.awaited["checkpoint-20"] = dataclasses.replace(read_manifest(saved))
    with pytest.raises(TransientError, match="checkpoint-20 still lacks"):
        nodes.check_complete("checkpoint-20", alive=lambda: None, deadline_s=None)


def test_commands(store: FaultyStore, saved: Path) -> None:
    """A copy says which checkpoint is there; a list says what is wrong with it."""
    plant(store)
    inventory, _ = open_inventory(str(saved.parent))
    with pytest.raises(ConflictError, match="a different checkpoint-20"):
        is_there(inventory, inventory.item("checkpoint-20"), store.location)
    there = Inventory(store)
    there.folder = None  # as in an object store
    assert "larger than" in str(there.item("checkpoint-20").faults[0])
    with pytest.raises(ManifestError, match="larger than"):
        RemoteFolder(store).manifest(20)
