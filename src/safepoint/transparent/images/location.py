"""The images of a location, and the chains that they form.

Promises: a folder is an image if its name is `image-N` and its manifest has this number. A chain that `chain` returns
has exactly the images that its newest image names, checked by their digests. Only one process writes at a time.

Root writes and restores images. Another user who could write to the folder could read the memory in an image,
redirect root's writes to other files, or make root restore another program. So images are neither written to nor
restored from a folder to which other users can write. Reading an image executes nothing, and is allowed in every
folder.
"""

import contextlib
import os
import stat
import uuid
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

from safepoint.checkpoint.commit import Destination, FolderDestination, commit
from safepoint.checkpoint.format.sealed_record import MAX_RECORD_BYTES
from safepoint.checkpoint.format.verify import Fault, compare_listing, list_files
from safepoint.errors import ConflictError, ImageError, NothingValidError, StorageError, UsageError
from safepoint.foundation import files
from safepoint.foundation.files import FolderLock
from safepoint.foundation.processes import is_seeing_all
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.leases import Lease, lease_on, reading
from safepoint.foundation.shared_folders.opening import read_regular
from safepoint.foundation.temporary_folders.places import may_be_replaced
from safepoint.transparent.images.manifest import MANIFEST_NAME, MOST_CHAIN, ImageManifest, Source
from safepoint.transparent.images.names import MOST_NUMBER, image_name, number_of
from safepoint.transparent.protection.keys import ImageKey, ImageProtection

Progress = Callable[[int], None]
"""Called with the number of bytes that were moved since the last call."""
_CONTROL = Path(no_links.CONTROL) / "images"
_PRIVATE = 0o700


