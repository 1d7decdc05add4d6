"""Someone who may create objects in a bucket writes marks, to make another user's command delete or replace objects.

Only objects that can be the leftovers of the marked writer are deleted.
"""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileEntry, Manifest
from safepoint.checkpoint.format.verify import read_manifest, verify
from safepoint.checkpoint.remote import marks
from safepoint.checkpoint.remote.marks import Mark
from safepoint.checkpoint.remote.publish import Published, finish_parts, publish
from safepoint.checkpoint.remote.remote_folder import PARTS, UNFINISHED, RemoteFolder
from safepoint.checkpoint.remote.verified_upload import UploadRecord
from safepoint.checkpoint.tools import atomic_export
from safepoint.checkpoint.tools.atomic_export import MARK, check_empty, clean_export
from safepoint.checkpoint.tools.inventory import Inventory
from safepoint.checkpoint.tools.repair import repair
from safepoint.errors import ConflictError, TransientError
from safepoint.foundation import bounded_json, clock
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location, Scheme
from tests.support.checkpoints import commit, describe, prepared
from tests.support.foreign import write_foreign
from tests.support.stores import FaultyStore

_TARGET = Location(scheme=Scheme.S3, bucket="bucket", path="models/m")


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    (tmp_path / "store").mkdir()
    return FaultyStore(tmp_path / "store")


def _put(store: LocalStore, key: str, data: bytes, *, age_s: float = 600.0) -> None:
    path = store.location.folder / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    _make_older(path, age_s)


def _make_older(path: Path, age_s: float) -> None:
    time_s = clock.wall_s() - age_s
    os.utime(path, (time_s, time_s))


def _keys(store: LocalStore) -> list[str]:
    return [item.key for item in store.list()]


