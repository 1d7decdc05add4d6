"""Where the raw pages of processes are kept for a while: in memory if there is room, otherwise on a disk."""

import contextlib
import os
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from safepoint.errors import StorageError
from safepoint.foundation.temporary_folders.places import may_be_replaced
from safepoint.foundation.units import format_bytes
from safepoint.foundation.volumes.needed import free_bytes
from safepoint.snapshot.memory import host_memory
from safepoint.transparent.secret_folders import secret_folder

_MEMORY = Path("/dev/shm")
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """A folder for raw pages.

    Args:
        folder: an empty folder that only this user can open.
        is_in_memory: whether it is in memory (tmpfs).
    """

    folder: Path
    is_in_memory: bool


@contextlib.contextmanager
def staging(num_bytes: int, disk: Path) -> Generator[Staging]:
    """Make a folder with room for `num_bytes`, and delete it when the `with` block ends.

    Args:
        num_bytes: how much will be written to it.
        disk: an existing folder to use if memory has no room.

    Raises:
        StorageError: neither memory nor the disk has enough room.
    """
    room = host_memory.look()
    is_in_memory = (
        os.path.isdir(_MEMORY)
        and not may_be_replaced(_MEMORY, by_everyone=True)  # another user could get the pages
        and room is not None
        and room.has(num_bytes)
        and shutil.disk_usage(_MEMORY).free >= num_bytes + _SPARE_BYTES
    )
    if not is_in_memory and free_bytes(disk) < num_bytes + _SPARE_BYTES:
        raise StorageError(
            f"memory and {disk} have no room for the pages of the processes, up to {format_bytes(num_bytes)}; "
            "nothing was frozen or restored",
            hint="free some space, or name another folder",
        )
    with secret_folder(_MEMORY if is_in_memory else disk, "safepoint-image-") as folder:
        yield Staging(folder=folder, is_in_memory=is_in_memory)
