"""Objects of other programs lie below the name of a process image, or a stranger has written a claim of one."""

import os
from pathlib import Path

import pytest

from safepoint.checkpoint.local.retention import parse_policies
from safepoint.errors import ImageError
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location
from safepoint.transparent.images.bucket import CLAIMS, ImageBucket, claims
from safepoint.transparent.images.pruning import prune
from tests.support.criu_images import add_image


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(Location.of_folder(tmp_path / "bucket"))


@pytest.fixture
def location(store: LocalStore, tmp_path: Path) -> ImageBucket:
    (tmp_path / "fetched").mkdir()
    return ImageBucket(store, tmp_path / "fetched")


def fail_to_freeze(location: ImageBucket) -> int:
    with pytest.raises(RuntimeError), location.writing() as image:
        raise_error()
    return image.number


def raise_error() -> None:
    raise RuntimeError("CRIU failed")


def test_a_failed_freeze_deletes_only_its_own_files(store: LocalStore, location: ImageBucket) -> None:
    """A data set lies below `image-1`."""
    store.write("image-1/cat.png", b"cat")
    assert fail_to_freeze(location) == 2
    assert [item.key for item in store.list()] == ["image-1/cat.png"]


def test_a_failed_upload_deletes_only_its_own_files(
    store: LocalStore, location: ImageBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program begins to write below the name while the image is uploaded."""
    upload = store.upload

    def fail(key: str, *args: object, **kwargs: object) -> None:
        if key.endswith("pstree.img"):
            store.write("image-1/cat.png", b"cat")
            store.write("image-1/part-0/pstree.img", b"a tree of another kind")
            raise RuntimeError("the network is gone")
        upload(key, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(store, "upload", fail)
    with pytest.raises(RuntimeError):
        add_image(location, tmp_path / "dump", {100: b"x" * 4096})
    assert [item.key for item in store.list()] == ["image-1/cat.png", "image-1/part-0/pstree.img"]


@pytest.mark.parametrize("claim", [b"{}", b'{"files": {"cat.png": 3}}', b'{"files": {"cat.png": [3, 4]}}', b"x"])
def test_a_claim_of_a_stranger_deletes_nothing(
    store: LocalStore, location: ImageBucket, tmp_path: Path, claim: bytes
) -> None:
    """The objects are older than the claim, which is a day old."""
    store.write("image-5/cat.png", b"cat")
    store.write(f"{CLAIMS}/image-5", claim)
    for path, days in ((tmp_path / "bucket/image-5/cat.png", 30), (tmp_path / "bucket" / CLAIMS / "image-5", 2)):
        time_s = path.stat().st_mtime - days * 86_400
        os.utime(path, (time_s, time_s))
    prune(location, parse_policies("newest=1"))
    assert [item.key for item in store.list()] == ["image-5/cat.png"]
    assert claims(store) == {}


def test_the_files_of_an_image_are_deleted_only(store: LocalStore, location: ImageBucket, tmp_path: Path) -> None:
    add_image(location, tmp_path / "dump", {100: b"x" * 4096})
    store.write("image-1/notes.txt", b"of a person")
    with location.locked():
        location.delete("image-1")
    assert [item.key for item in store.list()] == ["image-1/notes.txt"]


def test_one_manifest_that_is_too_large_does_not_hide_the_others(
    store: LocalStore, location: ImageBucket, tmp_path: Path
) -> None:
    add_image(location, tmp_path / "dump", {100: b"x" * 4096})
    store.write("image-9/image.json", b"")
    os.truncate(tmp_path / "bucket/image-9/image.json", 70 << 20)
    with pytest.raises(ImageError, match="more than"):
        location.read("image-9")
    assert not prune(location, parse_policies("newest=1")).deleted
