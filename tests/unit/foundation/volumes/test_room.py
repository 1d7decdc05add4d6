"""The room of a folder: the disk, the node's eviction threshold, the size limit of a volume."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from safepoint.foundation.volumes import mounts, room
from safepoint.foundation.volumes.mounts import Mount, mount_of
from safepoint.foundation.volumes.occupied import occupied
from safepoint.foundation.volumes.room import STORAGE_LIMIT, Limit, Room, room_of

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
EMPTY_DIR = "/var/lib/kubelet/pods/1234/volumes/kubernetes.io~empty-dir/checkpoint-storage"


def status(*, blocks: int = 1000, free: int = 500, inodes: int = 100, free_inodes: int = 50) -> os.statvfs_result:
    return os.statvfs_result((4096, 4096, blocks, free, free, inodes, free_inodes, free_inodes, 0, 255))


def disks(monkeypatch: pytest.MonkeyPatch, found: os.statvfs_result, root: os.statvfs_result | None = None) -> None:
    monkeypatch.setattr(room.os, "statvfs", lambda folder: root if root and str(folder) == "/" else found)


def mounted(monkeypatch: pytest.MonkeyPatch, root: str, *, kind: str = "ext4", point: str = "/mnt/c") -> None:
    monkeypatch.setattr(room, "mount_of", lambda folder: Mount(point=Path(point), root=root, kind=kind))


def test_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Outside of pods only the file system counts."""
    disks(monkeypatch, status())
    assert room_of(tmp_path, {}) == Room(free_bytes=500 * 4096, free_inodes=50, size_bytes=1000 * 4096)


def test_what_only_root_may_use_is_not_part_of_the_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As `df` computes how full a disk is: it is full when a user can write nothing more."""
    disks(monkeypatch, os.statvfs_result((4096, 4096, 1000, 550, 500, 100, 50, 50, 0, 255)))
    found = room_of(tmp_path, {})
    assert found is not None
    assert (found.free_bytes, found.size_bytes) == (500 * 4096, 950 * 4096)


@pytest.mark.parametrize(
    "found",
    [
        status(blocks=0, free=0),
        status(free=2000),
        status(free=-1),
        os.statvfs_result((4096, 0, 1000, 500, 500, 1, 1, 1, 0, 255)),
    ],
)
def test_values_that_cannot_be_true(
    found: os.statvfs_result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a size, or with more free than there is, the room is not known."""
    disks(monkeypatch, found)
    assert room_of(tmp_path, {}) is None


@pytest.mark.parametrize("inodes", [(0, 0), (10, 20), (-1, -1)])
def test_inodes_without_a_limit(inodes: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on btrfs; values that cannot be true do not count."""
    disks(monkeypatch, status(inodes=inodes[0], free_inodes=inodes[1]))
    assert room_of(tmp_path, {}) == Room(free_bytes=500 * 4096, size_bytes=1000 * 4096)


def test_an_empty_dir_is_evicted_before_the_disk_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At 10 % of the node's disk; at 15 % if the images are on the same disk; at 5 % of the inodes."""
    mounted(monkeypatch, EMPTY_DIR)
    disks(monkeypatch, status(), status(blocks=7777))
    expected = Room(free_bytes=400 * 4096, free_inodes=45, limit=Limit.EVICTION, size_bytes=900 * 4096)
    assert room_of(tmp_path, POD) == expected
    disks(monkeypatch, status())
    expected = replace(expected, size_bytes=850 * 4096)
    assert room_of(tmp_path, POD) == replace(expected, free_bytes=350 * 4096)
    disks(monkeypatch, status(free=100, free_inodes=0))
    assert room_of(tmp_path, POD) == replace(expected, free_bytes=0, free_inodes=0)
    found = room_of(tmp_path, POD, with_thresholds=False)
    assert found == Room(free_bytes=100 * 4096, free_inodes=0, size_bytes=1000 * 4096)
    assert room_of(tmp_path, {}) == Room(free_bytes=100 * 4096, free_inodes=0, size_bytes=1000 * 4096)


def test_other_volumes_of_a_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A claim and memory are not on the node's disk; the layer of the container is."""
    disks(monkeypatch, status())
    for root, kind, free in (("/run1", "nfs4", 500), (EMPTY_DIR, "tmpfs", 500), ("/", "overlay", 350)):
        mounted(monkeypatch, root, kind=kind)
        found = room_of(tmp_path, POD)
        assert found is not None
        assert found.free_bytes == free * 4096, kind


def test_the_size_limit_of_a_volume(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What lies in the volume counts, and only for the volume that the variable names."""
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    used = occupied(tmp_path).num_bytes
    assert used >= 1 << 20
    disks(monkeypatch, status(blocks=10**6, free=10**6))
    mounted(monkeypatch, EMPTY_DIR, point=str(tmp_path))
    limited = room_of(tmp_path, POD | {STORAGE_LIMIT: f"{tmp_path}=3Mi"})
    assert limited is not None
    assert (limited.free_bytes, limited.size_bytes) == ((3 << 20) - used, 3 << 20)
    assert limited.limit is Limit.SIZE_LIMIT
    for text in (f"{tmp_path}x=3Mi", f"{tmp_path}=", "3Mi", f"{tmp_path}=nonsense"):
        found = room_of(tmp_path, POD | {STORAGE_LIMIT: text})
        assert found is not None
        assert found.limit is Limit.EVICTION, text


def test_the_mount_of_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The innermost one, with its root and kind; lines that are not mounts do not count."""
    table = tmp_path / "mountinfo"
    inner = str(tmp_path / "a b").replace(" ", "\\040")
    table.write_text(
        f"22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n23 22 8:1 {EMPTY_DIR} {inner} rw - xfs /dev/sda1 rw\n"
        "nonsense\n24 22 - \n"
    )
    monkeypatch.setattr(mounts, "_MOUNTS", table)
    (tmp_path / "a b" / "c").mkdir(parents=True)
    assert mount_of(tmp_path / "a b" / "c") == Mount(point=tmp_path / "a b", root=EMPTY_DIR, kind="xfs")
    outer = mount_of(tmp_path)
    assert outer is not None
    assert outer.kind == "ext4"
    table.unlink()
    assert mount_of(tmp_path) is None


def test_what_a_folder_occupies(tmp_path: Path) -> None:
    """Holes and second names do not count, folders do; what is missing occupies nothing."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(bytes(10_000))
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    os.link(tmp_path / "a" / "file", tmp_path / "second")
    assert occupied(tmp_path).num_inodes == 3
    assert occupied(tmp_path).num_bytes < 1 << 20
    (tmp_path / "second").unlink()
    assert occupied(tmp_path).num_bytes >= 10_000
    assert occupied(tmp_path / "missing").num_bytes == 0
