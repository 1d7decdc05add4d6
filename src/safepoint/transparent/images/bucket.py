"""The images in an object store (docs/process-images.md).

Promises: an image exists exactly while its `image.json` exists. This file is written last, on the condition that it
does not exist. A writer first claims the number of its image, with an object in `.safepoint/images/claims`, so two
writers never write below one name. If a writer seems dead, another process may take over its claim. The writer then
writes nothing more. Files are fetched to a private folder of this machine, and compared with the digests in the
manifest.

The claim lists the files of the image, as a mark does (`safepoint.checkpoint.remote.marks`). Only objects that match
the list are deleted, because other programs may keep objects below the name, and another person may have written the
claim. A new image gets a number whose name has no objects yet.
"""

import contextlib
import dataclasses
import json
import os
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path

from safepoint.checkpoint.format.sealed_record import MAX_RECORD_BYTES
from safepoint.checkpoint.format.verify import Fault, compare_listing
from safepoint.checkpoint.remote.fetch import create_files, fetch, windows_of
from safepoint.checkpoint.remote.marks import MAX_MARK_BYTES, Mark
from safepoint.checkpoint.remote.verified_upload import SourceFile, upload_verified
from safepoint.errors import (
    CheckpointError,
    ConditionError,
    ConflictError,
    ImageError,
    ObjectNotFoundError,
    SafepointError,
)
from safepoint.foundation import clock
from safepoint.storage.store import ABSENT, Condition, Store, StoredObject
from safepoint.transparent.images.location import ImageLocation, NewImage, Progress, newest_first, next_number
from safepoint.transparent.images.manifest import MANIFEST_NAME, ImageManifest
from safepoint.transparent.images.names import image_name, number_of
from safepoint.transparent.protection.keys import ImageKey

CLAIMS = ".safepoint/images/claims"
CLAIM_LIVES_S = 24 * 3600.0
"""The writer of a claim that is older than this counts as dead."""
_NUM_TRIES = 20


