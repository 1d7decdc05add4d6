"""A folder that is held open. Files are created and read in it, even if another user renames or replaces it.

`HeldFolder.inside` is a path to the open folder, for any function that takes a path. This path leads to the folder
that was opened, even if something else has its name now. So a link or another folder that gets this name receives no
file.
"""

import contextlib
import errno
import os
import re
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from safepoint.errors import SafepointError, StorageError
from safepoint.foundation.shared_folders import no_links

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldFolder:
    """An open folder.

    Args:
        path: its name when it was opened.
        descriptor: the open folder.
    """

    path: Path
    descriptor: int

    @property
    def inside(self) -> Path:
        """A path to the open folder. It is valid in this process, while the folder is held."""
        return Path(f"/proc/self/fd/{self.descriptor}")

    def check_name(self, name: Path) -> None:
        """Check that `name` is a name of this folder, and not a link.

        Raises:
            StorageError: `name` leads elsewhere.
        """
        if not self.has_name(name):
            raise StorageError(
                f"{name} is no longer the folder that was written or read: another process has replaced it",
                hint="use a folder that only you can write to, inside another folder that only you can write to",
            )

    def has_name(self, name: Path) -> bool:
        """Whether `name` is a name of this folder, and not a link."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.lstat(name), os.fstat(self.descriptor))
        return False


@contextlib.contextmanager
def held(path: Path, *, shown: Path | None = None) -> Generator[HeldFolder]:
    """Hold the folder `path` open.

    Args:
        path: the folder; it may not be a link.
        shown: the path that errors in the `with` block show in place of `HeldFolder.inside`; `path` when None.

    Raises:
        OSError: `path` is a link, is not a folder, or cannot be opened; or /proc is not mounted.
    """
    folder = HeldFolder(path=path, descriptor=no_links.open_file(path, _FLAGS))
    try:
        _check_proc(folder)
        yield folder
    except OSError as error:
        for name in ("filename", "filename2"):
            if getattr(error, name) is not None:
                setattr(error, name, _shown(folder, os.fsdecode(getattr(error, name)), shown or path))
        raise
    except SafepointError as error:
        error.message = _shown(folder, error.message, shown or path)
        raise
    finally:
        os.close(folder.descriptor)


def _check_proc(folder: HeldFolder) -> None:
    if not os.path.isdir(folder.inside):
        what = "/proc is not mounted, and Safepoint needs it to reach an open folder"
        raise OSError(errno.ENOENT, what, os.fspath(folder.path))


def _shown(folder: HeldFolder, text: str, place: Path) -> str:
    return re.sub(rf"{folder.inside}(?!\d)", lambda match: str(place), text)
