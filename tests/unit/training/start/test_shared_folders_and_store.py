"""Nodes that share a folder in front of an object store: what is fetched, by which node, and what is left."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.manifest import Manifest
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import NothingValidError
from safepoint.foundation.events.run_events import CheckpointRejected, Resumed, SetAside
from safepoint.foundation.events.stream import Event
from safepoint.foundation.events.upload_events import Fetched
from safepoint.settings.run_settings import RunSettings
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from tests.support.checkpoints import commit, prepared
from tests.support.ranks import run_ranks
from tests.support.stores import FaultyStore, flip


class Job:
    """A bucket with the checkpoints of steps 10 and 20, and nodes whose folders are named by letters."""

    def __init__(self, root: Path, folders: Sequence[str]) -> None:
        bucket = prepared(root / "bucket")
        for step in (10, 20):
            commit(bucket, step)
        self.bucket = bucket.root
        self.store = FaultyStore(bucket.root)
        self.outputs = {name: prepared(root / name) for name in folders}
        self.folders = list(folders)
        self.events: list[Event] = []

    def copy_to(self, name: str, *steps: int) -> OutputFolder:
        for step in steps:
            shutil.copytree(self.bucket / f"checkpoint-{step}", self.outputs[name].root / f"checkpoint-{step}")
        return self.outputs[name]

    def choose(self) -> list[Any]:
        self.events.clear()
        self.store.calls.clear()
        owner = {name: self.folders.index(name) for name in self.folders}
        owners = tuple(sorted(set(owner.values())))
        owner_of = {rank: owner[name] for rank, name in enumerate(self.folders)}

        def one(peers: Any) -> Any:
            rank = peers.place.rank
            own = owner_of[rank]
            folders = Folders(owners=owners, index=owners.index(own), is_owner=own == rank, owner_of=owner_of)
            report = self.events.append if rank == 0 else lambda event: None
            output = OutputFolder(self.outputs[self.folders[rank]].root)
            first = FirstStart(peers, output, self.store, RunSettings())
            point = CheckpointChooser(peers, output, folders, self.store, RunSettings(), first, report).choose()
            assert point is None or point.path.parent == output.root
            return point.manifest if point is not None else None

        return run_ranks(len(self.folders), one)

    def assert_all_have(self, step: int) -> Manifest:
        results = self.choose()
        assert [getattr(result, "step", result) for result in results] == [step] * len(self.folders)
        for output in self.outputs.values():
            found = verify(output.root / f"checkpoint-{step}")
            assert (found.manifest, found.faults) == (results[0], ())
            assert not list(output.work.glob("resume-*"))
        return results[0]

    @property
    def read(self) -> list[str]:
        return sorted(key for name, key in self.store.calls if name == "read" and not key.endswith(".json"))

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.mark.parametrize("folders", ["a", "aaa", "abab", "aab", "abc"])
def test_every_file_is_read_from_the_store_once(folders: str, tmp_path: Path) -> None:
    """Whichever nodes share a folder: afterwards each folder has the whole, and nothing is fetched the next time."""
    job = Job(tmp_path, folders)
    manifest = job.assert_all_have(20)
    assert job.read == sorted(f"checkpoint-20/{entry.path}" for entry in manifest.files)
    assert [event.size_bytes for event in job.of(Fetched)] == [manifest.size_bytes]
    job.assert_all_have(20)
    assert (job.read, [event.name for event in job.events]) == ([], ["resumed"])


def test_a_damaged_file_alone_is_fetched(tmp_path: Path) -> None:
    """The damaged checkpoint is named, and set aside; its good files are used."""
    job = Job(tmp_path, "a")
    output = job.copy_to("a", 10, 20)
    flip(output.root / "checkpoint-20" / "model.safetensors")
    job.assert_all_have(20)
    assert job.read == ["checkpoint-20/model.safetensors"]
    (rejected,) = job.of(CheckpointRejected)
    assert (rejected.path, rejected.file) == (str(output.root / "checkpoint-20"), "model.safetensors")
    assert "digest does not match" in rejected.reason
    assert len(job.of(SetAside)) == 1
    assert len(list(output.root.glob("set-aside-*/checkpoint-20/model.safetensors"))) == 1


@pytest.mark.parametrize("damage", ["missing", "added", "manifest"])
def test_damage_is_named_and_the_store_has_the_whole(damage: str, tmp_path: Path) -> None:
    """A file that is missing and a manifest that cannot be read; a file that it does not name is no damage."""
    job = Job(tmp_path, "aa")
    folder = job.copy_to("a", 20).root / "checkpoint-20"
    path = {"missing": "sub/optimizer.pt", "added": "notes.txt", "manifest": "safepoint-manifest.json"}[damage]
    if damage == "missing":
        (folder / path).unlink()
    else:
        (folder / path).write_bytes(b"something")
    manifest = job.assert_all_have(20)
    assert [event.file for event in job.of(CheckpointRejected)] == ([] if damage == "added" else [path])
    assert len(job.read) == {"missing": 1, "added": 0, "manifest": len(manifest.files)}[damage]
    assert not (folder / "notes.txt").exists()


def test_the_newest_of_folder_and_store_is_taken(tmp_path: Path) -> None:
    """A folder that is behind gets the store's; one that is ahead keeps its own, unless that is damaged."""
    job = Job(tmp_path, "a")
    output = job.copy_to("a", 10)
    job.assert_all_have(20)
    assert [event.step for event in job.of(Resumed)] == [20]
    commit(output, 30)
    job.assert_all_have(30)
    assert job.read == []
    flip(output.root / "checkpoint-30" / "model.safetensors")
    job.assert_all_have(20)
    assert [path.name for path in list_checkpoints(output.root)] == ["checkpoint-20", "checkpoint-10"]


def test_nothing_valid_in_folder_and_store(tmp_path: Path) -> None:
    """All damaged: 14 on every rank, and nothing is moved."""
    job = Job(tmp_path, "ab")
    for root in (job.copy_to("a", 10).root, job.bucket):
        for path in list_checkpoints(root):
            flip(path / "model.safetensors")
    for result in job.choose():
        assert isinstance(result, NothingValidError), result
        assert "2 checkpoints" in str(result)
    assert len(list_checkpoints(job.outputs["a"].root)) == 1
    assert job.of(SetAside) == []
