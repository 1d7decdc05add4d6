"""Someone who may create objects, or whose images were copied, puts an image with a high number beside a user's own.

It would be the newest image, and the newest valid one: `prune --keep newest=1` would keep it, and delete all others.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from safepoint.checkpoint.local.retention import parse_policies
from safepoint.errors import StorageError
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location
from safepoint.transparent.images.bucket import ImageBucket
from safepoint.transparent.images.copying import copy, needed_by
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.pruning import prune
from safepoint.transparent.images.store_dump import Dump, store_dumps
from safepoint.transparent.protection.keys import ImageKey
from tests.support.criu_images import MACHINE, add_image, dump, random_pages

_OWN, _OTHER = ImageKey(b"o" * 32), ImageKey(b"x" * 32)


def _bucket(tmp_path: Path, key: ImageKey | None) -> ImageBucket:
    (tmp_path / "fetched").mkdir(exist_ok=True)
    return ImageBucket(LocalStore(Location.of_folder(tmp_path / "images")), tmp_path / "fetched", key)


def _folder(tmp_path: Path, key: ImageKey | None) -> ImageLocation:
    return ImageLocation(tmp_path / "images", key)


@pytest.fixture(params=[_folder, _bucket])
def location(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageLocation:
    """Three images of the user; each is complete in itself."""
    found: ImageLocation = request.param(tmp_path, _OWN)
    monkeypatch.setattr(type(found), "parent", lambda self: [])
    for number in range(3):
        add_image(found, tmp_path / f"dump-{number}", {100: random_pages(number, 4)})
    return found


@pytest.fixture(params=[_OTHER, None], ids=["another key", "no key"])
def planted(request: pytest.FixtureRequest, location: ImageLocation, tmp_path: Path) -> str:
    other = ImageLocation(tmp_path / "others", request.param)
    with other.writing(1000) as image:
        dumped = Dump(folder=dump(tmp_path / "dump", {7: random_pages(9, 2)}), root_pid=7, program="x")
        image.commit(store_dumps(image, [dumped], MACHINE))
    copy(other, *needed_by(other, ["image-1000"]), location)
    return "image-1000"


def test_the_own_newest_one_stays(location: ImageLocation, planted: str) -> None:
    prune(location, parse_policies("newest=1"))
    assert location.names() == [planted, "image-3"]


@pytest.mark.parametrize("key", [None, _OTHER], ids=["no key", "another key"])
def test_an_image_that_only_states_the_own_key(key: ImageKey | None, location: ImageLocation, tmp_path: Path) -> None:
    """On a machine without this key, nothing shows that the owner of the key has not made it. So all of them stay."""
    own = location.read("image-3").protection
    assert own is not None
    other = ImageLocation(tmp_path / "others", _OTHER)
    with other.writing(1000) as image:
        dumped = Dump(folder=dump(tmp_path / "dump", {7: random_pages(9, 2)}), root_pid=7, program="x")
        image.commit(store_dumps(image, [dumped], MACHINE))
    forged = other.read("image-1000")
    assert forged.protection is not None
    forged = replace(forged, protection=replace(forged.protection, key_id=own.key_id))
    (other.folder / "image-1000" / forged.file_name).write_bytes(forged.to_bytes())
    shutil.copytree(other.folder / "image-1000", tmp_path / "images" / "image-1000")
    elsewhere = (_bucket if isinstance(location, ImageBucket) else _folder)(tmp_path, key)
    found = prune(elsewhere, parse_policies("newest=1"))
    assert (found.deleted, found.of_other_keys) == ((), ("image-1000", "image-3", "image-2", "image-1"))
    assert len(location.names()) == 4


def test_what_was_deleted_before_a_failure_is_said(location: ImageLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    delete = location.delete

    def fail(name: str) -> None:
        if name == "image-1":
            raise StorageError("the store does not let you delete it")
        delete(name)

    monkeypatch.setattr(location, "delete", fail)
    found = prune(location, parse_policies("newest=1"))
    assert [one.name for one in found.deleted] == ["image-2"]
    assert found.failed == (("image-1", "the store does not let you delete it"),)
