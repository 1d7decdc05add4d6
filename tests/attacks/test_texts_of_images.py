"""Manifests and names of process images have values that no command expects."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from safepoint.checkpoint.format.sealed_record import seal
from safepoint.errors import ImageError, StorageError
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.materialise import verify
from tests.support.criu_images import add_image


@pytest.fixture
def location(tmp_path: Path) -> ImageLocation:
    found = ImageLocation(tmp_path / "images")
    add_image(found, tmp_path / "dump-1", {100: b"x" * 8192})
    return found


def seal_with(location: ImageLocation, **changes: object) -> None:
    """Write other values into the manifest, also such as `ImageManifest` would refuse."""
    path = location.path("image-1") / "image.json"
    record = {**json.loads(path.read_bytes()), **changes}
    del record["manifest_digest"]
    path.write_bytes(seal(record))


@pytest.mark.parametrize(
    "created", ["", "yesterday", "2026-01-31\x1b09:30:00Z", "9999-12-31T23:59:59-23:59 ", "2026" + "0" * 5000, 7]
)
def test_a_time_that_is_none(location: ImageLocation, created: object) -> None:
    """The list of images computes their ages from it."""
    seal_with(location, created=created)
    with pytest.raises(ImageError, match="created"):
        location.read("image-1")


def test_the_highest_number_of_an_image(location: ImageLocation) -> None:
    """Known before a process is frozen, and not when its memory was stored."""
    (location.folder / "image-999999999").mkdir()
    with pytest.raises(StorageError, match="highest number"), location.writing():
        pass


def test_fields_of_a_later_release(location: ImageLocation, tmp_path: Path) -> None:
    """The digest by which a newer image names an older one covers them, as it does in the later release."""
    seal_with(location, later="a field that this release does not know")
    older = location.read("image-1")
    add_image(location, tmp_path / "dump-2", {100: b"x" * 8192})
    assert verify(location, "image-2", deep=True).sources[0].digest == older.digest
    seal_with(location, later="another value")
    assert location.read("image-1").digest != older.digest
    with pytest.raises(ImageError, match="replaced"):
        verify(location, "image-2", deep=False)


def test_a_changed_manifest_has_a_digest_of_its_own(location: ImageLocation) -> None:
    found = location.read("image-1")
    assert replace(found).to_bytes() == found.to_bytes()
    assert replace(found, number=2).digest != found.digest
