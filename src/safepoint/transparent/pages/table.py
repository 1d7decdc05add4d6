"""The table of a page file: where each page of a raw stream is stored.

Promises: a table that `PageTable.open` returns matches the digest at its end, and has exactly the size that its
header implies. After `check_runs`, each of its runs lies within the stored pages of a page file that exists. A table
takes 16 bytes for each page. Unless it is encrypted, it is mapped, so the kernel may drop it from memory at any time.
"""

import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from safepoint.errors import ImageError
from safepoint.transparent.pages.layout import (
    DIGEST,
    DIGEST_BYTES,
    PAGE_BYTES,
    REGION,
    REGION_PAGES,
    REGIONS_HEADER,
    RUN,
    THIS_IMAGE,
    ZERO,
    TableHeader,
)
from safepoint.transparent.protection.files import FileProtection, ProtectedFile

_CHUNK_BYTES = 4 << 20
_CHUNK_RUNS = 1 << 16


class PageFileId(NamedTuple):
    """Names one of the page files to which a table may refer.

    Args:
        image: 1 for the image of the table, 2 and higher for its sources, as in an entry of the type `RUN`.
        part: the number of the part.
        file: the N of CRIU's `pages-N.img`.
    """

    image: int
    part: int
    file: int


class PageTable:
    """An open table. `runs`, `regions` and `digests` are arrays of its content, and must not be changed.

    A mapped file takes a file descriptor until the table is deleted. `without_pages` returns a table without a
    descriptor.
    """

    def __init__(self, header: TableHeader, arrays: Sequence[NDArray[Any]], name: str) -> None:
        self.header = header
        self.name = name
        self.runs, self.regions, self.digests = arrays

    @classmethod
    def open(cls, path: Path, protection: FileProtection | None = None) -> "PageTable":
        """Map a table, and check its size, its digest and its regions.

        Args:
            path: the file of the table.
            protection: how the file is protected; None if it is not.

        Raises:
            ImageError: the file is not a table, or was altered.
            OSError: the file cannot be read, is a link, or is not a regular file.
        """
        name = path.name
        with ProtectedFile(path, protection) as file:
            header = TableHeader.from_bytes(file.read(0, min(TableHeader.SIZE_BYTES, file.size_bytes)), name)
            if file.size_bytes != header.table_bytes:
                raise ImageError(
                    f"{name} has {file.size_bytes} bytes, and its header implies {header.table_bytes}; it was not "
                    "used"
                )
            content = file.content()
        _check_digest(content, name)
        position, arrays = header.SIZE_BYTES, list[NDArray[Any]]()
        for kind, number in ((RUN, header.num_runs), (REGION, header.num_regions), (DIGEST, header.num_pages)):
            arrays.append(np.frombuffer(content, kind, number, position))
            position += number * kind.itemsize
        table = cls(header, arrays, name)
        table._check_regions()
        return table

    def _check_regions(self) -> None:
        sizes = self.regions["size_bytes"].astype(np.uint64)
        header = self.header
        most = np.full(len(sizes), REGION_PAGES * PAGE_BYTES, np.uint64)
        if len(most):
            most[-1] = (header.num_stored - (len(sizes) - 1) * REGION_PAGES) * PAGE_BYTES
        if not (sizes > 0).all() or not (sizes <= most).all():
            raise ImageError(f"{self.name} has a region that is empty or larger than its pages; it was not used")
        if len(REGIONS_HEADER) + int(sizes.sum()) != header.regions_bytes:
            raise ImageError(f"{self.name} has regions whose sizes do not add up; it was not used")

    def check_runs(self, num_stored: Mapping[PageFileId, int]) -> tuple[int, int, int]:
        """Check that each run lies within the stored pages of a page file, and count the pages.

        Args:
            num_stored: the number of stored pages of each page file to which this table may refer, its own included.

        Returns:
            How many pages are zero, stored in this image, and equal to pages of its sources.

        Raises:
            ImageError: a run leads to pages that do not exist, or the runs have more or fewer pages than the header.
        """
        num_pages = num_zero = num_own = 0
        for begin in range(0, len(self.runs), _CHUNK_RUNS):
            runs = self.runs[begin : begin + _CHUNK_RUNS]
            num_pages += _count(runs)
            num_zero += _count(runs[runs["image"] == ZERO])
            num_own += _count(runs[runs["image"] == THIS_IMAGE])
            if not runs["num_pages"].all():
                raise ImageError(f"{self.name} has a run without pages; it was not used")
            for place in np.unique(runs[["image", "part", "file"]]):
                key = PageFileId(*map(int, place))
                of_place = runs[
                    (runs["image"] == key.image) & (runs["part"] == key.part) & (runs["file"] == key.file)
                ]
                if not _are_within(of_place, key, num_stored.get(key)):
                    raise ImageError(
                        f"{self.name} refers to pages that do not exist (image {key.image}, part {key.part}, "
                        f"file {key.file}); it was not used"
                    )
        if num_pages != self.header.num_pages:
            raise ImageError(
                f"{self.name} has runs of {num_pages} pages, and its header states {self.header.num_pages}; it was "
                "not used"
            )
        return num_zero, num_own, num_pages - num_zero - num_own

    def page_files(self) -> set[PageFileId]:
        """The page files to which the runs refer. Runs of zero pages refer to a page file that does not exist."""
        return {
            PageFileId(*map(int, place))
            for begin in range(0, len(self.runs), _CHUNK_RUNS)
            for place in np.unique(self.runs[begin : begin + _CHUNK_RUNS][["image", "part", "file"]])
        }

    def without_pages(self) -> "PageTable":
        """A copy in memory that has only the regions of this table. This is enough to read its stored pages."""
        return PageTable(self.header, (self.runs[:0].copy(), self.regions.copy(), self.digests[:0].copy()), self.name)

    def region_offsets(self) -> NDArray[np.uint64]:
        """The offset of each region in the file of regions, and the end of the last region."""
        offsets = np.empty(len(self.regions) + 1, np.uint64)
        offsets[0] = len(REGIONS_HEADER)
        np.cumsum(self.regions["size_bytes"], out=offsets[1:], dtype=np.uint64)
        offsets[1:] += np.uint64(len(REGIONS_HEADER))
        return offsets


