"""How much space the files in a folder occupy on the disk."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the block size of the file system is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupied:
    """What the entries of a folder occupy.

    Args:
        num_bytes: the bytes that are allocated on the disk. For a file with holes, this number is smaller than the
            file's size. For a small file, it is larger.
        num_inodes: files, folders and links.
    """

    num_bytes: int = 0
    num_inodes: int = 0


def occupied(folder: Path) -> Occupied:
    """What `folder` and everything below it occupy; links are not followed.

    A file with several names (hard links) does not count: the space that it occupies is not freed when one name is
    deleted. An entry that cannot be read, or disappears meanwhile, does not count either.
    """
    num_bytes = num_inodes = 0
    for status in _statuses(os.fspath(folder)):
        if stat.S_ISDIR(status.st_mode) or status.st_nlink == 1:
            num_bytes += status.st_blocks * _BLOCK_BYTES
            num_inodes += 1
    return Occupied(num_bytes=num_bytes, num_inodes=num_inodes)


def _statuses(folder: str) -> Iterator[os.stat_result]:
    try:
        yield os.lstat(folder)
    except OSError:
        return
    pending = [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    yield status
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(entry.path)
        except OSError:
            continue
