"""Three nodes with a folder each: which checkpoint they choose, and what each of them holds then."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.checkpoint.format.manifest import PART_NAME, Manifest, NodePart
from safepoint.checkpoint.format.verify import read_part, verify
from safepoint.checkpoint.local.working_checkpoint import (
    RankPart,
    WorkingCheckpoint,
    extend_manifest,
    find_added_files,
    merge_parts,
    replace_record,
)
from safepoint.checkpoint.remote.publish import publish
from safepoint.checkpoint.remote.remote_folder import RemoteFolder
from safepoint.checkpoint.remote.verified_upload import UploadRecord
from safepoint.errors import CheckpointError, NothingValidError, StorageError
from safepoint.foundation.events.run_events import CheckpointRejected, Resumed, SetAside
from safepoint.foundation.events.stream import Event
from safepoint.foundation.events.upload_events import Fetched
from safepoint.settings.run_settings import RunSettings
from safepoint.training.start import transfer
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.copies import ResumePoint
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from tests.support.checkpoints import commit, describe, prepared
from tests.support.ranks import run_ranks
from tests.support.stores import FaultyStore, flip

_NUM = 3


class Job:
    """Three folders and a bucket."""

    def __init__(self, root: Path) -> None:
        self.outputs = [prepared(root / f"node-{node}") for node in range(_NUM)]
        self.store = FaultyStore(root / "bucket")
        self.events: list[Event] = []

    def save(self, step: int, *, attempt: int = 1) -> Manifest:
        workings: list[WorkingCheckpoint] = []
        parts: list[RankPart] = []
        for node, output in enumerate(self.outputs):
            working = WorkingCheckpoint(output, attempt_id="run-1", step=step)
            files = {f"rng_state_{node}.pth": bytes([step, node, attempt]) * 9}
            if node == 0:
                files |= {"model.safetensors": bytes([step, attempt]) * 5000, "sub/empty": b""}
            for path, content in files.items():
                target = working.rank_root(node) / working.name / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            parts.append(dataclasses.replace(working.seal(node), node=node))
            workings.append(working)
        manifest = merge_parts(parts, describe(step, attempt=attempt))
        for node, working in enumerate(workings):
            paths = tuple(sorted(entry.path for entry in parts[node].files))
            working.prepare(NodePart(node=node, num_nodes=_NUM, paths=paths, manifest=manifest))
            working.publish()
            shutil.rmtree(self.outputs[node].work / "run-1")
        return manifest

    def upload(self, step: int) -> None:
        for output in self.outputs:
            folder = output.root / f"checkpoint-{step}"
            sent = UploadRecord(output.control / "sent")
            publish(RemoteFolder(self.store), folder, read_part(folder), name=folder.name, sent=sent)

    def folder(self, node: int, step: int) -> Path:
        return self.outputs[node].root / f"checkpoint-{step}"

    def choose(self, *, restart: int = 0, **settings: Any) -> list[ResumePoint | Exception | None]:
        def one(peers: Any) -> ResumePoint | None:
            place = dataclasses.replace(peers.place, restart=restart)
            report = self.events.append if place.is_first else lambda event: None
            peers.place = place
            ranks = tuple(range(_NUM))
            folders = Folders(owners=ranks, index=place.rank, owner_of={rank: rank for rank in ranks})
            output = self.outputs[place.rank]
            options = RunSettings(**settings)
            first = FirstStart(peers, output, self.store, options)
            return CheckpointChooser(peers, output, folders, self.store, options, first, report).choose()

        return run_ranks(_NUM, one)

    def assert_whole(self, manifest: Manifest) -> None:
        for node in range(_NUM):
            found = verify(self.folder(node, manifest.step))
            assert (found.manifest, found.faults) == (manifest, ())
            assert not list(self.outputs[node].work.iterdir())

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def assert_all(results: list[Any], step: int) -> None:
    assert [result.manifest.step for result in results] == [step] * _NUM, results


def test_nothing_is_step_zero(job: Job) -> None:
    """All ranks begin at step 0."""
    assert job.choose() == [None] * _NUM


def test_parts_of_all_nodes_are_put_together(job: Job) -> None:
    """The newest, without the store; every node holds the whole afterwards, and again the next time."""
    job.save(10)
    manifest = job.save(20)
    for _ in range(2):
        assert_all(job.choose(), 20)
        job.assert_whole(manifest)
    assert job.of(Fetched) == []
    assert [event.step for event in job.of(Resumed)] == [20, 20]


def test_what_no_node_has_comes_from_the_store_once(job: Job) -> None:
    """Lost disks and damaged files; each byte is read from the store once for all nodes."""
    manifest = job.save(20)
    job.upload(20)
    shutil.rmtree(job.folder(1, 20))
    flip(job.folder(0, 20) / "model.safetensors")
    job.store.calls.clear()
    assert_all(job.choose(), 20)
    job.assert_whole(manifest)
    size = {entry.path: entry.size_bytes for entry in manifest.files}
    assert [event.size_bytes for event in job.of(Fetched)] == [size["model.safetensors"] + size["rng_state_1.pth"]]
    read = [key for name, key in job.store.calls if name == "read" and not key.endswith(".json")]
    assert sorted(read) == ["checkpoint-20/model.safetensors", "checkpoint-20/rng_state_1.pth"]


def test_a_lost_part_means_the_older_one(job: Job) -> None:
    """Said, and the newer parts are moved out of the way on every node."""
    manifest = job.save(10)
    job.save(20)
    shutil.rmtree(job.folder(2, 20))
    assert_all(job.choose(), 10)
    job.assert_whole(manifest)
    assert "parts of other nodes are missing" in job.of(CheckpointRejected)[0].reason
    assert [path.name for path in list_checkpoints(job.outputs[0].root)] == ["checkpoint-10"]
    assert len(list(job.outputs[1].root.glob("set-aside-*/checkpoint-20"))) == 1


@pytest.mark.parametrize("spoil", ["damaged", "foreign", "one node's only"])
def test_never_silently_from_scratch(spoil: str, job: Job) -> None:
    """Something is there, on whichever node, and nothing of it can be used: 14 on every rank."""
    if spoil == "damaged":
        job.save(10)
        flip(job.folder(1, 10) / PART_NAME)
        flip(job.folder(0, 10) / "model.safetensors")
    elif spoil == "foreign":
        job.folder(1, 10).mkdir()
        (job.folder(1, 10) / "model.safetensors").write_bytes(b"another tool's")
    else:
        job.save(10)
        for node in (0, 1):
            shutil.rmtree(job.folder(node, 10))
    for result in job.choose():
        assert isinstance(result, NothingValidError), result


def test_a_crash_while_files_are_named_costs_nothing(job: Job) -> None:
    """One node names a callback's file already, the others do not: what all had is still whole."""
    manifest = job.save(20)
    folder = job.folder(0, 20)
    (folder / "notes.txt").write_bytes(b"added")
    added = find_added_files(folder, manifest)
    replace_record(folder, extend_manifest(manifest, added), added)
    results = job.choose()
    assert_all(results, 20)
    job.assert_whole(extend_manifest(manifest, added))


