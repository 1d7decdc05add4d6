"""Process images on real S3 servers: a chain is written, read, copied and pruned, by one writer at a time."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.checkpoint.local.retention import parse_policies
from safepoint.errors import ConditionError, ConflictError
from safepoint.transparent.images.bucket import Claim, ImageBucket, claims
from safepoint.transparent.images.copying import check_free, copy, needed_by
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.materialise import materialise, verify
from safepoint.transparent.images.pruning import prune
from safepoint.transparent.protection.keys import ImageKey
from tests.support.criu_images import add_image, random_pages, same_files
from tests.support.s3_server import S3Server

_KEY = ImageKey(b"k" * 32)


class Bucket:
    """Opens the same prefix, each time as another process would: with an empty folder of this machine."""

    def __init__(self, server: S3Server, tmp_path: Path) -> None:
        self.store = server.store(f"images-{uuid.uuid4().hex[:8]}")
        self._root = tmp_path
        self._number = 0

    def open(self) -> ImageBucket:
        self._number += 1
        folder = self._root / f"private-{self._number}"
        folder.mkdir()
        return ImageBucket(self.store, folder, _KEY, is_encrypting=True, only_authentic=True)


@pytest.fixture
def bucket(server: S3Server, tmp_path: Path) -> Iterator[Bucket]:
    found = Bucket(server, tmp_path)
    yield found
    for item in list(found.store.list()):
        found.store.delete(item.key)


def test_a_chain_in_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    """Two images of more than one request (16 MiB); copied to a folder; and the older one is not pruned."""
    shared = random_pages(1, 5000)
    for number in (1, 2):
        state = {100: random_pages(number + 10, 3) + shared}
        manifest = add_image(bucket.open(), tmp_path / f"dump-{number}", state)
    assert manifest.num_stored == 3
    assert bucket.open().names() == ["image-2", "image-1"]
    verify(bucket.open(), "image-2", deep=True)
    (tmp_path / "out").mkdir()
    materialise(bucket.open(), "image-2", tmp_path / "out")
    same_files(tmp_path / "dump-2", tmp_path / "out" / "part-0")
    folder = ImageLocation(tmp_path / "copied", _KEY, only_authentic=True)
    source = bucket.open()
    for one in check_free(needed_by(source, ["image-2"]), folder):
        copy(source, one, folder)
    verify(folder, "image-2", deep=True)
    assert prune(bucket.open(), parse_policies("newest=1")).needed == ("image-1",)
    assert claims(bucket.store) == {}


def test_one_writer_of_a_number(bucket: Bucket, tmp_path: Path) -> None:
    """A claim is taken once. A manifest that is there is not replaced, also if its writer has no claim any more."""
    Claim.take(bucket.store, 1)
    with pytest.raises(ConditionError):
        Claim.take(bucket.store, 1)
    with pytest.raises(ConflictError, match="another process"), bucket.open().writing(1):
        pass
    assert add_image(bucket.open(), tmp_path / "dump-1", {100: random_pages(1, 2)}).name == "image-2"
    with pytest.raises(ConflictError, match="another process"):
        prune(bucket.open(), parse_policies("newest=1"))
    bucket.store.delete(".safepoint/images/claims/image-1")
    with pytest.raises(ConflictError, match="has written"):
        commit_third(bucket, tmp_path)
    assert bytes(bucket.store.read("image-3/image.json")) == b"of a writer without a claim"


def commit_third(bucket: Bucket, tmp_path: Path) -> None:
    from safepoint.transparent.images.store_dump import Dump, store_dumps
    from tests.support.criu_images import MACHINE, dump

    with bucket.open().writing(3) as image:
        bucket.store.write("image-3/image.json", b"of a writer without a claim")
        folder = dump(tmp_path / "dump-3", {100: random_pages(3, 2)})
        image.commit(store_dumps(image, [Dump(folder=folder, root_pid=100, program="python")], MACHINE))