def _count(runs: NDArray[Any]) -> int:
    return int(runs["num_pages"].sum(dtype=np.uint64))


def _are_within(runs: NDArray[Any], key: PageFileId, num_stored: int | None) -> bool:
    if key.image == ZERO:
        return key == (ZERO, 0, 0) and not runs["first"].any()
    if num_stored is None or int(runs["first"].max()) > num_stored:
        return False
    # The difference cannot be negative. The sum of `first` and `num_pages` could overflow, so it is not computed.
    return bool((runs["num_pages"] <= np.uint64(num_stored) - runs["first"]).all())


def _check_digest(content: mmap.mmap | bytes, name: str) -> None:
    end = len(content) - DIGEST_BYTES
    with memoryview(content) as view:
        hasher = xxhash.xxh3_128()
        for begin in range(0, end, _CHUNK_BYTES):
            hasher.update(view[begin : min(end, begin + _CHUNK_BYTES)])
        if hasher.digest() != bytes(view[end:]):
            raise ImageError(
                f"{name} was altered after it was written: its own digest does not match; it was not used"
            )


def pieces(table: PageTable) -> Iterator[tuple[PageFileId, int, int]]:
    """The runs of a table in order, cut at the borders of regions: `(page file, first stored page, number of pages)`.

    Zero pages are cut into pieces of a region's size, too. Call `check_runs` first.
    """
    for begin in range(0, len(table.runs), _CHUNK_RUNS):
        for num_pages, image, part, file, first in table.runs[begin : begin + _CHUNK_RUNS].tolist():
            position, end, key = first, first + num_pages, PageFileId(image, part, file)
            while position < end:
                length = min(end - position, REGION_PAGES - position % REGION_PAGES)
                yield key, position, length
                position += length