def test_the_newest_attempt_of_a_step_counts(job: Job) -> None:
    """A node that was away comes back with an older attempt's part of the same step."""
    job.save(20, attempt=1)
    kept = job.folder(2, 20).rename(job.outputs[2].root / "kept")
    manifest = job.save(20, attempt=2)
    job.upload(20)
    shutil.rmtree(job.folder(2, 20))
    kept.rename(job.folder(2, 20))
    assert_all(job.choose(), 20)
    job.assert_whole(manifest)


def test_a_named_checkpoint_goes_to_every_node(job: Job, tmp_path: Path) -> None:
    """From another place: whatever the folders hold is another run's, and moved aside; a restart resumes from it."""
    job.save(20)
    other = commit(prepared(tmp_path / "other"), 5)
    manifest = verify(other).manifest
    assert manifest is not None
    assert_all(job.choose(resume=str(other)), 5)
    job.assert_whole(manifest)
    for output in job.outputs:
        assert [path.name for path in list_checkpoints(output.root)] == ["checkpoint-5"]
    for node in range(_NUM):
        shutil.rmtree(job.folder(node, 5))
    assert_all(job.choose(resume=str(other), restart=1), 5)
    for result in job.choose(resume=str(tmp_path / "nowhere")):
        assert isinstance(result, CheckpointError)


def test_a_folder_of_another_tool_is_moved_aside(job: Job) -> None:
    """It has the checkpoint's name on a node that lost its part."""
    manifest = job.save(20)
    job.upload(20)
    shutil.rmtree(job.folder(1, 20))
    job.folder(1, 20).mkdir()
    (job.folder(1, 20) / "mine").write_bytes(b"another tool's")
    assert_all(job.choose(), 20)
    job.assert_whole(manifest)
    assert [path.read_bytes() for path in job.outputs[1].root.glob("set-aside-*/checkpoint-20/mine")] == [
        b"another tool's"
    ]
    assert job.of(SetAside)


@pytest.mark.parametrize("stage", ["create_files", "FolderDestination", "fetch"])
@pytest.mark.parametrize("node", range(_NUM))
def test_a_failing_disk_is_an_error_on_every_rank(
    stage: str, node: int, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one node, at any stage: the same error on all ranks, and nothing is lost."""
    manifest = job.save(20)
    job.upload(20)
    for folder in (job.folder(node, 20), job.folder((node + 1) % _NUM, 20)):
        shutil.rmtree(folder)
    original = getattr(transfer, stage)
    root = str(job.outputs[node].root)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Path) and str(value).startswith(root) for value in args):
            raise OSError(28, "no space left on device")
        return original(*args, **kwargs)

    monkeypatch.setattr(transfer, stage, failing)
    results = job.choose()
    for result in results:
        assert isinstance(result, StorageError), result
        assert "no space left" in str(result)
    monkeypatch.undo()
    assert_all(job.choose(), 20)
    job.assert_whole(manifest)


def test_a_copy_that_cannot_be_read_again_comes_from_elsewhere(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Good when it was verified, unreadable when it is sent: the exchange goes to its end, and the store has it."""
    manifest = job.save(20)
    job.upload(20)
    original = transfer._read_into
    failed: list[Path] = []

    def failing(path: Path, start: int, block: Any, **options: Any) -> None:
        if path.name == "model.safetensors" and not failed:
            failed.append(path)
            flip(job.folder(0, 20) / "model.safetensors")
            raise OSError(5, "input/output error")
        original(path, start, block, **options)

    monkeypatch.setattr(transfer, "_read_into", failing)
    assert_all(job.choose(), 20)
    job.assert_whole(manifest)
    assert len(job.of(Fetched)) == 1


def test_from_scratch_moves_everything_aside(job: Job) -> None:
    """On every node."""
    job.save(20)
    assert job.choose(from_scratch=True) == [None] * _NUM
    assert [list_checkpoints(output.root) for output in job.outputs] == [[], [], []]


def test_a_store_that_cannot_be_read_is_an_error_on_every_rank(job: Job) -> None:
    """The first rank alone asks it."""

    def refuse(name: str, key: str) -> None:
        raise StorageError("out of reach")

    job.save(10)
    job.upload(10)
    shutil.rmtree(job.folder(0, 10))
    job.store.before = refuse
    for result in job.choose():
        assert isinstance(result, StorageError), result
