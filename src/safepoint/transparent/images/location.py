"""The images in a folder, and the chains that they form.

Promises: a folder is an image when its name is `image-N` and its manifest has this number; a chain that `chain`
returns has the very images that the newest one names. One writer at a time.

Images are written and restored by root. Another user who could write to the folder could read the memory in an image,
lead root's writes to other files, or let root restore another program. So both are refused in such a folder. Reading
an image executes nothing, and is allowed in every folder.
"""

import contextlib
import os
import stat
import uuid
from collections.abc import Generator
from pathlib import Path

from safepoint.checkpoint.commit import FolderDestination, commit
from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.checkpoint.format.sealed_record import MAX_RECORD_BYTES
from safepoint.checkpoint.format.verify import Fault, compare_listing, list_files
from safepoint.errors import ConflictError, ImageError, NothingValidError, StorageError, UsageError
from safepoint.foundation import files
from safepoint.foundation.files import FolderLock
from safepoint.foundation.processes import is_seeing_all
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.opening import read_regular
from safepoint.foundation.shared_folders.temporary import may_be_replaced
from safepoint.transparent.images.manifest import (
    MANIFEST_NAME,
    MOST_CHAIN,
    MOST_NUMBER,
    ImageManifest,
    Source,
    image_name,
    number_of,
)

_CONTROL = Path(no_links.CONTROL) / "images"
_PRIVATE = 0o700


class ImageLocation:
    """A folder that holds images."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def names(self) -> list[str]:
        """The names of the images, newest first. They need not be valid."""
        try:
            found = [name for name in os.listdir(self.folder) if number_of(name) is not None]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be listed: {error.strerror}") from error
        return sorted(found, key=lambda name: number_of(name) or 0, reverse=True)

    def newest(self) -> str:
        """The name of the newest image.

        Raises:
            NothingValidError: there is no image.
        """
        names = self.names()
        if not names:
            raise NothingValidError(f"there is no process image in {self.folder}")
        return names[0]

    def path(self, name: str) -> Path:
        """The folder of an image."""
        return self.folder / name

    def read(self, name: str) -> ImageManifest:
        """Read the manifest of an image.

        Raises:
            ImageError: there is no valid manifest, or it belongs to another image.
        """
        path = self.path(name)
        if path.is_symlink():
            raise ImageError(f"{path} is a link; it was not used")
        try:
            manifest = ImageManifest.from_bytes(read_regular(path / MANIFEST_NAME, MAX_RECORD_BYTES))
        except OSError as error:
            raise ImageError(f"{path / MANIFEST_NAME} cannot be read: {error.strerror}") from error
        except ImageError as error:
            raise ImageError(f"{path / MANIFEST_NAME} is invalid: {error.message}", hint=error.hint) from error
        if manifest.name != name:
            raise ImageError(f"{path} holds the manifest of {manifest.name}; it was not used")
        return manifest

    def chain(self, manifest: ImageManifest) -> list[ImageManifest]:
        """The image and the images that store pages of it, newest first.

        Raises:
            ImageError: one of them is missing, was replaced, or has another seed.
        """
        found = [manifest]
        for source in manifest.sources:
            older = self.read(source.name)
            if older.digest != source.digest or older.seed != manifest.seed:
                raise ImageError(
                    f"{self.path(source.name)} is not the image whose pages {manifest.name} needs: it was replaced",
                    hint="restore it from a backup, or use another image",
                )
            found.append(older)
        return found

    def faults(self, manifest: ImageManifest) -> list[Fault]:
        """Compare the names and sizes of an image's own files with its manifest. Nothing is read."""
        try:
            found = list_files(self.path(manifest.name))
        except OSError as error:
            return [Fault(file=".", reason=f"it cannot be listed: {error.strerror}")]
        found.pop(MANIFEST_NAME, None)
        return compare_listing(manifest.files, found, extra=True)

    def parent(self) -> list[ImageManifest]:
        """The chain that a new image may continue: that of the newest image.

        None if it is full or invalid, or if another user may have written it.
        """
        for name in self.names()[:1]:
            with contextlib.suppress(ImageError, UsageError, OSError):
                manifest = self.read(name)
                self.check_private(manifest)
                chain = self.chain(manifest)
                if len(chain) < MOST_CHAIN and not any(self.faults(one) for one in chain):
                    return chain
        return []

    def control_folder(self) -> Path:
        """The private folder for temporary files of a restore.

        Raises:
            StorageError: the folder cannot be written to.
            UsageError: others may write to the folder.
        """
        control = self.folder / _CONTROL
        try:
            no_links.make_folders(control, _PRIVATE)
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be written to: {error.strerror}; nothing was done") from error
        _check_private(self.folder)
        _check_private(control)
        return control

    def check_private(self, manifest: ImageManifest) -> None:
        """Check that no other user can have written an image, or the images that it needs.

        Raises:
            UsageError: another user may have written one of them.
            ImageError, OSError: one of them cannot be read.
        """
        for one in self.chain(manifest):
            folder = self.path(one.name)
            for path in (MANIFEST_NAME, *(entry.path for entry in one.files)):
                _check_private((folder / path).parent)
                if _may_be_written(folder / path):
                    raise _of_others(folder / path)

    def _next_number(self) -> int:
        newest = max((number_of(name) or 0 for name in self.names()), default=0)
        if newest >= MOST_NUMBER:
            raise StorageError(
                f"{self.path(image_name(newest))} has the highest number of an image; nothing was frozen",
                hint="move it away if it is no image of yours, or name another folder",
            )
        return newest + 1

    @contextlib.contextmanager
    def writing(self) -> Generator["NewImage"]:
        """Hold the location's lock, and make a working folder for a new image. It is deleted at the end.

        Raises:
            ConflictError: another process writes an image here.
            StorageError: the folder cannot be written to, or no higher number is left.
            UsageError: others may write to the folder.
        """
        control = self.folder / _CONTROL
        try:
            no_links.make_folders(self.folder)
            no_links.make_folders(control, _PRIVATE)
            _check_private(self.folder)
            _check_private(control)
            lock = FolderLock.acquire(control / "lock", {"pid": os.getpid()})
        except BlockingIOError as error:
            raise ConflictError(
                f"another process writes a process image to {self.folder}; nothing was frozen",
                hint="wait for it, or name another folder",
            ) from error
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be written to: {error.strerror}; nothing was frozen") from error
        try:
            if lock is not None:  # what is there was left by a process that has ended
                files.delete_entries(self.folder, no_links.CONTROL, "images", pattern="work-*")
            working = control / f"work-{uuid.uuid4().hex}"
            no_links.make_folder(working, _PRIVATE)
            try:
                yield NewImage(self, working, self._next_number())
            finally:
                files.delete_tree(working)
        finally:
            if lock is not None:
                lock.release()


