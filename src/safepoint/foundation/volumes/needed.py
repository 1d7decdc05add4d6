"""Checks whether files fit on a disk, and in a volume of a pod, before they are written.

The space that the files occupy on another disk says little, because files there may have holes. On this disk, many
small files take much more than their sizes: each file ends in a block of its own, and each folder takes a block.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path

from safepoint.foundation.units import format_bytes, plural
from safepoint.foundation.volumes.room import Limit, Room, room_of

_BLOCK_BYTES = 4096
_SPARE_BYTES = 64 << 20
_FEW_INODES = 1000
"""This number of inodes must stay free. If the files need no more inodes than this number, inodes are not checked,
because some file systems report a wrong number of free inodes."""
_UNKNOWN_BYTES = 1 << 62
_LIMITS = {Limit.DISK: "", Limit.EVICTION: "", Limit.SIZE_LIMIT: " below the size limit of its volume"}


def free_bytes(folder: Path) -> int:
    """How much this user can write: on the disk, and below the size limit of a volume of the pod.

    Returns:
        The number of bytes; 2^62 if the file system, such as ramfs, reports no size.

    Raises:
        OSError: the folder cannot be read.
    """
    return _room(folder).free_bytes


def _room(folder: Path) -> Room:
    return room_of(folder, with_thresholds=False) or Room(free_bytes=_UNKNOWN_BYTES)


def shortage(folder: Path, files: Iterable[tuple[str, int]]) -> str:
    """Why files do not fit on the disk of a folder, as a part of a sentence; empty if they fit.

    Args:
        folder: an existing folder.
        files: the path of each file below the folder, and its size in bytes.

    Raises:
        OSError: the folder cannot be read.
    """
    sizes = dict(files)
    num_blocks = sum(-(-size_bytes // _BLOCK_BYTES) for size_bytes in sizes.values())
    num_folders = _num_folders(sizes)
    needed_bytes = (num_blocks + num_folders) * _BLOCK_BYTES
    num_inodes, room = len(sizes) + num_folders, _room(folder)
    if room.free_bytes < needed_bytes + _SPARE_BYTES:
        return (
            f"{folder} has {format_bytes(room.free_bytes)} free{_LIMITS[room.limit]}, and the files need "
            f"{format_bytes(needed_bytes)}, plus {format_bytes(_SPARE_BYTES)} that must stay free"
        )
    few = room.free_inodes is not None and room.free_inodes < num_inodes + _FEW_INODES
    if few and num_inodes > _FEW_INODES:
        return (
            f"{folder} has {plural(room.free_inodes or 0, 'free inode')}, and the files need {num_inodes}, plus "
            f"{_FEW_INODES} that must stay free"
        )
    return ""


def _num_folders(paths: Iterable[str]) -> int:
    """The number of folders that contain the files.

    The folders are not collected in a set: the paths of deeply nested folders may not fit in memory.
    """
    count, before = 0, list[str]()
    # In this order, the files of a folder follow each other.
    for path in sorted(path.replace("/", "\0") for path in paths):
        folders = path.split("\0")[:-1]
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, folders, strict=False))
        count += len(folders) - len(list(same))
        before = folders
    return count