@pytest.mark.parametrize("files", [["data/train", "notes.txt"], {"data/train": 8, "notes.txt": 8}], ids=type)
class TestTheMarkOfAnExport:
    """It names objects of another program; a stranger who may list the bucket knows their sizes."""

    @pytest.fixture
    def marked(self, store: FaultyStore, files: object) -> FaultyStore:
        for key in ("data/train", "notes.txt"):
            _put(store, key, b"precious")
        _put(store, MARK, json.dumps({"id": "x", "files": files}).encode(), age_s=0)
        return store

    def test_at_the_place_of_an_export(self, marked: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """The place is not empty."""
        monkeypatch.setattr(atomic_export, "open_store", lambda location: marked)
        with pytest.raises(ConflictError, match="not empty"):
            check_empty(_TARGET)

    def test_beside_the_checkpoints_of_a_run(self, marked: FaultyStore) -> None:
        """`repair` deletes the mark only."""
        clean_export(marked, before_s=clock.wall_s() + 10)
        assert _keys(marked) == ["data/train", "notes.txt"]


def test_hidden_names_in_the_mark_of_an_export(store: FaultyStore) -> None:
    """No export writes such a file. It stays even if it is newer than the mark, and has the size in the mark."""
    files = {".safepoint/attempt.json": 8, "sub/.git/config": 8, "checkpoint-4/model.safetensors": 8}
    _put(store, MARK, json.dumps({"files": files}).encode())
    for key in files:
        _put(store, key, b"precious", age_s=300)
    clean_export(store, before_s=clock.wall_s())
    assert set(_keys(store)) == set(files)


def test_leftovers_of_an_export(store: FaultyStore) -> None:
    """What was written after the mark, with the size in the mark, is deleted."""
    _put(store, MARK, json.dumps({"files": {"model.safetensors": 3, "config.json": 5}}).encode())
    _put(store, "model.safetensors", b"abc", age_s=300)
    _put(store, "config.json", b"another size", age_s=300)
    assert clean_export(store, before_s=clock.wall_s()) == 2
    assert _keys(store) == ["config.json"]


@pytest.mark.parametrize("is_size_known", [False, True])
def test_a_mark_for_the_checkpoint_of_another_program(is_size_known: bool, store: FaultyStore) -> None:
    """Neither the start of a run nor `repair` deletes it."""
    folder = write_foreign(store.location.folder, 8)
    sizes = {path.name: path.stat().st_size if is_size_known else 1 for path in folder.iterdir()}
    for path in folder.iterdir():
        _make_older(path, 600)
    _put(store, f"{UNFINISHED}/checkpoint-8", json.dumps({"files": sizes}).encode(), age_s=0)
    RemoteFolder(store).clean(keep=[])
    assert {path.name for path in folder.iterdir()} == set(sizes)
    store.location.folder.joinpath("checkpoint-8")
    inventory = Inventory(store)
    inventory.folder = None  # as in an object store
    found = repair(inventory, deep=False, drop_damaged=False, dry_run=False, idle_s=-10)
    assert {path.name for path in folder.iterdir()} == set(sizes)
    assert [item.name for item, _ in found.failed] == ["checkpoint-8"]
    assert not found.unfinished


def test_leftovers_of_a_killed_upload(store: FaultyStore) -> None:
    """They are newer than their mark, and have its sizes."""
    _put(store, f"{UNFINISHED}/checkpoint-8", json.dumps({"files": {"a": 3, "b": 3}}).encode())
    _put(store, "checkpoint-8/a", b"abc", age_s=300)
    _put(store, "checkpoint-8/b", b"a stranger's", age_s=300)
    assert RemoteFolder(store).clean(keep=[]) == 1
    assert _keys(store) == [f"{UNFINISHED}/checkpoint-8", "checkpoint-8/b"]


def test_a_deletion_that_was_killed(store: FaultyStore, tmp_path: Path) -> None:
    """Its files are older than its mark, which has their versions. So the next start deletes them nevertheless."""
    folder = commit(prepared(tmp_path / "out"), 8)
    for path in folder.rglob("*"):
        if path.is_file():
            _put(store, f"checkpoint-8/{path.relative_to(folder)}", path.read_bytes())

    def kill(name: str, key: str) -> None:
        if name == "delete" and not key.endswith(MANIFEST_NAME):
            raise TransientError("killed")

    store.before = kill
    with pytest.raises(TransientError):
        RemoteFolder(store).delete("checkpoint-8")
    assert len(_keys(store)) == 5
    store.before = lambda name, key: None
    assert RemoteFolder(store).clean(keep=[]) == 4
    assert _keys(store) == []


def test_a_second_save_after_a_killed_one(store: FaultyStore) -> None:
    """The mark is written again. What the first writer has left is still known."""
    remote = RemoteFolder(store)
    _put(store, f"{UNFINISHED}/checkpoint-8", json.dumps({"files": {"a": 3}}).encode())
    _put(store, "checkpoint-8/a", b"abc", age_s=300)
    _put(store, "checkpoint-8/b", b"abc", age_s=300)
    remote.mark("checkpoint-8", {"a": 5, "b": 3, "c": 3})
    assert remote.clean(keep=[]) == 1
    assert _keys(store) == [f"{UNFINISHED}/checkpoint-8", "checkpoint-8/b"]


class TestMarksOfParts:
    """They say that all nodes have uploaded their parts of a checkpoint with this manifest."""

    def _mark(self, store: FaultyStore, manifest: Manifest) -> None:
        data = manifest.to_bytes()
        digest = digest_bytes(data).rpartition(":")[2]
        _put(store, f"{PARTS}/checkpoint-4/{digest}/0-of-1", data)

    @pytest.fixture
    def folder(self, store: FaultyStore) -> Path:
        """A committed checkpoint in the store."""
        return commit(prepared(store.location.folder), 4)

    def test_of_another_run(self, store: FaultyStore, folder: Path) -> None:
        """The files are the same, so the sizes fit."""
        manifest = read_manifest(folder)
        self._mark(store, dataclasses.replace(manifest, run_id="f" * 32, attempt=99))
        assert finish_parts(RemoteFolder(store)) == []
        assert read_manifest(folder) == manifest
        assert verify(folder).is_valid

    @pytest.mark.parametrize(
        "change",
        [
            {}, {"metrics": {"eval_loss": 0.0}}, {"samples_seen": 10**15}, {"epoch": 9.0}, {"world_size": 64},
            {"attempt": 99}, {"created": "2030-01-01T00:00:00.000Z"},
        ],
    )  # fmt: skip
    def test_of_a_manifest_with_more_files(self, change: dict[str, object], store: FaultyStore, folder: Path) -> None:
        """Of the same run; without a change, the digest of the added file is wrong."""
        manifest = read_manifest(folder)
        _put(store, "checkpoint-4/zz", b"junk")
        added = FileEntry(path="zz", size_bytes=4, digest=digest_bytes(b"junk" if change else b"else"))
        self._mark(store, dataclasses.replace(manifest, files=(*manifest.files, added), **change))  # pyright: ignore
        assert finish_parts(RemoteFolder(store)) == []
        assert read_manifest(folder) == manifest
        self._mark(store, dataclasses.replace(manifest, files=(*manifest.files, dataclasses.replace(
            added, digest=digest_bytes(b"junk")
        ))))  # fmt: skip
        assert finish_parts(RemoteFolder(store)) == ["checkpoint-4"]  # as after a node has added a file
        assert verify(folder).is_valid

    def test_of_a_manifest_with_fewer_files(self, store: FaultyStore, folder: Path) -> None:
        """Of the same run; the files that it does not name would be deleted."""
        manifest = read_manifest(folder)
        self._mark(store, dataclasses.replace(manifest, files=manifest.files[:1]))
        assert finish_parts(RemoteFolder(store)) == []
        assert verify(folder).is_valid


def test_an_invalid_manifest_in_the_checkpoint_of_another_program(store: FaultyStore, tmp_path: Path) -> None:
    """A run saves this step. It replaces files of the same names, and deletes no others."""
    folder = write_foreign(store.location.folder, 8)
    others = {path.name for path in folder.iterdir()} - {"model.safetensors"}
    for path in folder.iterdir():
        _make_older(path, 600)
    _put(store, f"checkpoint-8/{MANIFEST_NAME}", b"{}")
    output = prepared(tmp_path / "out")
    saved = commit(output, 8)
    manifest = read_manifest(saved)
    assert (
        publish(RemoteFolder(store), saved, manifest, name="checkpoint-8", sent=UploadRecord(None)) is Published.NOW
    )
    assert verify(folder).is_valid
    assert set(verify(folder).strays) == others


def test_marks_of_millions_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """No manifest could list that many files, so no writer has written the mark. It is not parsed."""
    entries = tuple(FileEntry(path=path, size_bytes=0, digest=digest_bytes(b"")) for path in "ab")
    one, two = (len(describe(20)(entries[:count]).to_bytes()) for count in (1, 2))
    assert 2 * MAX_MANIFEST_BYTES // (two - one) <= marks._MAX_VALUES
    monkeypatch.setattr(marks, "_MAX_VALUES", 1000)
    paths = [str(number) for number in range(1002)]
    usual = {"files": dict.fromkeys(paths[:500], 1), "versions": dict.fromkeys(paths[:495], "v")}
    assert len(Mark.parse(json.dumps(usual).encode(), 0.0).sizes) == 500
    monkeypatch.setattr(bounded_json.json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    for hostile in ({"files": dict.fromkeys(paths, 1)}, {"files": {"a": [1] * 1002}}, [""] * 1002):
        assert Mark.parse(json.dumps(hostile).encode(), 0.0) == Mark(modified_s=0.0)
    assert Mark.parse(b'"' + b"," * 1002 + b'"' + b'""' * 3000, 0.0) == Mark(modified_s=0.0)
