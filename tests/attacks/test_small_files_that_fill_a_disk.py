"""Files of another person take far more space on the disk than they state: it is not filled.

Each small file takes a block, each folder takes a block, and a file that is a hole takes its whole size when it is
copied. The disk is that of other users, too.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.checkpoint.commit import link_or_copy
from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.checkpoint.remote.fetch import create_files
from safepoint.errors import StorageError
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.volumes import needed
from safepoint.foundation.volumes.needed import shortage
from safepoint.foundation.volumes.room import Room
from safepoint.jobs.local.attempt import fetch
from safepoint.jobs.model.inputs import Input
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location
from safepoint.storage.store import StoredObject

_FREE = 200 << 20


@pytest.fixture(autouse=True)
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a disk with 200 MiB of free space."""
    monkeypatch.setattr(needed, "room_of", lambda folder, **_: Room(free_bytes=_FREE))
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", ["f{}", "folder-{}/f"])
def test_a_checkpoint_of_many_small_files(name: str, disk: Path) -> None:
    """It states 40 kB."""
    paths = sorted(name.format(number) for number in range(40_000))
    entries = [FileEntry(path=path, size_bytes=1, digest=digest_bytes(b"x")) for path in paths]
    with pytest.raises(StorageError, match=r"the files need .*; nothing was fetched"):
        create_files(entries, disk / "working")
    assert list((disk / "working").iterdir()) == []


def test_a_disk_without_inodes(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty files need them, too."""
    monkeypatch.setattr(needed, "room_of", lambda folder, **_: Room(free_bytes=_FREE, free_inodes=2500))
    assert shortage(disk, [(f"a/{number}", 0) for number in range(1000)]) == ""
    assert "2500 free inodes" in shortage(disk, [(f"{number}/f", 0) for number in range(1000)])


class _Deep(LocalStore):
    """A bucket with empty objects in 60,000 folders."""

    def list(self, prefix: str = "", *, deadline_s: float | None = None) -> Iterator[StoredObject]:
        for number in range(1500):
            key = "/".join(f"{number}-{level}" for level in range(41))
            yield StoredObject(key=key, size_bytes=0, modified_s=0.0, version="1")


def test_a_data_set_in_many_folders(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It states 0 bytes."""
    monkeypatch.setattr(fetch, "open_store", lambda location: _Deep(Location.of_folder(disk)))
    one = Input(kind="dataset", source="s3://bucket/data", target="/workspace/dataset", ignore=(), env={})
    with pytest.raises(StorageError, match="nothing was fetched"):
        fetch.fetch(one, disk, disk / ".unfinished")
    assert list(disk.iterdir()) == []


def test_a_hole_that_cannot_be_linked(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses second names of another user's files. So the file would be copied, with all its zeros."""

    def refused(*paths: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(no_links, "link", refused)
    source = tmp_path / "hole"
    source.touch()
    os.truncate(source, _FREE)
    with pytest.raises(OSError, match="cannot be copied") as caught:
        link_or_copy(source, disk / "copy")
    assert caught.value.errno == errno.ENOSPC
    assert list(disk.iterdir()) == []
    source.write_bytes(b"small")
    link_or_copy(source, disk / "copy")
    assert (disk / "copy").read_bytes() == b"small"


def test_usual_files_fit(disk: Path) -> None:
    """Files in one folder count this folder once."""
    assert shortage(disk, [(f"a/b/{number}", 4000) for number in range(30_000)]) == ""
    assert shortage(disk, [("model.safetensors", _FREE - (64 << 20))]) == ""
    assert shortage(disk, [("model.safetensors", _FREE - (64 << 20) + 1)])
