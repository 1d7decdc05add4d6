"""A file grows between the moment at which its size is looked at and the end of its reading."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.checkpoint.format import verify as verifying
from safepoint.checkpoint.format.digest import digest_file
from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.remote.verified_upload import SourceFile, upload_verified
from safepoint.errors import SafepointError, StorageError
from safepoint.storage import object_store
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location
from safepoint.storage.store import Content, OpenFile, opened
from tests.support.checkpoints import commit, prepared

_BYTES = 9_000_000
"""More than one chunk."""
_GROWN_BYTES = 1 << 41
"""A sparse file of this size takes no room, and minutes to read."""


def test_no_more_than_its_size_is_read(tmp_path: Path) -> None:
    """Of a file that is larger, one byte more; then its size is wrong, and so it is damaged."""
    (tmp_path / "file").write_bytes(bytes(10_000_000))
    read: list[int] = []
    found = digest_file(tmp_path / "file", read.append, expected_bytes=100)
    assert (found.size_bytes, sum(read)) == (101, 101)
    assert digest_file(tmp_path / "file", expected_bytes=10_000_000) == digest_file(tmp_path / "file")
    assert digest_file(tmp_path / "file", expected_bytes=20_000_000) == digest_file(tmp_path / "file")


def test_while_a_checkpoint_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has the right size when it is listed."""
    folder = commit(prepared(tmp_path / "out"), 10)
    real, read = verifying.compare_listing, list[int]()

    def compare(*args: object, **options: object):
        found = real(*args, **options)  # pyright: ignore[reportArgumentType]
        os.truncate(folder / "model.safetensors", _GROWN_BYTES)
        return found

    monkeypatch.setattr(verifying, "compare_listing", compare)

    def watch(done: int, total: int) -> None:
        read.append(done)
        assert done < 100_000_000, "more is read than the manifest states"

    verdict = verify(folder, progress=watch)
    assert [fault.file for fault in verdict.faults] == ["model.safetensors"]
    assert max(read) < 1_000_000


@pytest.mark.parametrize("is_known", [True, False])
def test_while_it_is_uploaded(tmp_path: Path, is_known: bool) -> None:
    """It never becomes an object, whether or not a manifest states its size."""
    file = tmp_path / "file"
    file.write_bytes(bytes(_BYTES))
    expected = FileEntry.of("file", digest_file(file)) if is_known else None
    sent = 0

    def grow(count: int) -> None:
        nonlocal sent
        sent += count
        assert sent <= _BYTES + 1, "more is sent than the file had"
        os.truncate(file, _GROWN_BYTES)

    store = LocalStore(Location.of_folder(tmp_path / "store"))
    with pytest.raises(SafepointError, match="chang"):
        upload_verified(store, "file", SourceFile("file", file, expected), progress=grow)
    assert not list(store.list())


def test_while_it_is_read_as_a_stream(tmp_path: Path) -> None:
    """A store that takes only streams gets one byte more than the size, which shows that the file has grown."""
    library_bucket = pytest.importorskip("safepoint.storage.library.library_bucket")
    file, sizes = tmp_path / "file", list[int]()
    file.write_bytes(bytes(5000))

    def take(block: memoryview) -> None:
        sizes.append(len(block))
        assert sum(sizes) < 1_000_000

    with opened(file) as one:
        content: Content = getattr(library_bucket, "_content_of")(one)  # noqa: B009  private
        os.truncate(file, _GROWN_BYTES)
        content.write_to(take)
    assert sum(sizes) == 5001


def test_a_small_file_for_one_request(tmp_path: Path) -> None:
    """A file that was small enough for one request is not read into memory as a whole."""
    file = tmp_path / "file"
    file.write_bytes(b"x")
    read: Callable[[OpenFile], bytes] = getattr(object_store, "_read_small")  # noqa: B009  private
    with opened(file) as one:
        assert read(one) == b"x"
        os.truncate(file, _GROWN_BYTES)
        with pytest.raises(StorageError, match="changed while it was uploaded"):
            read(one)
