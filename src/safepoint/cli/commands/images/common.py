"""Parts that the commands about process images share: options, the opening of images, and descriptions of images."""

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safepoint.cli.place import find_place
from safepoint.errors import FolderNotFoundError, UsageError
from safepoint.foundation.events.console import ProgressLine
from safepoint.transparent.packages import require_packages

if TYPE_CHECKING:
    from safepoint.transparent.images.location import ImageLocation
    from safepoint.transparent.images.manifest import ImageManifest

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Place = Annotated[
    str, typer.Argument(metavar="LOCATION", help="The images: a folder, or a prefix in an object store.")
]
_OF_CLUSTER = "With --on, also in a claim of the cluster: pvc://claim/path/images, or job:NAME/images."
ReadImage = Annotated[
    str,
    typer.Argument(
        metavar="IMAGE",
        help="An image, such as images/image-3 or s3://bucket/images/image-3; or a location of images, for the "
        f"newest image in it. {_OF_CLUSTER}",
        callback=find_place,
    ),
]
"""An image that a command only reads. The command has the decorator `with_clusters`."""
ReadImages = Annotated[
    str,
    typer.Argument(
        metavar="IMAGE",
        help="An image, such as images/image-3 or s3://bucket/images/image-3; or a location of images, for all "
        f"images in it. {_OF_CLUSTER}",
        callback=find_place,
    ),
]
"""An image, or all images of a location; see `ReadImage`."""
ReadPlace = Annotated[
    str,
    typer.Argument(
        metavar="LOCATION",
        help=f"The images: a folder, or a prefix in an object store. {_OF_CLUSTER}",
        callback=find_place,
    ),
]
"""A location of images that a command only reads; see `ReadImage`."""
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        help="The file with the key of the images, 32 bytes.",
        show_default="your own key, ~/.config/safepoint/images.key",
    ),
]


@contextlib.contextmanager
def opened(
    place: str,
    key: Path | None = None,
    *,
    is_written: bool = False,
    is_encrypting: bool = False,
    only_authentic: bool = False,
    may_be_new: bool = False,
) -> "Generator[tuple[ImageLocation, str | None]]":
    """The location of images, and the name of the image; None in place of the name if `place` names no single
    image.

    Raises:
        FolderNotFoundError: the location is a folder that does not exist, and the command does not make it
            (`is_written` or `may_be_new`).
    """
    require_packages()
    # Not at the top: without numpy, this module must still be importable.
    from safepoint.transparent.images.opening import key_of, open_images, parse_images

    location, name = parse_images(place)
    if location.is_folder and not (is_written or may_be_new or location.folder.is_dir()):
        raise FolderNotFoundError(location.folder)
    used = key_of(key, is_made=is_written)
    with open_images(location, used, is_encrypting=is_encrypting, only_authentic=only_authentic) as images:
        yield images, name


def location_only(place: str) -> str:
    """Return `place` after a check that it is a location of images.

    Raises:
        UsageError: `place` names a single image.
    """
    require_packages()
    from safepoint.transparent.images.opening import parse_images

    if parse_images(place)[1] is not None:
        raise UsageError(
            f"{place} is a single image, and this command needs the location of images",
            hint="give the folder or prefix that contains this image",
        )
    return place


def key_facts(manifest: "ImageManifest", location: "ImageLocation") -> tuple[str | None, str]:
    """The identifier of the key of an image, and a description of the key.

    Without a key, these are None and `none`.
    """
    facts = manifest.protection
    if facts is None:
        return None, "none"
    is_known = location.key is not None and location.key.id == facts.key_id
    return facts.key_id, ("yours" if is_known else "another") + (", encrypted" if facts.is_encrypted else "")


def page_progress(title: str, all_bytes: int | None) -> Callable[[int], None] | None:
    """A function that shows the progress on a terminal; None if `all_bytes` is not known."""
    if all_bytes is None:
        return None
    line, done = ProgressLine(title), 0

    def update(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        line.update(done, all_bytes)

    return update


def document_of(manifest: "ImageManifest", location: "ImageLocation") -> dict[str, Any]:
    """What `--json` prints about an image."""
    from safepoint.transparent.images.materialise import image_document

    return {
        **image_document(manifest, location),
        "key": key_facts(manifest, location)[0],
        "is_encrypted": manifest.is_encrypted,
    }
