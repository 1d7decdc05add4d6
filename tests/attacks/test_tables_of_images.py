"""The table of a process image is wrong: it was damaged, or a stranger has written it, with right digests.

A new image refers to pages of the image before. If the new image repeated what a wrong table says, it could not be
restored, and its processes would have been ended.
"""

import io
import random
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from safepoint.errors import ImageError, StorageError
from safepoint.transparent.images import materialise as materialise_module
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.materialise import materialise, raw_bytes, verify
from safepoint.transparent.pages.older import OlderPages
from safepoint.transparent.pages.table import PageTable
from safepoint.transparent.pages.writer import write_pages
from tests.support.criu_images import add_image, pagemap
from tests.support.hostile_images import Run, forge_table, seal_again

_NUM_PAGES = 64
_MEMORY = random.Random(7).randbytes(_NUM_PAGES * 4096)


@pytest.fixture
def location(tmp_path: Path) -> ImageLocation:
    found = ImageLocation(tmp_path / "images")
    add_image(found, tmp_path / "dump-1", {100: _MEMORY})
    return found


@pytest.mark.parametrize(
    "run",
    [
        pytest.param((10, 1, 0, 1, 0), id="fewer pages than the header"),
        pytest.param((_NUM_PAGES, 0, 0, 0, 0), id="zero pages with other digests"),
        pytest.param((_NUM_PAGES, 1, 0, 1, 1 << 40), id="pages that do not exist"),
        pytest.param((_NUM_PAGES, 2, 0, 1, 0), id="pages of an image that does not exist"),
        pytest.param((_NUM_PAGES, (1 << 32) - 1, 0, 1, 0), id="the highest number of an image"),
    ],
)
def test_a_new_image_repeats_no_wrong_reference(location: ImageLocation, tmp_path: Path, run: Run) -> None:
    """It is complete in itself, and can be restored."""
    forge_table(location.path("image-1") / "part-0/pages-1.table", [run])
    seal_again(location, location.read("image-1"))
    manifest = add_image(location, tmp_path / "dump-2", {100: _MEMORY})
    assert not manifest.sources
    assert verify(location, manifest.name, deep=True).num_stored == _NUM_PAGES


def test_zero_pages_that_have_other_digests_are_stored(location: ImageLocation, tmp_path: Path) -> None:
    """The numbers of a table are right, and it states the digests of other pages for its zero pages."""
    path = location.path("image-1") / "part-0/pages-1.table"
    forge_table(path, [(_NUM_PAGES, 0, 0, 0, 0)])
    table = PageTable.open(path)
    older = OlderPages({(0, 1): table})
    written = write_pages(io.BytesIO(_MEMORY), tmp_path, part=0, file=1, seed=table.header.seed, older=older)
    assert (written.num_stored, written.num_equal) == (_NUM_PAGES, 0)


def test_a_damaged_table_does_not_prevent_the_next_image(location: ImageLocation, tmp_path: Path) -> None:
    """One bit of the table has changed on the disk."""
    path = location.path("image-1") / "part-0/pages-1.table"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    assert not add_image(location, tmp_path / "dump-2", {100: _MEMORY}).sources


def test_the_space_for_the_pages_is_known_before(
    location: ImageLocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table repeats a few stored pages, and the manifest calls the repeated ones zero.

    Zero pages need no space. So the memory of the machine would be full before the end of a stream is reached.
    """
    copies = 1000
    manifest = location.read("image-1")
    (part,) = manifest.parts
    stream = xxhash.xxh3_128()
    for _ in range(copies):
        stream.update(_MEMORY)
    forge_table(
        location.path("image-1") / "part-0/pages-1.table",
        [(_NUM_PAGES, 1, 0, 1, 0)] * copies,
        copies=copies,
        num_pages=_NUM_PAGES * copies,
        stream_digest=stream.digest(),
    )
    num_pages = _NUM_PAGES * copies
    (location.path("image-1") / "part-0/pagemap-100.img").write_bytes(pagemap(1, [(4096, num_pages)]))
    as_zero = replace(part.page_files[0], num_pages=num_pages, num_zero=num_pages - _NUM_PAGES)
    as_equal = replace(part.page_files[0], num_pages=num_pages, num_equal=num_pages - _NUM_PAGES)
    for facts in (as_zero, as_equal):
        seal_again(location, manifest, parts=(replace(part, page_files=(facts,)),))
        with pytest.raises(ImageError, match="other pages than"):
            verify(location, "image-1", deep=False)
    assert raw_bytes(location.read("image-1")) > num_pages * 4096
    monkeypatch.setattr(materialise_module, "check_tables", lambda *_: None)
    monkeypatch.setattr(materialise_module, "free_bytes", lambda _: num_pages * 4096)
    with pytest.raises(StorageError, match="nothing was restored"):
        materialise(location, "image-1", tmp_path)
