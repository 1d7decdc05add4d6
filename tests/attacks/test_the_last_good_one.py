"""Pruning never deletes the last checkpoint that is good, and an unreadable folder stops no command."""

import os
import uuid
from pathlib import Path

import pytest

from safepoint.checkpoint.format.manifest import MANIFEST_NAME, PART_NAME, NodePart
from safepoint.checkpoint.format.verify import has_all_files, read_manifest, read_part, verify_part
from safepoint.checkpoint.local.retention import parse_policies, prune
from safepoint.checkpoint.remote.remote_folder import Claim, RemoteFolder
from safepoint.checkpoint.remote.uploader import Uploader
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.checkpoint.tools.repair import repair
from safepoint.errors import ManifestError
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location
from safepoint.storage.opening import open_store
from safepoint.training.start.copies import list_copy
from tests.support.checkpoints import commit, prepared, written
from tests.support.stores import FaultyStore, flip

_NEWEST = parse_policies("newest=1")


def _inventory(root: Path) -> Inventory:
    return Inventory(open_store(Location.of_folder(root)))


@pytest.mark.parametrize("num_damaged", [0, 1, 2, 3])
def test_prune_verifies_what_it_keeps(num_damaged: int, tmp_path: Path) -> None:
    """The newest ones have their sizes, and a bit is wrong: the newest good one stays; without one, all do."""
    output = prepared(tmp_path)
    for step in (10, 20, 30):
        commit(output, step)
    for step in (30, 20, 10)[:num_damaged]:
        flip(tmp_path / f"checkpoint-{step}" / "model.safetensors")
    doomed = [item.name for item in _inventory(tmp_path).superseded(_NEWEST)]
    expected = {0: ["checkpoint-10", "checkpoint-20"], 1: ["checkpoint-10"], 2: ["checkpoint-20"], 3: []}
    assert doomed == expected[num_damaged]


def test_a_store_of_an_earlier_attempt(tmp_path: Path) -> None:
    """What this attempt has not uploaded itself may be damaged by now: nothing is deleted on its account."""
    output = prepared(tmp_path / "out")
    store = FaultyStore(tmp_path / "store")
    for step in (10, 20):
        commit(output, step)
        uploader = _uploader(store, output, step)
        while uploader.upload_next():
            pass
    flip(tmp_path / "store" / "checkpoint-20" / "model.safetensors")
    again = _uploader(store, output, 30, keep="newest=1")
    while again.upload_next():
        pass
    assert RemoteFolder(store).steps() == [20, 10]
    commit(output, 30)
    while again.upload_next():
        pass
    assert RemoteFolder(store).steps() == [30]


def _uploader(store: LocalStore, output, attempt: int, keep: str | None = None) -> Uploader:
    remote = RemoteFolder(store)
    remote.claim(Claim(run_id="run", attempt=attempt, attempt_id=uuid.uuid4().hex, since="", host="here"))
    return Uploader(output, remote, policies=parse_policies(keep), report=lambda event: None)


def test_a_run_compares_sizes_before_it_prunes(tmp_path: Path) -> None:
    """A run digests what it writes; a newer one that lost bytes since is not the reason to delete an older one."""
    output = prepared(tmp_path)
    for step in (10, 20):
        commit(output, step)
    os.truncate(tmp_path / "checkpoint-20" / "model.safetensors", 5)
    prune(output, _NEWEST, lambda event: None)
    assert output.steps() == [20, 10]


@pytest.mark.parametrize("is_cut", [False, True])
def test_parts_of_a_node_are_pruned_in_the_same_way(is_cut: bool, tmp_path: Path) -> None:
    """A node's parts are compared with their own records."""
    output = prepared(tmp_path)
    for step in (10, 20):
        _make_part(commit(output, step))
    if is_cut:
        os.truncate(tmp_path / "checkpoint-20" / "model.safetensors", 5)
    prune(output, _NEWEST, lambda event: None)
    assert output.steps() == ([20, 10] if is_cut else [20])