class ImageBucket(ImageLocation):
    """The images below a prefix of an object store.

    Args:
        store: the store at the location.
        folder: an existing private folder of this machine, to which files are fetched, and in which new images are
            written before they are uploaded.
        key, is_encrypting, only_authentic: see `ImageLocation`.
        progress: called with the number of bytes that were uploaded since the last call.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        key: ImageKey | None = None,
        *,
        is_encrypting: bool = False,
        only_authentic: bool = False,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(folder, key, is_encrypting=is_encrypting, only_authentic=only_authentic)
        self._store = store
        self._progress = progress
        self._fetched: set[tuple[str, str]] = set()

    def names(self) -> list[str]:
        """See `ImageLocation`."""
        found = (item.key.partition("/") for item in self._store.list())
        return newest_first(name for name, _, path in found if path == MANIFEST_NAME)

    def where(self, name: str = "") -> str:
        """See `ImageLocation`."""
        return str(self._store.location.child(name) if name else self._store.location)

    def manifest_bytes(self, name: str) -> bytes:
        """See `ImageLocation`."""
        key = f"{name}/{MANIFEST_NAME}"
        try:
            size_bytes = self._store.stat(key).size_bytes
            if size_bytes > MAX_RECORD_BYTES:
                raise ImageError(f"{self.where(name)}/{MANIFEST_NAME} has more than {MAX_RECORD_BYTES} bytes")
            return bytes(self._store.read(key, length=size_bytes))
        except ObjectNotFoundError as error:
            raise ImageError(f"{self.where(name)} has no {MANIFEST_NAME}, so it is not an image") from error

    def faults(self, manifest: ImageManifest) -> list[Fault]:
        """See `ImageLocation`. Other objects below the name are ignored: they are never fetched."""
        begin = len(manifest.name) + 1
        found = {item.key[begin:]: item.size_bytes for item in self._store.list(manifest.name)}
        return compare_listing(manifest.files, found)

    def fetch(
        self, manifest: ImageManifest, is_needed: Callable[[str], bool], *, progress: Progress | None = None
    ) -> None:
        """See `ImageLocation`. Each file is fetched once."""
        name = manifest.name
        entries = [
            entry for entry in manifest.files if is_needed(entry.path) and (name, entry.path) not in self._fetched
        ]
        if not entries:
            return
        try:
            create_files(entries, self.path(name))
            fetch(self._store, name, windows_of(entries), self.path(name), progress=progress)
        except CheckpointError as error:
            raise ImageError(f"{self.where(name)} is damaged: {error.message}", hint=error.hint) from error
        self._fetched |= {(name, entry.path) for entry in entries}

    @contextlib.contextmanager
    def leased(self, names: Iterable[str]) -> Generator[None]:
        """See `ImageLocation`. Objects cannot be locked, so a reader whose image is deleted ends with an error."""
        yield

    def check_private(self, manifest: ImageManifest) -> None:
        """See `ImageLocation`. Other users cannot change what was fetched; a key protects what is in the store."""

    def is_in_use(self, name: str) -> bool:
        """See `ImageLocation`."""
        return False

    @contextlib.contextmanager
    def writing(self, number: int | None = None) -> Generator[NewImage]:
        """See `ImageLocation`. The image is uploaded when it is committed."""
        claim = self._claim_new(number)
        destination: _BucketDestination | None = None

        def into(folder: Path) -> _BucketDestination:
            nonlocal destination
            destination = _BucketDestination(self._store, claim, folder, self._progress)
            return destination

        with self._working(self.control_folder()) as working:
            image = NewImage(self, working, claim.number, into)
            assert destination is not None
            try:
                yield image
            except BaseException:
                destination.discard()
                raise
            claim.release()

    def _claim_new(self, number: int | None) -> "Claim":
        """Claim the number of an image that does not exist: `number`, or the next number if `number` is None."""
        for _ in range(_NUM_TRIES):
            wanted = number or self._next_number()
            try:
                claim = Claim.take(self._store, wanted)
            except ConditionError as error:
                if number is not None:
                    raise self._is_claimed(number) from error
                continue
            # A writer may have committed this image, and released its claim, since the names were listed.
            if image_name(wanted) not in self.names():
                return claim
            claim.release()
            if number is not None:
                break
        raise ConflictError(
            f"other processes write the same images to {self.where()}; nothing was done",
            hint="try again, or name another location",
        )

    def _is_claimed(self, number: int) -> ConflictError:
        return ConflictError(
            f"another process writes or deletes {self.where(image_name(number))}; nothing was done",
            hint="wait for it; if it has died, `safepoint images prune` deletes its files after a day",
        )

    def _next_number(self) -> int:
        # Another program may keep objects below the name of an image, even without a manifest.
        used = {*claims(self._store), *(item.key.partition("/")[0] for item in self._store.list())}
        return next_number(self.where, used)

    @contextlib.contextmanager
    def locked(self) -> Generator[Path]:
        """See `ImageLocation`. Check that no process writes an image, and delete what dead writers have left.

        A process that begins to write afterwards continues the chain of the newest image, which is never deleted.
        """
        for name, item in claims(self._store).items():
            if clock.wall_s() - item.modified_s < CLAIM_LIVES_S:
                raise ConflictError(
                    f"another process writes or deletes {self.where(name)}; nothing was done",
                    hint="wait for it; if it was killed, its files are deleted after a day",
                )
            claim = Claim.take_over(self._store, number_of(name) or 0, item)
            if name not in self.names():
                claim.delete_objects()
            claim.release()
        yield self.control_folder()

    def delete(self, name: str) -> None:
        """See `ImageLocation`."""
        number = number_of(name) or 0
        try:
            claim = Claim.take(self._store, number)
        except ConditionError as error:
            raise self._is_claimed(number) from error
        manifest = ImageManifest.from_bytes(self.manifest_bytes(name))
        claim.renew({entry.path: entry.size_bytes for entry in manifest.files}, are_there=True)
        self._store.delete(f"{name}/{MANIFEST_NAME}")
        claim.delete_objects()
        claim.release()


def claims(store: Store) -> dict[str, StoredObject]:
    """The images that are being written or deleted, or whose writing or deletion was interrupted, by name."""
    found = {item.key.removeprefix(f"{CLAIMS}/"): item for item in store.list(CLAIMS)}
    return {name: item for name, item in found.items() if number_of(name) is not None}


class Claim:
    """The right of this process to write or delete one image. Call `take` to get it.

    Args:
        store: the store at the location.
        number: the number of the image.
        mark: the files that may be deleted.
        condition: the condition on which the object of the claim is written.

    Raises:
        ConditionError: another process has claimed the number.
    """

    def __init__(self, store: Store, number: int, mark: Mark, condition: Condition) -> None:
        self.number = number
        self._store = store
        self._version = ""
        self._mark = mark
        self._write(mark, condition)

    def _write(self, mark: Mark, condition: Condition) -> None:
        self._version = self._store.write(_key(self.number), _content(mark), condition=condition)
        modified_s = self._store.stat(_key(self.number)).modified_s
        self._mark = dataclasses.replace(mark, modified_s=modified_s)

    @classmethod
    def take(cls, store: Store, number: int) -> "Claim":
        """Claim a number.

        Raises:
            ConditionError: another process has claimed the number.
        """
        return cls(store, number, Mark(), ABSENT)

    @classmethod
    def take_over(cls, store: Store, number: int, found: StoredObject) -> "Claim":
        """Take the claim of a dead writer, with the files that the claim lists.

        Args:
            store: the store at the location.
            number: the number of the image.
            found: the object of the claim.

        Raises:
            ConditionError: another process has taken the claim.
        """
        data = store.read(_key(number), length=min(found.size_bytes, MAX_MARK_BYTES)).tobytes()
        left = Mark.parse(data, found.modified_s)
        objects = objects_of(store, number)
        # List the versions of the objects too, because the new claim is younger than the objects.
        mark = left.extended({}, objects, [path for path, item in objects.items() if left.names(path, item)])
        return cls(store, number, mark, Condition(version=found.version))

    def check(self) -> None:
        """Check that no other process has taken the claim.

        Raises:
            ConflictError: another process has taken the claim.
        """
        with contextlib.suppress(ObjectNotFoundError):
            if self._store.stat(_key(self.number)).version == self._version:
                return
        raise self._taken()

    def renew(self, files: Mapping[str, int], *, are_there: bool = False) -> None:
        """Check the claim, renew its time, and list files in it. Listed files may be deleted.

        Args:
            files: path → size in bytes.
            are_there: whether the files exist already, and belong to the image.

        Raises:
            ConflictError: another process has taken the claim.
        """
        found = objects_of(self._store, self.number)
        existing = [path for path, size in files.items() if path in found and found[path].size_bytes == size]
        mark = self._mark.extended(files, found, existing if are_there else ())
        try:
            self._write(mark, Condition(version=self._version))
        except ConditionError as error:
            raise self._taken() from error

    def _taken(self) -> ConflictError:
        return ConflictError(
            f"{self._store.location.child(image_name(self.number))} was not complete after a day, and another "
            "process has deleted its files; there is no image",
            hint="start again",
        )

    def delete_objects(self) -> None:
        """Delete the files that the claim lists (see `Mark`), and unfinished uploads of these files."""
        name = image_name(self.number)
        listed = {f"{name}/{path}" for path in self._mark.sizes}
        self._store.sweep(only=listed.__contains__, keys=listed)
        for path, item in objects_of(self._store, self.number).items():
            if self._mark.names(path, item):
                self._store.delete(f"{name}/{path}")

    def release(self) -> None:
        """Delete the claim. If that fails, `pruning` deletes it after a day."""
        with contextlib.suppress(SafepointError):
            self.check()
            self._store.delete(_key(self.number))


def _key(number: int) -> str:
    return f"{CLAIMS}/{image_name(number)}"


def objects_of(store: Store, number: int) -> dict[str, StoredObject]:
    """The objects below the name of an image, by path."""
    begin = len(image_name(number)) + 1
    return {item.key[begin:]: item for item in store.list(image_name(number))}


def _content(mark: Mark) -> bytes:
    """The content of a claim's object. It is unique, because the version of an object may depend on its content
    only."""
    claim = {"since": clock.utc_now(), "pid": os.getpid(), "unique": uuid.uuid4().hex}
    return json.dumps({**claim, **mark.fields()}).encode()


class _BucketDestination:
    """The prefix of one image; see `safepoint.checkpoint.commit.Destination`."""

    def __init__(self, store: Store, claim: Claim, folder: Path, progress: Progress | None) -> None:
        self._store = store
        self._claim = claim
        self._name = image_name(claim.number)
        self._folder = folder
        self._progress = progress
        self._data = b""
        self._is_left = False
        """Whether there is a manifest. If so, nothing may be deleted."""

    def prepare(self, record: ImageManifest | None) -> None:
        """Upload the files."""
        assert record is not None
        self._claim.renew({entry.path: entry.size_bytes for entry in record.files})
        for entry in record.files:
            file = SourceFile(entry.path, self._folder / entry.path, entry, below=self._folder)
            key = f"{self._name}/{entry.path}"
            upload_verified(self._store, key, file, fence=self._claim.check, progress=self._progress)
        self._data = record.to_bytes()

    def publish(self) -> None:
        """Write the manifest, on the condition that there is none."""
        self._claim.renew({})
        try:
            self._store.write(f"{self._name}/{MANIFEST_NAME}", self._data, condition=ABSENT)
        except ConditionError as error:
            self._is_left = True
            raise ConflictError(
                f"another process has written {self._store.location.child(self._name)}; nothing was committed",
                hint="let one process at a time write there",
            ) from error
        self._is_left = True

    def discard(self) -> None:
        """Delete the uploaded files, unless the image is committed. Files that cannot be deleted now stay claimed."""
        with contextlib.suppress(SafepointError):
            self._claim.check()
            if not self._is_left:
                self._claim.delete_objects()
            self._claim.release()
