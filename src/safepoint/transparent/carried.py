"""Temporary folders of frozen processes. An image contains them, because they may be deleted before the restore.

Each folder becomes a tar archive beside CRIU's files. The archive has only the contents of the folder. A folder is
restored only if its path does not exist, so an archive cannot replace a file. A folder that another user has made at
this path is refused.
"""

import contextlib
import os
import shutil
import tarfile
from collections.abc import Collection, Generator, Iterable
from pathlib import Path

from safepoint.errors import FreezeError, ImageError, printable
from safepoint.foundation.shared_folders.ownership import is_planted
from safepoint.foundation.temporary_folders.abandoned import kept
from safepoint.transparent.images.manifest import MOST_FILE_BYTES

_FOLDER = "safepoint.folder"
_NAMES = "carried-*.img"
_RESERVE_BYTES = 1 << 20
_FOLDER_MODE, _FILE_MODE = 0o3777, 0o777
"""The bits of modes that are restored: not setuid, and setgid only of folders."""


def carry(folders: Iterable[Path], target: Path) -> None:
    """Copy folders.

    Args:
        folders: the folders, which must not change meanwhile.
        target: the folder of a part, with CRIU's files.

    Raises:
        FreezeError: a folder has too many bytes.
        OSError: a file cannot be read or written.
    """
    for number, folder in enumerate(folders):
        path = target / f"carried-{number}.img"
        headers = {_FOLDER: str(folder.absolute())}
        with tarfile.open(path, "x", format=tarfile.PAX_FORMAT, pax_headers=headers) as archive:
            archive.add(folder, arcname=".", recursive=False)  # an archive without an entry cannot be read
            for name in sorted(os.listdir(folder)):
                archive.add(folder / name, arcname=name)
        if path.stat().st_size > MOST_FILE_BYTES - _RESERVE_BYTES:
            raise FreezeError(
                f"the temporary folder {folder} is too large for an image; the processes run on, and no image was "
                "made",
                hint="let the program write large files to another folder",
            )


@contextlib.contextmanager
def set_down(source: Path, users: Collection[int] = ()) -> Generator[list[Path]]:
    """Restore the folders that do not exist any more. Until the block ends, no launcher removes one of the folders.

    Args:
        source: the folder of a part.
        users: the users of the processes. A folder that exists may belong to them, to this user, or to root.

    Yields:
        The folders that were restored. If the block raises an exception, they are deleted.

    Raises:
        FreezeError: another user has made one of the folders; nothing was restored.
        ImageError: an archive is invalid; nothing of it was restored.
        OSError: a file cannot be written.
    """
    restored: list[Path] = []
    with contextlib.ExitStack() as stack:
        try:
            for path in sorted(source.glob(_NAMES)):
                _set_down(path, users, restored, stack)
            yield restored
        except BaseException:
            for folder in restored:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _set_down(path: Path, users: Collection[int], restored: list[Path], stack: contextlib.ExitStack) -> None:
    """Restore a folder, note in `restored` that it was made, and keep it until `stack` is closed."""
    try:
        with tarfile.open(path, "r:") as archive:
            folder = Path(archive.pax_headers.get(_FOLDER, ""))
            if not folder.is_absolute() or ".." in folder.parts:
                raise ImageError(f"{path.name} does not name a folder; nothing was restored")
            is_new = not os.path.lexists(folder)
            # Also check a new folder: another user may have made the folder above it, and could replace it.
            if is_planted(folder, users=users):
                raise FreezeError(
                    f"the temporary folder {printable(str(folder))} of the processes, or a folder above it, was made "
                    "by another user; nothing was restored",
                    hint="find out who has made it, and delete it; then try again",
                )
            if not is_new:
                with contextlib.suppress(FileNotFoundError):  # the next launcher has removed it meanwhile
                    stack.enter_context(kept(folder))
                    return
            folder.mkdir(0o700)  # raises an error if another user has made it meanwhile
            restored.append(folder)
            stack.enter_context(kept(folder))
            # Links may lead out of the folder, as links to snapshots in memory do. No file is written through a link.
            archive.extractall(folder, filter=_with_mode, numeric_owner=True)
            # CRIU compares the mode of a folder that a process had open. In a pod with an `fsGroup`, folders inherit
            # the group and the bit setgid from the temporary folder.
            folder.chmod(archive.getmember(".").mode & _FOLDER_MODE)
    except (tarfile.TarError, KeyError) as error:
        raise ImageError(f"{path.name} is damaged: {error}; nothing was restored") from error


def _with_mode(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """As the filter `tar` of tarfile, but with the mode that the file or folder had: CRIU compares modes."""
    safe = tarfile.tar_filter(member, folder)
    return safe.replace(mode=member.mode & (_FOLDER_MODE if member.isdir() else _FILE_MODE), deep=False)