class NewImage:
    """An image that is being written.

    Args:
        location: where it will be.
        working: the folder for its files.
        number: its number.
    """

    def __init__(self, location: ImageLocation, working: Path, number: int) -> None:
        self.location = location
        self.number = number
        self.working = working
        self.folder = working / "image"
        no_links.make_folder(self.folder, _PRIVATE)

    def commit(self, manifest: ImageManifest) -> None:
        """Make the files count as an image.

        Raises:
            SafepointError, OSError: nothing was committed.
        """
        target = self.location.path(image_name(self.number))
        commit(FolderDestination(self.folder, target, trash=None, is_durable=False), manifest)


def _check_private(folder: Path) -> None:
    """Check that no other user may write to `folder`, or replace it.

    Raises:
        UsageError: another user may.
    """
    if _may_be_written(folder) or may_be_replaced(folder, by_everyone=not is_seeing_all()):
        raise _of_others(folder)


def _may_be_written(path: Path) -> bool:
    """Whether another user may write to a file or a folder. In a container, users and groups trust each other."""
    status = path.stat(follow_symlinks=False)
    if not is_seeing_all():
        return bool(status.st_mode & stat.S_IWOTH)
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)) or status.st_uid not in {os.geteuid(), 0}


def _of_others(path: Path) -> UsageError:
    return UsageError(
        f"{path} or a folder above it belongs to another user, or others may write to it, so they could exchange "
        "what is written or restored here; nothing was done",
        hint="name a folder to which only you may write; copy an image that you trust there",
    )


def source_of(manifest: ImageManifest) -> Source:
    """How a newer image names this one."""
    return Source(name=manifest.name, digest=manifest.digest)


def entries_by_path(manifest: ImageManifest) -> dict[str, FileEntry]:
    """The entries of the manifest's files."""
    return {entry.path: entry for entry in manifest.files}
