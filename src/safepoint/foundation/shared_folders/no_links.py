"""System calls on paths whose folders another user may replace by links at any time.

`.safepoint` in an output folder, and all folders below it, are Safepoint's own, and never links. If a group may write
to the output folder, its members may replace these folders by links. So for a path through `.safepoint`, the folders
from `.safepoint` on are opened one after the other, and links are not followed. The call is made in the last folder
that was opened. Paths elsewhere may lead through links, for example where a user has linked the output folder to a
larger disk.
"""

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

CONTROL = ".safepoint"
"""The folder with Safepoint's own files in an output folder."""
RECORDS = ("safepoint-manifest.json", "safepoint-part.json")
"""The names of the file that makes a folder a checkpoint, or a node's part of a checkpoint."""
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_IS_LINK = {errno.ENOTDIR, errno.ELOOP}


class Located(NamedTuple):
    """Where to make a system call: a name in an open folder, or a whole path if `folder` is None."""

    name: str
    folder: int | None


@contextlib.contextmanager
def located(path: Path, *, below: Path | None = None) -> Generator[Located]:
    """Open the folder that contains `path`, as the module's description says. Errors name the whole path.

    Args:
        path: the path. Its last part may be a link: the system call decides whether to follow this link.
        below: a folder above `path`; the folders between the two may not be links either.

    Raises:
        OSError: a folder does not exist, or is a link.
    """
    names = _own_names(path, below)
    if not names:
        yield Located(os.fspath(path), None)
        return
    base = Path(*path.parts[: -len(names) - 1])
    with _named(path):
        folder = _opened(base, names)
    try:
        with _named(path):
            yield Located(path.name, folder)
    finally:
        os.close(folder)


def _own_names(path: Path, below: Path | None) -> tuple[str, ...]:
    """The names of the folders above `path` that may not be links."""
    above = path.parts[:-1]
    own = above[len(above) - 1 - above[::-1].index(CONTROL) :] if CONTROL in above else ()
    named = () if below is None else path.relative_to(below).parts[:-1]
    return max(own, named, key=len)


def _opened(base: Path, names: Iterable[str]) -> int:
    folder = os.open(base, _FOLDER)
    for name in names:
        try:
            inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            if error.errno in _IS_LINK:
                raise OSError(error.errno, f"{name} in this path is a link, or is not a folder") from error
            raise
        finally:
            os.close(folder)
        folder = inner
    return folder


@contextlib.contextmanager
def _named(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.filename is None or error.filename in {path.name, *path.parts}:
            error.filename = os.fspath(path)
        raise


def open_file(path: Path, flags: int, mode: int = 0o666, *, below: Path | None = None) -> int:
    """`os.open`. A link at `path` is not followed either."""
    with located(path, below=below) as (name, folder):
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)


def create_file(path: Path, mode: int = 0o666, *, below: Path | None = None) -> int:
    """Create a file, and open it to write; FileExistsError if there is something at `path`, even a link."""
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode, below=below)


def replace_file(
    path: Path, fill: Callable[[BinaryIO], object], mode: int = 0o666, *, below: Path | None = None
) -> None:
    """Write a new file with `fill`, then give it the name `path`. A reader sees the old content or the new one.

    If an error is raised, the new file is deleted.
    """
    working = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with os.fdopen(create_file(working, mode, below=below), "wb") as file:
            fill(file)
        rename(working, path, below=below)
    except BaseException:
        with contextlib.suppress(OSError):
            unlink(working, below=below)
        raise


def make_folders(path: Path, mode: int = 0o777, *, below: Path | None = None) -> None:
    """Create a folder, and the missing folders above it. The folder may exist already.

    Args:
        path: the folder.
        mode: the mode of new folders where links are refused, see `located`. Other new folders have the usual mode.
        below: see `located`.

    Raises:
        OSError: a folder cannot be created, or something else has its name. In `.safepoint` and below `below`, a link
            to a folder is refused, too.
    """
    names = _own_names(path / "x", below)
    if not names:
        path.mkdir(parents=True, exist_ok=True)
        return
    base = Path(*path.parts[: len(path.parts) - len(names)])
    base.mkdir(parents=True, exist_ok=True)
    for number in range(len(names)):
        one = Path(base, *names[: number + 1])
        try:
            make_folder(one, mode, below=base)
        except OSError as error:
            # If another process has deleted the folder since, FileExistsError is raised.
            if isinstance(error, FileExistsError) and os.path.lexists(one) and not _is_folder(one, base):
                raise NotADirectoryError(errno.ENOTDIR, "it is a link, or is not a folder", os.fspath(one)) from error
            if not _is_folder(one, base):
                raise


def _is_folder(path: Path, below: Path) -> bool:
    try:
        os.close(open_file(path, _FOLDER, below=below))
    except OSError:
        return False
    return True


def make_folder(path: Path, mode: int = 0o777, *, below: Path | None = None) -> None:
    """`os.mkdir`."""
    with located(path, below=below) as (name, folder):
        os.mkdir(name, mode, dir_fd=folder)


def rename(source: Path, target: Path, *, below: Path | None = None) -> None:
    """`os.rename`: what is at `target` is replaced. `below` applies to both paths."""
    with located(source, below=below) as old, located(target, below=below) as new:
        os.rename(old.name, new.name, src_dir_fd=old.folder, dst_dir_fd=new.folder)


def link(source: Path, target: Path) -> None:
    """`os.link`: give the file `source`, or the link at `source`, a second name."""
    with located(source) as old, located(target) as new:
        os.link(old.name, new.name, src_dir_fd=old.folder, dst_dir_fd=new.folder, follow_symlinks=False)


def unlink(path: Path, *, below: Path | None = None) -> None:
    """Delete a file or a link. It may be missing."""
    with contextlib.suppress(FileNotFoundError), located(path, below=below) as (name, folder):
        os.unlink(name, dir_fd=folder)
