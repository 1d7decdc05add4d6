"""Images: from dumps to a chain and back, and what is refused before CRIU sees it."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from safepoint.checkpoint.format.digest import digest_bytes
from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.errors import ConflictError, ImageError, NothingValidError, StorageError
from safepoint.transparent.images import materialise as materialise_module
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.manifest import MOST_CHAIN, Source
from safepoint.transparent.images.materialise import materialise, verify
from safepoint.transparent.images.store_dump import Dump, store_dumps
from tests.support.criu_images import MACHINE, dump, pagemap, same_files
from tests.support.criu_images import add_image as add
from tests.support.criu_images import random_pages as pages


@pytest.fixture
def location(tmp_path: Path) -> ImageLocation:
    return ImageLocation(tmp_path / "images")


def test_a_chain_comes_back_as_criu_wrote_it(location: ImageLocation, tmp_path: Path) -> None:
    """Three images of two processes. The third is at other addresses, and has the processes exchanged.

    A page is looked for in the image before only: the ten pages that only the first image has are stored again.
    """
    one, two = pages(1, 40), pages(2, 40)
    states = [
        {100: one, 200: two},
        {100: one[: 30 * 4096] + pages(3, 10), 200: two},
        {100: two + pages(4, 2), 200: bytes(4096) + one},
    ]
    found = [add(location, tmp_path / f"dump-{number}", state) for number, state in enumerate(states)]
    assert [manifest.num_stored for manifest in found] == [80, 10, 12]
    assert [[source.name for source in manifest.sources] for manifest in found] == [
        [],
        ["image-1"],
        ["image-2", "image-1"],
    ]
    assert location.names() == ["image-3", "image-2", "image-1"]
    for number, manifest in enumerate(found):
        target = tmp_path / f"restored-{number}"
        target.mkdir()
        assert verify(location, manifest.name, deep=True) == manifest
        assert materialise(location, manifest.name, target) == manifest
        same_files(tmp_path / f"dump-{number}", target / "part-0")
    part = found[0].parts[0]
    assert (part.root_pid, part.program, part.num_processes) == (100, "python", 2)


def test_files_are_private(location: ImageLocation, tmp_path: Path) -> None:
    """They hold the memory of processes."""
    add(location, tmp_path / "dump", {100: pages(1, 3)})
    target = tmp_path / "restored"
    target.mkdir()
    materialise(location, "image-1", target)
    for root in (location.path("image-1"), target):
        for path in root.rglob("*"):
            if path.name != "image.json":
                assert path.stat().st_mode & 0o077 == 0, path
    assert location.path("image-1").stat().st_mode & 0o077 == 0


def test_a_chain_ends_at_its_bound(location: ImageLocation, tmp_path: Path) -> None:
    """Then an image is complete again, with a new seed."""
    state = pages(1, 4)
    found = [add(location, tmp_path / f"dump-{number}", {100: state}) for number in range(MOST_CHAIN + 1)]
    assert [len(manifest.sources) for manifest in found] == [*range(MOST_CHAIN), 0]
    assert found[-1].seed != found[0].seed
    assert found[-1].num_stored == 4


def test_an_image_does_not_continue_a_damaged_chain(location: ImageLocation, tmp_path: Path) -> None:
    """It is complete in itself instead."""
    add(location, tmp_path / "dump-1", {100: pages(1, 4)})
    (location.path("image-1") / "part-0" / "core-100.img").unlink()
    assert not add(location, tmp_path / "dump-2", {100: pages(1, 4)}).sources


def test_one_writer_at_a_time(location: ImageLocation) -> None:
    with location.writing(), pytest.raises(ConflictError, match="another process"), location.writing():
        pass


def test_nothing_is_left_of_an_image_that_fails(location: ImageLocation, tmp_path: Path) -> None:
    """A pagemap that differs from its pages is an error of the dump; what was written is deleted."""
    folder = dump(tmp_path / "dump", {100: pages(1, 4)})
    (folder / "pagemap-100.img").write_bytes(pagemap(1, [(4096, 3)]))
    with pytest.raises(ImageError, match="differ"), location.writing() as image:
        store_dumps(image, [Dump(folder=folder, root_pid=100, program="python")], MACHINE)
    assert location.names() == []
    assert [path.name for path in (location.folder / ".safepoint" / "images").iterdir()] == ["lock"]
    (folder / "pages-1.img").unlink()
    with pytest.raises(ImageError, match="missing"), location.writing() as image:
        store_dumps(image, [Dump(folder=folder, root_pid=100, program="python")], MACHINE)


def test_the_message_names_the_file_that_is_missing(location: ImageLocation, tmp_path: Path) -> None:
    """A process without pages has no file of pages, which is no error: the message does not name this file."""
    folder = dump(tmp_path / "dump", {100: pages(1, 4), 200: pages(2, 4)})
    (folder / "pages-1.img").unlink()
    (folder / "pagemap-100.img").write_bytes(pagemap(1, []))
    (folder / "pages-2.img").unlink()
    with pytest.raises(ImageError, match=r"pages-2\.img is missing"), location.writing() as image:
        store_dumps(image, [Dump(folder=folder, root_pid=100, program="python")], MACHINE)


def test_a_full_target_is_refused_first(
    location: ImageLocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(location, tmp_path / "dump", {100: pages(1, 4)})
    monkeypatch.setattr(materialise_module, "free_bytes", lambda _: 1 << 20)
    with pytest.raises(StorageError, match="nothing was restored"):
        materialise(location, "image-1", tmp_path)
    assert not (tmp_path / "part-0").exists()


@pytest.mark.parametrize("where", ["neighbour", "inside", "image"])
def test_an_error_of_a_file_that_is_written_is_no_fault_of_the_image(
    where: str, location: ImageLocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder whose name begins with the name of the images' folder, or in a folder of its own in there."""
    add(location, tmp_path / "dump", {100: pages(1, 4)})
    target = tmp_path / "images2" if where == "neighbour" else location.folder / "control" / "pages"
    target.mkdir(parents=True)
    path = location.path("image-1") / "part-0" / "x" if where == "image" else target / "part-0" / "pages-1.img"

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(materialise_module, "restore_pages", full)
    with pytest.raises(ImageError if where == "image" else OSError, match="No space left") as caught:
        materialise(location, "image-1", target)
    assert isinstance(caught.value, ImageError) is (where == "image")


