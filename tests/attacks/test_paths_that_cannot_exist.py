"""A manifest names a path that no disk, or not this one, can have: the resume takes the next checkpoint."""

import errno
import json
import os
from pathlib import Path

import pytest

from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import FileEntry, Manifest
from safepoint.checkpoint.remote.fetch import create_files
from safepoint.errors import CheckpointError, ManifestError
from safepoint.foundation.environment import Place
from safepoint.foundation.events.stream import Event
from safepoint.settings.run_settings import RunSettings
from safepoint.training.collective.peers import Peers
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from tests.support.checkpoints import commit, describe, prepared, sealed
from tests.support.stores import FaultyStore

_DIGEST = digest_bytes(b"x")


@pytest.mark.parametrize(
    "path",
    [
        "x" * 256,
        "ä" * 128,
        "folder/" + "x" * 256,
        "safepoint-manifest.json/x",
        "safepoint-part.json/x",
        "/".join(["x" * 200] * 30),
    ],
)
def test_no_disk_can_have_it(path: str, tmp_path: Path) -> None:
    """Such a manifest is refused when it is read, before any file of it is created."""
    folder = commit(prepared(tmp_path), 10)
    record = json.loads((folder / "safepoint-manifest.json").read_bytes())
    record["files"] = [{"path": path, "size_bytes": 1, "digest": _DIGEST}]
    with pytest.raises(ManifestError, match="path"):
        Manifest.from_bytes(sealed(record))


@pytest.mark.parametrize("blocker", ["file", "folder"])
def test_something_is_in_the_way(blocker: str, tmp_path: Path) -> None:
    """A file where a folder must be, and the reverse: a fault of this checkpoint, not of the disk."""
    if blocker == "file":
        (tmp_path / "a").touch()
    else:
        (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="cannot be created here"):
        create_files([FileEntry(path="a/b", size_bytes=1, digest=_DIGEST)], tmp_path)


def test_a_path_too_long_for_this_folder(tmp_path: Path) -> None:
    """The manifest is valid, and its path below this folder is longer than the system allows."""
    path = "/".join(["x" * 254] * 16)
    describe(10)((FileEntry(path=path, size_bytes=1, digest=_DIGEST),))
    with pytest.raises(CheckpointError, match="cannot be created here"):
        create_files([FileEntry(path=path, size_bytes=1, digest=_DIGEST)], tmp_path)


def test_a_full_disk_is_no_fault_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every checkpoint would be rejected in turn."""

    def full(*args: object, **kwargs: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(OSError, match="No space"):
        create_files([FileEntry(path="a", size_bytes=1, digest=_DIGEST)], tmp_path)


@pytest.mark.parametrize("code", [errno.ENAMETOOLONG, errno.EINVAL, errno.ENOTDIR])
def test_a_resume_takes_the_next_one(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest checkpoint of the store has a name that this disk cannot have, as on eCryptfs."""
    bucket = prepared(tmp_path / "bucket")
    commit(bucket, 10)
    commit(bucket, 20, {0: {"x" * 200: b"long", "short": b"short"}})
    open_ = os.open

    def refusing(path, *args, **kwargs):
        if len(os.path.basename(path)) > 143 and kwargs.get("dir_fd") is not None:  # in `.safepoint`
            raise OSError(code, os.strerror(code), path)
        return open_(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    events: list[Event] = []
    output, store = prepared(tmp_path / "out"), FaultyStore(bucket.root)
    peers = Peers(Place(), timeout_s=1)
    first = FirstStart(peers, output, store, RunSettings())
    point = CheckpointChooser(peers, output, Folders(), store, RunSettings(), first, events.append).choose()
    assert point is not None
    assert point.manifest.step == 10
    assert [event.name for event in events] == ["checkpoint_rejected", "fetched", "resumed"]
