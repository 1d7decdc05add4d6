"""A stranger's process image states a file of a terabyte, which is a hole on the stranger's disk.

A copy of it would fill the disk of the person who copies it, or the temporary folder.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from safepoint.checkpoint.format.digest import PART_BYTES, digest_bytes, digest_of_parts
from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.errors import StorageError
from safepoint.foundation.volumes import needed
from safepoint.foundation.volumes.room import Room
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location
from safepoint.transparent.images.bucket import ImageBucket
from safepoint.transparent.images.copying import copy, needed_by
from safepoint.transparent.images.location import ImageLocation
from tests.support.criu_images import add_image

_SIZE = 1 << 40


@pytest.fixture
def source(tmp_path: Path) -> ImageLocation:
    found = ImageLocation(tmp_path / "source")
    manifest = add_image(found, tmp_path / "dump", {100: b"x" * 4096})
    path = "part-0/pages-1.regions"
    os.truncate(found.path("image-1") / path, _SIZE)
    parts = (digest_bytes(bytes(PART_BYTES)),) * (_SIZE // PART_BYTES)
    entry = FileEntry(path=path, size_bytes=_SIZE, digest=digest_of_parts(parts), parts=parts)
    changed = replace(manifest, files=tuple(entry if one.path == path else one for one in manifest.files))
    (found.path("image-1") / manifest.file_name).write_bytes(changed.to_bytes())
    return found


@pytest.mark.parametrize("is_bucket", [False, True], ids=["folder", "bucket"])
def test_the_copy_is_refused(
    source: ImageLocation, tmp_path: Path, is_bucket: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needed, "room_of", lambda folder, **_: Room(free_bytes=64 << 30))
    target = ImageLocation(tmp_path / "target")
    if is_bucket:
        (tmp_path / "fetched").mkdir()
        target = ImageBucket(LocalStore(Location.of_folder(tmp_path / "target")), tmp_path / "fetched")
    (image,) = needed_by(source, ["image-1"])
    with pytest.raises(StorageError, match=r"the files need 1\.1 TB.*image-1 was not copied"):
        copy(source, image, target, progress=lambda num_bytes: pytest.fail("it was copied"))
    assert target.names() == []