def test_an_empty_location(location: ImageLocation) -> None:
    assert location.names() == []
    with pytest.raises(NothingValidError):
        location.newest()
    with pytest.raises(ImageError):
        location.read("image-1")


# ---- hostile images ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ImageLocation:
    root = tmp_path_factory.mktemp("made")
    location = ImageLocation(root / "images")
    one = pages(1, 80)
    add(location, root / "dump-1", {100: one, 200: pages(2, 10)})
    add(location, root / "dump-2", {100: pages(3, 5) + one, 200: bytes(4096) + pages(2, 10)})
    return location


@pytest.fixture
def copied(made: ImageLocation, tmp_path: Path) -> ImageLocation:
    shutil.copytree(made.folder, tmp_path / "copied")
    return ImageLocation(tmp_path / "copied")


def remove(path: Path) -> None:
    path.unlink()


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [remove, link, pipe])
@pytest.mark.parametrize("image", ["image-1", "image-2"])
@pytest.mark.parametrize(
    "name", ["image.json", "part-0/pages-1.table", "part-0/pages-1.regions", "part-0/core-100.img"]
)
def test_files_that_are_not_what_they_should_be(
    copied: ImageLocation, image: str, name: str, change: Callable[[Path], None], tmp_path: Path
) -> None:
    """Also in an image that the chosen one needs: nothing is followed, and nothing blocks."""
    change(copied.path(image) / name)
    with pytest.raises(ImageError):
        verify(copied, "image-2", deep=False)
    with pytest.raises(ImageError):
        materialise(copied, "image-2", tmp_path)


def test_an_older_image_that_was_replaced(copied: ImageLocation, tmp_path: Path) -> None:
    """By another valid image of the same name: its pages are not those of the newer one."""
    other = ImageLocation(tmp_path / "other")
    add(other, tmp_path / "dump", {100: pages(9, 80), 200: pages(8, 10)})
    shutil.rmtree(copied.path("image-1"))
    shutil.copytree(other.path("image-1"), copied.path("image-1"))
    with pytest.raises(ImageError, match="was replaced"):
        verify(copied, "image-2", deep=True)


def test_an_image_under_another_name(copied: ImageLocation) -> None:
    copied.path("image-2").rename(copied.path("image-7"))
    with pytest.raises(ImageError, match="manifest of image-2"):
        verify(copied, "image-7", deep=True)


_ENTRY = FileEntry(path="part-0/core-1.img", size_bytes=1, digest=digest_bytes(b"x"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"files": (replace(_ENTRY, path="part-1/core-1.img"),)}, "'files' must list|no part"),
        ({"files": (replace(_ENTRY, path="core-1.img"),)}, "'files' must list|no part"),
        ({"number": 0}, "number"),
        ({"seed": -1}, "seed"),
        ({"sources": (Source(name="image-2", digest=_ENTRY.digest),)}, "older images"),
        ({"sources": (Source(name="image-1", digest=_ENTRY.digest),) * 2}, "older images"),
        ({"parts": ()}, "1 to"),
    ],
)
def test_a_manifest_checks_its_fields(made: ImageLocation, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(made.read("image-2"), **changes)


@pytest.mark.parametrize(
    "path",
    ["part-0/pages-1.img", "part-0/dump.log", "part-0/pages-9.table", "part-0/x/core-1.img", "part-00/core-1.img"],
)
def test_a_manifest_names_only_files_of_an_image(made: ImageLocation, path: str) -> None:
    manifest = made.read("image-2")
    files = tuple(sorted([*manifest.files, replace(_ENTRY, path=path)], key=lambda entry: entry.path))
    with pytest.raises(ValueError, match=r"'files' must list|is not a file of CRIU|no part"):
        replace(manifest, files=files)


def test_a_source_has_the_name_of_an_image() -> None:
    for name in ("../image-1", "image-0", "checkpoint-1", ""):
        with pytest.raises(ValueError, match="source"):
            Source(name=name, digest=_ENTRY.digest)


def test_a_manifest_that_understates_its_memory(copied: ImageLocation) -> None:
    """The space for the raw pages is computed from it, so pages that are no zeros may not be called zeros."""
    manifest = copied.read("image-2")
    facts = manifest.parts[0].page_files[0]
    assert facts.num_equal > 10
    other = replace(facts, num_equal=facts.num_equal - 10, num_zero=facts.num_zero + 10)
    part = replace(manifest.parts[0], page_files=(other, *manifest.parts[0].page_files[1:]))
    (copied.path("image-2") / "image.json").write_bytes(replace(manifest, parts=(part,)).to_bytes())
    with pytest.raises(ImageError, match="other pages than"):
        verify(copied, "image-2", deep=False)
