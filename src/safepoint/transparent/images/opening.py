"""Opens the images at a location: a folder of this machine, or a prefix of an object store."""

import contextlib
from collections.abc import Generator
from pathlib import Path

from safepoint.errors import UsageError
from safepoint.foundation.temporary_folders.places import private_parent
from safepoint.storage.location import Location, parse_location, resolve_claim
from safepoint.storage.opening import open_store
from safepoint.transparent.images.bucket import ImageBucket
from safepoint.transparent.images.location import ImageLocation, Progress
from safepoint.transparent.images.names import number_of
from safepoint.transparent.protection.keys import ImageKey, own_key, own_key_path, read_key
from safepoint.transparent.secret_folders import secret_folder


def key_of(path: Path | None, *, is_made: bool) -> ImageKey | None:
    """The key in the file `path`, or this user's own key if `path` is None.

    Args:
        path: the file; None for this user's own key.
        is_made: whether to make this user's own key if there is none. If False, the result is None in that case.

    Raises:
        StorageError: the key cannot be read.
    """
    if path is not None:
        return read_key(path)
    return own_key() if is_made or own_key_path().exists() else None


def parse_images(text: str) -> tuple[Location, str | None]:
    """The location of images, and the name of the image if `text` names a single one.

    Raises:
        UsageError: `text` is not a location.
    """
    try:
        location = resolve_claim(parse_location(text))
    except ValueError as error:
        raise UsageError(str(error)) from error
    if location.is_folder:
        location = Location.of_folder(location.folder.absolute())
    return (location.parent, location.name) if number_of(location.name) is not None else (location, None)


@contextlib.contextmanager
def open_images(
    location: Location,
    key: ImageKey | None = None,
    *,
    is_encrypting: bool = False,
    only_authentic: bool = False,
    progress: Progress | None = None,
) -> Generator[ImageLocation]:
    """Open a location. Files that were fetched from an object store are deleted at the end of the `with` block.

    Args:
        location: where the images are.
        key, is_encrypting, only_authentic: see `ImageLocation`.
        progress: called with the number of bytes that were uploaded since the last call.

    Raises:
        StorageError: the object store cannot be used, or there is no folder for temporary files.
    """
    if location.is_folder:
        yield ImageLocation(location.folder, key, is_encrypting=is_encrypting, only_authentic=only_authentic)
        return
    with secret_folder(private_parent(), "safepoint-images-") as folder:
        yield ImageBucket(
            open_store(location),
            folder,
            key,
            is_encrypting=is_encrypting,
            only_authentic=only_authentic,
            progress=progress,
        )