class ImageLocation:
    """A folder that holds images.

    Args:
        folder: the folder. It need not exist yet.
        key: the key that authenticates images. New images are protected with it. None: new images have no protection,
            and nothing is authenticated.
        is_encrypting: whether new images are encrypted with the key.
        only_authentic: whether images that the owner of `key` has not made are refused.
    """

    def __init__(
        self,
        folder: Path,
        key: ImageKey | None = None,
        *,
        is_encrypting: bool = False,
        only_authentic: bool = False,
    ) -> None:
        self.folder = folder.absolute()
        self.key = key
        self._is_encrypting = is_encrypting
        self._only_authentic = only_authentic

    # ---- reading ----------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names of the images, newest first. They need not be valid."""
        try:
            return newest_first(os.listdir(self.folder))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be listed: {error.strerror}") from error

    def newest(self) -> str:
        """The name of the newest image.

        Raises:
            NothingValidError: there is no image.
        """
        names = self.names()
        if not names:
            raise NothingValidError(f"there is no process image in {self.where()}")
        return names[0]

    def path(self, name: str) -> Path:
        """The folder where the files of an image can be read, after `fetch`."""
        return self.folder / name

    def where(self, name: str = "") -> str:
        """The path or URI of an image, or of the location, for messages."""
        return str(self.folder / name)

    def manifest_bytes(self, name: str) -> bytes:
        """The content of the `image.json` of an image.

        Raises:
            ImageError: the file cannot be read.
        """
        path = self.path(name)
        if path.is_symlink():
            raise ImageError(f"{path} is a link; it was not used")
        try:
            return read_regular(path / MANIFEST_NAME, MAX_RECORD_BYTES)
        except OSError as error:
            raise ImageError(f"{path / MANIFEST_NAME} cannot be read: {error.strerror}") from error

    def read(self, name: str) -> ImageManifest:
        """Read the manifest of an image.

        Raises:
            ImageError: there is no valid manifest, or the manifest belongs to another image or was not made with the
                key.
        """
        where = f"{self.where(name)}/{MANIFEST_NAME}"
        try:
            manifest = ImageManifest.from_bytes(self.manifest_bytes(name))
        except ImageError as error:
            if error.message.startswith(self.where(name)):
                raise
            raise ImageError(f"{where} is invalid: {error.message}", hint=error.hint) from error
        if manifest.name != name:
            raise ImageError(
                f"{self.where(name)} holds the manifest of {manifest.name}, which is another image; "
                f"{name} was not used"
            )
        self._authenticate(manifest)
        return manifest

    def _authenticate(self, manifest: ImageManifest) -> None:
        where, facts = self.where(manifest.name), manifest.protection
        is_own = self.key is not None and facts is not None and facts.key_id == self.key.id
        if is_own and self.key is not None and not manifest.is_signed_by(self.key):
            raise ImageError(
                f"{where} was changed by a program that does not have the image's key; the image was not used"
            )
        if self._only_authentic and not is_own:
            made = "has no protection" if facts is None else f"is protected with another key ({facts.key_id})"
            raise ImageError(
                f"{where} {made}, so another user may have made it; nothing was restored",
                hint="name its key with --key; or use --trust if you trust the person who made the image: its "
                "program will run as you",
            )

    def chain(self, manifest: ImageManifest) -> list[ImageManifest]:
        """The image and the images that store pages of it, newest first.

        Raises:
            ImageError: one of these images is missing, was replaced, or has another seed.
        """
        found = [manifest]
        for source in manifest.sources:
            older = self.read(source.name)
            if older.digest != source.digest or older.seed != manifest.seed:
                raise ImageError(
                    f"{self.where(source.name)} is not the image whose pages {manifest.name} needs: it was replaced",
                    hint="restore it from a backup, or use another image",
                )
            found.append(older)
        return found

    def faults(self, manifest: ImageManifest) -> list[Fault]:
        """Compare the names and sizes of an image's own files with its manifest. No content is read."""
        try:
            found = list_files(self.path(manifest.name))
        except OSError as error:
            return [Fault(file=".", reason=f"it cannot be listed: {error.strerror}")]
        found.pop(MANIFEST_NAME, None)
        return compare_listing(manifest.files, found, extra=True)

    def fetch(
        self, manifest: ImageManifest, is_needed: Callable[[str], bool], *, progress: Progress | None = None
    ) -> None:
        """Make some files of an image readable at `path`. For a folder, this does nothing.

        Args:
            manifest: the image.
            is_needed: whether a file is needed, by its path within the image.
            progress: see `Progress`.

        Raises:
            ImageError: a file is missing, or has another content.
            StorageError: the files cannot be fetched.
        """

    @contextlib.contextmanager
    def leased(self, names: Iterable[str]) -> Generator[None]:
        """While the `with` block runs, `pruning` deletes none of these images."""
        with contextlib.ExitStack() as stack:
            for name in names:
                with contextlib.suppress(OSError):  # the image is gone, and its reader will get an error
                    stack.enter_context(reading(self.path(name) / MANIFEST_NAME))
            yield

    def is_in_use(self, name: str) -> bool:
        """Whether a process reads an image; True if this cannot be found out."""
        return lease_on(self.path(name) / MANIFEST_NAME) is not Lease.NONE

    def protection_of(self, manifest: ImageManifest) -> ImageProtection | None:
        """How the files of an image are protected; None if they are not.

        Raises:
            ImageError: the files are encrypted, and their key is not known.
        """
        facts = manifest.protection
        if facts is None:
            return None
        key = self.key if self.key is not None and self.key.id == facts.key_id else None
        if facts.is_encrypted and key is None:
            raise ImageError(
                f"{self.where(manifest.name)} is encrypted with another key ({facts.key_id}); the image was not used",
                hint="name its key with --key",
            )
        return ImageProtection(salt=bytes.fromhex(facts.salt), is_encrypted=facts.is_encrypted, key=key)

    # ---- writing ----------------------------------------------------------------------------------------------

    def new_protection(self) -> ImageProtection | None:
        """The protection of a new image; None if the location has no key."""
        return None if self.key is None else ImageProtection.new(self.key, is_encrypted=self._is_encrypting)

    def parent(self) -> list[ImageManifest]:
        """The chain that a new image may continue: the chain of the newest image.

        The result is empty if that chain is full or invalid, if another user may have written it, or if its
        protection differs from the protection of new images.
        """
        for name in self.names()[:1]:
            with contextlib.suppress(ImageError, UsageError, OSError):
                manifest = self.read(name)
                self.check_private(manifest)
                chain = self.chain(manifest)
                is_whole = not any(self.faults(one) for one in chain)
                if len(chain) < MOST_CHAIN and is_whole and all(map(self._is_protected_alike, chain)):
                    return chain
        return []

    def _is_protected_alike(self, manifest: ImageManifest) -> bool:
        facts = manifest.protection
        if facts is None or self.key is None:
            return facts is None and self.key is None
        return facts.key_id == self.key.id and facts.is_encrypted == self._is_encrypting

    def control_folder(self) -> Path:
        """The private folder for the lock and for temporary files of freezes and restores. If it is missing, it is
        made.

        Raises:
            StorageError: the folder cannot be written to.
            UsageError: others may write to the folder.
        """
        control = self.folder / _CONTROL
        try:
            no_links.make_folders(self.folder.parent)
            with contextlib.suppress(FileExistsError):
                no_links.make_folder(self.folder, _PRIVATE)  # also without a umask, others may not write to it
            no_links.make_folders(control, _PRIVATE)
            _check_private(self.folder)
            _check_private(control)
        except OSError as error:
            raise self._unusable(error) from error
        return control

    def _unusable(self, error: OSError) -> StorageError:
        return StorageError(f"{self.folder} cannot be written to: {error.strerror}; nothing was done")

    def check_private(self, manifest: ImageManifest) -> None:
        """Check that no other user can have written an image or one of the images that it needs.

        Raises:
            UsageError: another user may have written one of these images.
            ImageError, OSError: one of these images cannot be read.
        """
        for one in self.chain(manifest):
            folder = self.path(one.name)
            for path in (MANIFEST_NAME, *(entry.path for entry in one.files)):
                _check_private((folder / path).parent)
                if _may_be_written(folder / path):
                    raise _of_others(folder / path)

    @contextlib.contextmanager
    def writing(self, number: int | None = None) -> Generator["NewImage"]:
        """Hold the location's lock, and make a working folder for a new image.

        The folder is deleted when the `with` block ends.

        Args:
            number: the number of the image; None for the next one.

        Raises:
            ConflictError: another process writes an image here.
            StorageError: the folder cannot be written to, or no higher number is left.
            UsageError: others may write to the folder.
        """
        with self.locked() as control, self._working(control) as working:
            number = number or self._next_number()
            target = self.path(image_name(number))
            yield NewImage(
                self,
                working,
                number,
                lambda folder: FolderDestination(folder, target, trash=None, is_durable=False),
            )

    def _next_number(self) -> int:
        return next_number(self.where, self.names())

    @contextlib.contextmanager
    def _working(self, control: Path) -> Generator[Path]:
        working = control / f"work-{uuid.uuid4().hex}"
        no_links.make_folder(working, _PRIVATE)
        try:
            yield working
        finally:
            files.delete_tree(working)

    @contextlib.contextmanager
    def locked(self) -> Generator[Path]:
        """Hold the location's lock: no other process writes or deletes images here. Yields the control folder.

        Raises:
            ConflictError: another process holds the lock.
            StorageError: the folder cannot be written to.
            UsageError: others may write to the folder.
        """
        control = self.control_folder()
        try:
            lock = FolderLock.acquire(control / "lock", {"pid": os.getpid()})
        except BlockingIOError as error:
            raise ConflictError(
                f"another process writes or deletes process images in {self.folder}; nothing was done",
                hint="wait for it, or name another folder",
            ) from error
        except OSError as error:
            raise self._unusable(error) from error
        try:
            if lock is not None:  # a process that has ended has left these files
                files.delete_entries(self.folder, no_links.CONTROL, "images", pattern="work-*")
            yield control
        finally:
            if lock is not None:
                lock.release()

    def delete(self, name: str) -> None:
        """Delete an image. At every moment, readers see it completely or not at all. The caller holds the lock.

        Raises:
            OSError: the image cannot be deleted.
        """
        with self._working(self.folder / _CONTROL) as trash:
            files.discard(self.path(name), trash=trash)


