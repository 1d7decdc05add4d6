"""The newest checkpoint of a bucket is larger than the disk: by mistake, or because another person has put it there.

It would fill the disk, which belongs to other users, too. Or it would end each start, though an older one fits.
"""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.remote import fetch
from safepoint.errors import ExitCode, NoRoomError
from safepoint.foundation.events.run_events import CheckpointRejected
from safepoint.foundation.events.stream import Event
from safepoint.foundation.volumes import needed, room
from safepoint.foundation.volumes.mounts import Mount
from safepoint.foundation.volumes.occupied import Occupied
from safepoint.foundation.volumes.room import STORAGE_LIMIT, Room
from safepoint.settings.run_settings import RunSettings
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from tests.support.checkpoints import FILES, commit, prepared
from tests.support.foreign import write_foreign
from tests.support.ranks import run_ranks
from tests.support.stores import FaultyStore

_FREE = (64 << 20) + (1 << 20)
_LARGE = {**FILES, 0: {**FILES[0], "model.safetensors": bytes(2 << 20)}}


class Job:
    """Two nodes, each with a folder of its own, and a bucket whose newest checkpoint is the largest."""

    def __init__(self, root: Path) -> None:
        bucket = prepared(root / "bucket")
        commit(bucket, 10)
        commit(bucket, 20, _LARGE)
        self.bucket = bucket.root
        self.store = FaultyStore(bucket.root)
        self.outputs = [prepared(root / name) for name in ("a", "b")]
        self.events: list[Event] = []

    def start(self, *, reads_foreign: bool = False, **options: Any) -> list[Any]:
        self.events.clear()
        self.store.calls.clear()
        settings = RunSettings(**options)

        def one(peers: Any) -> Any:
            rank = peers.place.rank
            folders = Folders(owners=(0, 1), index=rank, is_owner=True, owner_of={0: 0, 1: 1})
            first = FirstStart(peers, self.outputs[rank], self.store, settings)
            report = self.events.append if rank == 0 else lambda event: None
            chooser = CheckpointChooser(
                *(peers, self.outputs[rank], folders, self.store, settings, first, report),
                reads_foreign=reads_foreign,
            )
            point = chooser.choose()
            return None if point is None else point.manifest.step

        return run_ranks(2, one)

    @property
    def rejected(self) -> list[CheckpointRejected]:
        return [event for event in self.events if isinstance(event, CheckpointRejected)]

    @property
    def fetched(self) -> set[str]:
        """The checkpoints of which files were read."""
        read = {key for name, key in self.store.calls if name in {"read", "stream"} and not key.endswith(".json")}
        return {key.partition("/")[0] for key in read}

    def assert_older_is_taken(self, reason: str, **options: Any) -> None:
        assert self.start(**options) == [10, 10]
        (rejected,) = self.rejected
        assert rejected.path.endswith("checkpoint-20")
        assert reason in rejected.reason
        assert self.fetched == {"checkpoint-10"}
        for output in self.outputs:
            assert output.steps() == [10]
            assert not list(output.work.glob("*"))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int, *, only: Path | None = None) -> None:
    def found(folder: Path, **_: Any) -> Room:
        return Room(free_bytes=num_bytes if only is None or only in folder.parents else 1 << 40)

    monkeypatch.setattr(needed, "room_of", found)


def test_the_checkpoint_before_is_taken(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the large one is fetched."""
    free(monkeypatch, _FREE)
    job.assert_older_is_taken("free, and the files need 2.1 MB")


def test_one_node_alone_has_too_little_room(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes decide together."""
    free(monkeypatch, _FREE, only=job.outputs[1].root)
    job.assert_older_is_taken("(on rank 1)")


def test_a_volume_of_a_pod_with_a_size_limit(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file system enforces the limit. The kubelet would evict the pod in each start."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv(STORAGE_LIMIT, f"{tmp_path}={_FREE}")
    monkeypatch.setattr(room, "mount_of", lambda folder: Mount(point=tmp_path, root="/", kind="ext4"))
    monkeypatch.setattr(room, "occupied", lambda folder: Occupied())
    job.assert_older_is_taken("free below the size limit of its volume")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_that_the_file_system_does_not_state(job: Job, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is found to be full when the files are allocated, before anything is fetched."""
    allocate = os.posix_fallocate

    def refuse(descriptor: int, start: int, size_bytes: int) -> None:
        if size_bytes > 1 << 20:
            raise OSError(code, os.strerror(code))
        allocate(descriptor, start, size_bytes)

    monkeypatch.setattr(fetch.os, "posix_fallocate", refuse)
    job.assert_older_is_taken(f"is full: {os.strerror(code)}")


def test_nothing_older_fits(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start ends with the error of the newest one, on all nodes, and nothing is written."""
    free(monkeypatch, 1000)
    for options in ({}, {"reads_foreign": True}):
        found = job.start(**options)
        assert [type(one) for one in found] == [NoRoomError] * 2
        for one in found:
            assert (one.exit_code, one.hint) == (ExitCode.STORAGE, fetch.MAKE_ROOM)
            assert "1.0 kB free, and the files need 2.1 MB" in str(one)
        assert [Path(one.path).name for one in job.rejected] == ["checkpoint-20", "checkpoint-10"]
        assert job.fetched == set()


def test_the_older_one_is_about_as_large(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of the run is full: the start ends, because with some space, no step would be lost."""
    model = {**FILES, 0: {**FILES[0], "model.safetensors": bytes((1 << 20) + (1 << 19))}}
    commit(OutputFolder(job.bucket), 15, model)
    free(monkeypatch, _FREE + (1 << 19))
    found = job.start()
    assert [type(one) for one in found] == [NoRoomError] * 2
    assert "the files need 2.1 MB" in str(found[0])
    assert [Path(one.path).name for one in job.rejected] == ["checkpoint-20"]
    assert job.fetched == set()


def test_checkpoints_of_another_program(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before is taken, or the start ends with the error of the newest one."""
    for step in (10, 20):
        shutil.rmtree(job.bucket / f"checkpoint-{step}")
        write_foreign(job.bucket, step)
    (job.bucket / "checkpoint-20" / "notes.json").write_bytes(bytes(2 << 20))
    free(monkeypatch, 1000)
    assert [type(one) for one in job.start(reads_foreign=True)] == [NoRoomError] * 2
    free(monkeypatch, _FREE)
    assert job.start(reads_foreign=True) == [10, 10]
    assert [Path(one.path).name for one in job.rejected] == ["checkpoint-20"]
