"""A file grows between the moment at which its size is looked at and the end of its reading."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safepoint.checkpoint import commit as committing
from safepoint.checkpoint.format import verify as verifying
from safepoint.checkpoint.format.digest import FileDigest, digest_file
from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.checkpoint.format.verify import verify
from safepoint.checkpoint.local import final_model
from safepoint.checkpoint.local.final_model import adopt_scripts_model, note_end
from safepoint.checkpoint.remote.verified_upload import SourceFile, upload_verified
from safepoint.checkpoint.tools.copy import as_final
from safepoint.errors import ImageError, SafepointError, SaveError, StorageError
from safepoint.foundation.shared_folders import no_links, opening
from safepoint.storage import object_store
from safepoint.storage.local_folder import LocalStore
from safepoint.storage.location import Location
from safepoint.storage.store import Content, OpenFile, opened
from safepoint.transparent.images import copying, store_dump
from safepoint.transparent.images.location import ImageLocation
from tests.support.checkpoints import commit, prepared
from tests.support.criu_images import add_image

_BYTES = 9_000_000
"""More than one chunk."""
_COPY_BYTES = 50_000_000
"""Files grow to this size while they are copied. A copy without a limit would have it, too."""
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


def _grow_before(monkeypatch: pytest.MonkeyPatch, module: object, name: str, path: Path) -> None:
    """Let the file at `path` grow just before `module` calls the function `name`."""
    real: Callable[..., Any] = getattr(module, name)

    def grow(*args: Any, **options: Any) -> Any:
        if path.is_file():
            os.truncate(path, _COPY_BYTES)
        return real(*args, **options)

    monkeypatch.setattr(module, name, grow)


def test_while_it_is_copied_because_it_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room on the disk was checked for the size that it had before."""

    def refused(*paths: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(no_links, "link", refused)
    (tmp_path / "source").write_bytes(b"x" * 5000)
    _grow_before(monkeypatch, committing, "shortage", tmp_path / "source")
    with pytest.raises(OSError, match="grown while it was copied"):
        committing.link_or_copy(tmp_path / "source", tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_while_a_second_name_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit for such a copy holds for the bytes that are copied, and the file keeps its place."""
    monkeypatch.setattr(opening, "_MAX_COPIED_BYTES", 10_000)
    file = tmp_path / "file"
    file.write_bytes(b"x" * 5000)
    os.link(file, tmp_path / "second")
    opened_file = opening.open_file(file, os.O_RDWR)
    os.close(opened_file)
    assert file.stat().st_nlink == 1
    file.unlink()
    os.link(tmp_path / "second", file)
    _grow_before(monkeypatch, no_links, "replace_file", tmp_path / "second")
    with pytest.raises(OSError, match="too large to be copied"):
        os.close(opening.open_file(file, os.O_RDWR))
    assert file.samefile(tmp_path / "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "second"]


def test_while_a_process_image_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy has one byte more than the manifest states, at most."""
    location, target = ImageLocation(tmp_path / "images"), ImageLocation(tmp_path / "target")
    add_image(location, tmp_path / "dump", {100: b"x" * 8192})
    (manifest,) = copying.needed_by(location, ["image-1"])
    largest = max(manifest.files, key=lambda entry: entry.size_bytes)
    copied: list[int] = []
    _grow_before(monkeypatch, copying, "check_room", location.path("image-1") / largest.path)
    with pytest.raises(ImageError, match="altered"):
        copying.copy(location, manifest, target, progress=copied.append)
    assert sum(copied) <= sum(entry.size_bytes for entry in manifest.files) + 1


def test_while_a_dump_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit for files of CRIU holds for the bytes that are stored."""
    source, target = tmp_path / "core-1.img", tmp_path / "stored"
    source.write_bytes(bytes(2_500_000))
    monkeypatch.setattr(store_dump, "_MOST_COPIED_BYTES", 3_000_000)
    copy: Callable[..., object] = getattr(store_dump, "_copy")  # noqa: B009  private
    copy(source, tmp_path / "whole", None)
    assert (tmp_path / "whole").read_bytes() == source.read_bytes()
    _grow_before(monkeypatch, store_dump.ProtectedWriter, "write", source)
    with pytest.raises(ImageError, match="more than 3000000 bytes"):
        copy(source, target, None)
    assert target.stat().st_size <= 3_000_001


def test_while_a_final_model_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is a second name of the script's file. No more is read than it had, and it is not committed."""
    output = prepared(tmp_path / "out")
    manifest = verifying.read_manifest(commit(output, 10))
    end = note_end(output, as_final(manifest))
    (output.root / "config.json").write_bytes(b"{}")
    model = output.root / "model.safetensors"
    model.write_bytes(b"x" * 5000)
    real = final_model.digest_file

    def grow(path: Path, **options: Any) -> FileDigest:
        if path.name == model.name:
            os.truncate(model, _COPY_BYTES)
        return real(path, **options)

    monkeypatch.setattr(final_model, "digest_file", grow)
    with pytest.raises(SaveError, match=r"model\.safetensors"):
        adopt_scripts_model(output, end)
