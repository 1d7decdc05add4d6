"""Copies images to another location, together with the images that they need.

Promises: each copy appears whole or not at all. Its files have the same bytes as the files at the source, so no
key is needed to copy an image. Nothing at the target is replaced. An image is copied after the images that it needs.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from safepoint.checkpoint.format.digest import FileDigester
from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.checkpoint.remote.fetch import check_room
from safepoint.errors import ConflictError, ImageError
from safepoint.foundation.shared_folders import no_links
from safepoint.foundation.shared_folders.opening import copy_at_most, open_regular
from safepoint.transparent.images.location import ImageLocation, Progress
from safepoint.transparent.images.manifest import ImageManifest
from safepoint.transparent.images.names import number_of, part_name


def needed_by(source: ImageLocation, names: Iterable[str]) -> list[ImageManifest]:
    """These images and the images that they need, oldest first.

    Raises:
        ImageError: one of these images is damaged.
    """
    found: dict[str, ImageManifest] = {}
    for name in names:
        for one in source.chain(source.read(name)):
            faults = source.faults(one)
            if faults:
                raise ImageError(f"{source.where(one.name)} is damaged: {faults[0]}; nothing was copied")
            found[one.name] = one
    return sorted(found.values(), key=lambda one: one.number)


def check_free(images: Iterable[ImageManifest], target: ImageLocation) -> list[ImageManifest]:
    """Which of the images are not at the target yet.

    Raises:
        ConflictError: the target has another image of the same name.
    """
    present = set(target.names())
    missing: list[ImageManifest] = []
    for one in images:
        if one.name not in present:
            missing.append(one)
        elif target.manifest_bytes(one.name) != one.to_bytes():
            raise ConflictError(
                f"{target.where()} has another {one.name}; nothing was copied",
                hint="copy to another location, or move that image away first",
            )
        elif faults := target.faults(one):
            raise ConflictError(
                f"{target.where(one.name)} is a damaged copy of this image: {faults[0]}; nothing was copied",
                hint="delete it, then copy again",
            )
    return missing


def copy(
    source: ImageLocation, manifest: ImageManifest, target: ImageLocation, *, progress: Progress | None = None
) -> None:
    """Copy one image. The caller has copied the images that it needs.

    Args:
        source: where the image is.
        manifest: the image; see `needed_by`.
        target: where it will be, under the same name.
        progress: called with the number of bytes that were copied since the last call.

    Raises:
        ImageError: the image is damaged.
        ConflictError: another process writes to the target.
        StorageError: the target cannot be written, or its disk has too little free space.
        OSError: the target cannot be written.
    """
    with source.leased([manifest.name]):
        source.fetch(manifest, lambda _: True)
        with target.writing(number_of(manifest.name)) as image:
            check_room(
                image.folder,
                ((entry.path, entry.size_bytes) for entry in manifest.files),
                consequence=f"{manifest.name} was not copied",
                hint="free some space; for an object store, set TMPDIR to a folder on a larger disk",
            )
            for number in range(len(manifest.parts)):
                no_links.make_folder(image.folder / part_name(number), 0o700)
            for entry in manifest.files:
                _copy_file(source.path(manifest.name) / entry.path, image.folder / entry.path, entry, progress)
            image.commit(manifest)


def _copy_file(source: Path, target: Path, entry: FileEntry, progress: Progress | None) -> None:
    digester = FileDigester()
    descriptor = no_links.create_file(target, 0o600)
    with os.fdopen(descriptor, "wb") as copied, open_regular(source) as file:

        def write(piece: bytes) -> None:
            copied.write(piece)
            digester.update(memoryview(piece))
            if progress is not None:
                progress(len(piece))

        copy_at_most(file, write, entry.size_bytes)  # if the file has grown, its digest does not match
    if FileEntry.of(entry.path, digester.result()) != entry:
        raise ImageError(f"{source} was altered after it was written: its digest does not match; it was not copied")