class NewImage:
    """An image that is being written.

    Args:
        location: where it will be.
        working: a private folder for temporary files.
        number: its number.
        destination: makes the destination of the commit from the folder with the files.
    """

    def __init__(
        self,
        location: ImageLocation,
        working: Path,
        number: int,
        destination: "Callable[[Path], Destination[ImageManifest]]",
    ) -> None:
        self.location = location
        self.number = number
        self.working = working
        self.folder = working / "image"
        no_links.make_folder(self.folder, _PRIVATE)
        self._destination = destination(self.folder)

    def commit(self, manifest: ImageManifest) -> None:
        """Make the files count as an image.

        Raises:
            SafepointError, OSError: nothing was committed.
        """
        commit(self._destination, manifest)


def next_number(where: Callable[[str], str], names: Iterable[str]) -> int:
    """The number of a new image.

    Args:
        where: see `ImageLocation.where`.
        names: the names that are in use. Names that no image can have are ignored.

    Raises:
        StorageError: there is no higher number.
    """
    newest = max((number_of(name) or 0 for name in names), default=0)
    if newest >= MOST_NUMBER:
        raise StorageError(
            f"{where(image_name(newest))} has the highest number that an image can have; nothing was frozen",
            hint="if it is not your image, move it away; or name another location",
        )
    return newest + 1


def newest_first(names: Iterable[str]) -> list[str]:
    """The names of images among `names`, newest first."""
    return sorted(
        (name for name in names if number_of(name) is not None), key=lambda name: number_of(name) or 0, reverse=True
    )


def _check_private(folder: Path) -> None:
    """Check that no other user may write to `folder`, or replace it.

    Raises:
        UsageError: another user can do that.
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
        hint="name a folder to which only you may write; if you trust an image, copy it to that folder",
    )


def source_of(manifest: ImageManifest) -> Source:
    """The entry with which a newer image refers to the image of `manifest`."""
    return Source(name=manifest.name, digest=manifest.digest)
