"""Where the raw pages of processes are kept for a while: in memory if there is room, otherwise on a disk."""

import contextlib
import logging
import os
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from safepoint.errors import StorageError
from safepoint.foundation.files import delete_tree
from safepoint.foundation.temporary_folders.places import may_be_replaced
from safepoint.foundation.units import format_bytes
from safepoint.foundation.volumes.needed import free_bytes
from safepoint.snapshot.memory import host_memory
from safepoint.transparent.secret_folders import secret_folder
from safepoint.transparent.unnamed_tmpfs import open_unnamed_tmpfs

_LOGGER = logging.getLogger(__name__)
_MEMORY = Path("/dev/shm")
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """The folders for raw pages.

    Args:
        folder: an empty folder that only this user can open.
        pages: the folder for the pages: `folder` itself, or a file system in memory. The path of such a file system
            is valid in this process only; other processes have to inherit a descriptor.
        is_in_memory: whether both are in memory (tmpfs).
    """

    folder: Path
    pages: Path
    is_in_memory: bool


@contextlib.contextmanager
def staging(num_bytes: int, disk: Path) -> Generator[Staging]:
    """Make a folder with room for `num_bytes`, and delete it when the `with` block ends.

    Args:
        num_bytes: how many bytes will be written to the folder.
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
    with (
        secret_folder(_MEMORY if is_in_memory else disk, "safepoint-image-") as folder,
        _huge_pages() if is_in_memory else contextlib.nullcontext() as pages,
    ):
        yield Staging(folder=folder, pages=pages or folder, is_in_memory=is_in_memory)


@contextlib.contextmanager
def _huge_pages() -> Generator[Path | None]:
    """A file system with huge pages, limited to the free space of `/dev/shm`; None if it cannot be made."""
    try:
        descriptor = open_unnamed_tmpfs(shutil.disk_usage(_MEMORY).free)
    except OSError as error:
        _LOGGER.debug("raw pages are written to %s, which is slower: %s", _MEMORY, error)
        yield None
        return
    folder = Path(f"/proc/self/fd/{descriptor}")
    try:
        yield folder
    finally:
        # If the processes were restored in a PID namespace of their own, CRIU remains as the first process of this
        # namespace, and keeps the file system open. So closing the descriptor alone would not free the memory.
        try:
            for name in os.listdir(descriptor):
                delete_tree(folder / name)
        finally:
            os.close(descriptor)
