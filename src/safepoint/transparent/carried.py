"""Temporary folders of frozen processes, which an image contains because they may be deleted before the restore.

Each folder becomes a tar archive beside CRIU's files. Only the contents of the folder are in the archive, and it is
restored only where nothing is: an archive cannot replace a file. If another user has made a folder in its place, the
processes are not restored, because that user would decide what their files are.
"""

import os
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

from safepoint.errors import FreezeError, ImageError
from safepoint.foundation.shared_folders.temporary import is_private_folder
from safepoint.transparent.images.manifest import MOST_FILE_BYTES

_FOLDER = "safepoint.folder"
_NAMES = "carried-*.img"
_RESERVE_BYTES = 1 << 20


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


def set_down(source: Path) -> list[Path]:
    """Restore the folders that do not exist any more.

    Args:
        source: the folder of a part.

    Returns:
        The folders that were restored.

    Raises:
        ImageError: an archive is invalid, or another user may have made a folder in the place of one; nothing was
            restored.
        OSError: a file cannot be written; nothing was restored.
    """
    restored: list[Path] = []
    try:
        for path in sorted(source.glob(_NAMES)):
            _set_down(path, restored)
    except BaseException as error:
        for folder in restored:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, tarfile.TarError):
            raise ImageError(f"a temporary folder in the image is damaged: {error}; nothing was restored") from error
        raise
    return restored


def _set_down(path: Path, restored: list[Path]) -> None:
    with tarfile.open(path, "r:") as archive:
        folder = Path(archive.pax_headers.get(_FOLDER, ""))
        if not folder.is_absolute() or ".." in folder.parts:
            raise ImageError(f"{path.name} names no folder; nothing was restored")
        try:
            folder.mkdir(0o700)
        except FileExistsError:
            if not is_private_folder(folder):
                raise ImageError(
                    f"the processes need their temporary folder {folder}, and another user may have made what is "
                    "there now; nothing was restored",
                    hint="delete it or move it away, then try again",
                ) from None
            return
        restored.append(folder)
        archive.extractall(folder, filter="data")
