"""Manifests whose files lie in far more folders than there are files: on a disk, each folder takes 4 KiB.

A manifest of 64 MiB named 28 million folders. A start that fetched the checkpoint would have been busy for days.
"""

import json
from pathlib import Path

import pytest

from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest
from safepoint.errors import ManifestError
from safepoint.foundation.environment import Place
from safepoint.foundation.events.stream import Event
from safepoint.settings.run_settings import RunSettings
from safepoint.training.collective.peers import Peers
from safepoint.training.start.choose import CheckpointChooser
from safepoint.training.start.first_start import FirstStart
from safepoint.training.start.folders import Folders
from tests.support.checkpoints import commit, describe, prepared, sealed
from tests.support.stores import FaultyStore

_EMPTY = digest_bytes(b"")


def _entries(num_files: int, depth: int) -> list[dict[str, object]]:
    paths = (f"{number:03}/{'/'.join('x' * depth)}/f" for number in range(num_files))
    return [{"path": path, "size_bytes": 0, "digest": _EMPTY} for path in paths]


def _with_files(folder: Path, entries: list[dict[str, object]]) -> bytes:
    return sealed({**json.loads((folder / MANIFEST_NAME).read_bytes()), "files": entries})


@pytest.mark.parametrize(("num_files", "depth"), [(1, 1500), (20, 100), (10, 1990)])
def test_a_manifest(num_files: int, depth: int, tmp_path: Path) -> None:
    folder = commit(prepared(tmp_path), 10)
    with pytest.raises(ManifestError, match="folders"):
        Manifest.from_bytes(_with_files(folder, _entries(num_files, depth)))


@pytest.mark.parametrize("paths", [["a/" * 900 + "f"], [f"{number}/f" for number in range(5000)]])
def test_what_scripts_save(paths: list[str]) -> None:
    """Deep folders, and a folder for each file."""
    files = tuple(FileEntry(path=path, size_bytes=0, digest=_EMPTY) for path in sorted(paths))
    manifest = describe(10)(files)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_a_resume_takes_the_next_one(tmp_path: Path) -> None:
    """It fetches no file of the newest checkpoint in the bucket, and creates none of its folders."""
    bucket = prepared(tmp_path / "bucket")
    commit(bucket, 10)
    newest = commit(bucket, 20, {0: {f"{number:03}/f": b"" for number in range(20)}})
    (newest / MANIFEST_NAME).write_bytes(_with_files(newest, _entries(20, 100)))
    for number in range(20):
        deep = newest / f"{number:03}" / "/".join("x" * 100)
        deep.mkdir(parents=True)
        (deep / "f").touch()
    events: list[Event] = []
    output, store = prepared(tmp_path / "out"), FaultyStore(bucket.root)
    peers = Peers(Place(), timeout_s=1)
    first = FirstStart(peers, output, store, RunSettings())
    point = CheckpointChooser(peers, output, Folders(), store, RunSettings(), first, events.append).choose()
    assert point is not None
    assert point.manifest.step == 10
    assert [event.name for event in events] == ["checkpoint_rejected", "fetched", "resumed"]
