"""The free space of a folder: how many bytes and inodes fit, before a save fails or Kubernetes evicts the pod.

Three limits count:

- the free space of the file system;
- in a pod, the threshold at which the kubelet evicts pods of a node whose disk is nearly full;
- the size limit of an emptyDir volume, which no file system enforces.

The thresholds are the kubelet's defaults: 10 % of the node's file system (`nodefs.available`), 15 % of the file
system of the container images (`imagefs.available`), and 5 % of the inodes
(https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/). A pod cannot read the thresholds
that its kubelet really has, nor the size limits of its volumes. So `safepoint submit` passes a size limit in the
variable `STORAGE_LIMIT`.
"""

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safepoint.foundation.quantities import parse_bytes
from safepoint.foundation.volumes.mounts import Mount, mount_of
from safepoint.foundation.volumes.occupied import occupied

STORAGE_LIMIT = "SAFEPOINT_STORAGE_LIMIT"
"""The variable with the size limit of a volume: the path where the volume is mounted, and the limit, as in
`/mnt/checkpoints=20Gi`."""
_IN_POD = "KUBERNETES_SERVICE_HOST"
_EMPTY_DIR = "kubernetes.io~empty-dir"
"""The kubelet's name for the folder of emptyDir volumes: `…/pods/<uid>/volumes/kubernetes.io~empty-dir/<name>`."""
_NODE_SHARE, _IMAGES_SHARE, _INODES_SHARE = 0.10, 0.15, 0.05


class Limit(enum.StrEnum):
    """What limits the free space of a folder."""

    DISK = "disk"
    EVICTION = "eviction"
    SIZE_LIMIT = "size_limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The free space of a folder.

    Args:
        free_bytes: how many bytes this user may still write.
        free_inodes: how many files and folders this user may still create; None if the file system sets no limit.
        limit: what limits `free_bytes`.
        size_bytes: what `free_bytes` would be if nothing were stored under this limit; None if it is not known.
    """

    free_bytes: int
    free_inodes: int | None = None
    limit: Limit = Limit.DISK
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileSystem:
    total_bytes: int
    size_bytes: int  # without the bytes that only root may use
    free_bytes: int
    total_inodes: int
    free_inodes: int


def room_of(folder: Path, environ: Mapping[str, str] | None = None, *, with_thresholds: bool = True) -> Room | None:
    """The free space of `folder`.

    On a network file system whose server does not answer, the call does not return. So call it on a thread, with a
    time limit (`Work` in `foundation.bounded`).

    Args:
        folder: an existing folder.
        environ: the environment of a pod; None for the environment of this process.
        with_thresholds: whether the kubelet's thresholds count. They may differ from the defaults, so leave them out
            where files that do not fit are refused.

    Returns:
        The free space. None if the file system states no size that can be true: ramfs, for example, states 0.

    Raises:
        OSError: the folder cannot be read.
    """
    environ = os.environ if environ is None else environ
    disk = _file_system(folder)
    if disk is None:
        return None
    inodes = disk.free_inodes if disk.total_inodes else None
    room = Room(free_bytes=disk.free_bytes, free_inodes=inodes, size_bytes=disk.size_bytes)
    mount = mount_of(folder) if environ.get(_IN_POD) else None
    share = _evicted_at(mount, disk) if mount is not None and with_thresholds else None
    if share is not None:
        room = replace(
            room,
            free_bytes=max(0, disk.free_bytes - round(share * disk.total_bytes)),
            free_inodes=inodes and max(0, inodes - round(_INODES_SHARE * disk.total_inodes)),
            limit=Limit.EVICTION,
            size_bytes=max(0, disk.size_bytes - round(share * disk.total_bytes)),
        )
    size_bytes = None if mount is None else _size_limit(mount, environ)
    if size_bytes is not None and mount is not None:
        left_bytes = max(0, size_bytes - occupied(mount.point).num_bytes)
        if left_bytes < room.free_bytes:
            room = replace(room, free_bytes=left_bytes, limit=Limit.SIZE_LIMIT, size_bytes=size_bytes)
    return room


def _file_system(folder: Path) -> _FileSystem | None:
    status = os.statvfs(folder)
    if not 0 <= status.f_bavail <= status.f_blocks or not status.f_blocks or status.f_frsize <= 0:
        return None
    are_inodes_known = 0 <= status.f_favail <= status.f_files
    return _FileSystem(
        total_bytes=status.f_blocks * status.f_frsize,
        size_bytes=(max(0, status.f_blocks - status.f_bfree) + status.f_bavail) * status.f_frsize,
        free_bytes=status.f_bavail * status.f_frsize,
        total_inodes=status.f_files if are_inodes_known else 0,
        free_inodes=status.f_favail if are_inodes_known else 0,
    )


def _evicted_at(mount: Mount, disk: _FileSystem) -> float | None:
    """The share of the disk that must stay free; None if the pod is not evicted because of this disk."""
    if mount.kind == "tmpfs":
        return None  # the volume is in memory: the pod is killed, not evicted, and statvfs states the limit
    if mount.kind == "overlay":
        return _IMAGES_SHARE  # the container's own layer is on the disk of the images
    if _EMPTY_DIR not in mount.root:
        return None  # a claim is not on the node's disk
    try:
        images = _file_system(Path("/"))
    except OSError:
        images = None
    # On most nodes one disk holds the volumes and the images, and the higher of the two thresholds comes first.
    is_one_disk = images is not None and images.total_bytes == disk.total_bytes
    return _IMAGES_SHARE if is_one_disk else _NODE_SHARE


def _size_limit(mount: Mount, environ: Mapping[str, str]) -> int | None:
    point, _, size = environ.get(STORAGE_LIMIT, "").rpartition("=")
    try:
        return parse_bytes(size) if point == str(mount.point) else None
    except ValueError:
        return None