def _make_part(folder: Path) -> NodePart:
    manifest = read_manifest(folder)
    paths = tuple(entry.path for entry in manifest.files)
    part = NodePart(node=0, num_nodes=2, paths=paths, manifest=manifest)
    (folder / MANIFEST_NAME).unlink()
    (folder / PART_NAME).write_bytes(part.to_bytes())
    return part


def test_a_link_to_the_part_of_a_node_is_not_good(tmp_path: Path) -> None:
    """A link to a checkpoint is not good either: a run does not resume from it."""
    folder = commit(prepared(tmp_path / "other"), 20)
    link = tmp_path / "checkpoint-20"
    link.symlink_to(folder)
    assert has_all_files(folder)
    assert not has_all_files(link)
    with pytest.raises(ManifestError, match=f"there is no {PART_NAME}, so this is not one node's part"):
        read_part(folder)
    part = _make_part(folder)
    assert has_all_files(folder)
    assert not has_all_files(link)
    assert verify_part(folder, part) == ()
    assert [str(fault) for fault in verify_part(link, part)] == [".: the folder is a link"]


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of folders that this user may not read; the tests may run as root, which may read all."""
    names: set[str] = set()
    scandir, open_, stat = os.scandir, os.open, os.stat

    def is_locked(path: object) -> bool:
        return isinstance(path, str | os.PathLike) and bool(names & set(Path(path).parts))

    def refusing_scandir(path="."):
        if is_locked(path):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    def refusing_open(path, *args, **kwargs):
        if is_locked(path):
            raise PermissionError(13, "Permission denied", str(path))
        return open_(path, *args, **kwargs)

    def refusing_stat(path, *args, **kwargs):
        if isinstance(path, str | os.PathLike) and is_locked(Path(path).parent):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "scandir", refusing_scandir)
    monkeypatch.setattr(os, "stat", refusing_stat)
    monkeypatch.setattr(os, "open", refusing_open)
    return names


def test_lost_and_found(tmp_path: Path, locked: set[str], caplog: pytest.LogCaptureFixture) -> None:
    """An unreadable folder beside the checkpoints is skipped with a warning, and no command fails."""
    output = prepared(tmp_path)
    commit(output, 10)
    (tmp_path / "lost+found").mkdir()
    locked.add("lost+found")
    inventory = _inventory(tmp_path)
    assert [item.is_complete for item in inventory.items()] == [True]
    assert inventory.verify(inventory.item("checkpoint-10")) == ()
    assert inventory.superseded(_NEWEST) == []
    assert repair(inventory, deep=True, drop_damaged=True, dry_run=False, idle_s=0).damaged == ()
    assert inventory.store.sweep() == 0
    assert "lost+found" in caplog.text


def test_an_unreadable_checkpoint(tmp_path: Path, locked: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that this user may not read is a fault of that checkpoint alone."""
    output = prepared(tmp_path)
    for step in (10, 20):
        commit(output, step)
    locked.add("checkpoint-20")
    copy = list_copy(tmp_path / "checkpoint-20")
    assert copy is not None
    assert copy.fault is not None
    assert output.steps() == [10]
    assert _inventory(tmp_path).item().name == "checkpoint-10"
    prune(output, _NEWEST, lambda event: None)
    assert (tmp_path / "checkpoint-10").is_dir()


def test_an_unreadable_folder_in_a_checkpoint(tmp_path: Path, locked: set[str]) -> None:
    """Files in it are missing, so the checkpoint is not complete."""
    output = prepared(tmp_path)
    commit(output, 10)
    locked.add("sub")
    assert not _inventory(tmp_path).items()[0].is_complete


def test_a_save_leaves_nothing_out(tmp_path: Path, locked: set[str]) -> None:
    """What cannot be read while a checkpoint is made is an error; otherwise the checkpoint would lack it."""
    output = prepared(tmp_path)
    working = written(output, 10)
    locked.add("sub")
    with pytest.raises(PermissionError):
        working.seal(0)
