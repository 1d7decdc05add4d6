"""The sizes, limits and entries of a page file, and the header of its table (docs/process-images.md)."""

import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from safepoint.errors import ImageError

PAGE_BYTES = 4096
REGION_PAGES = 64
REGION_BYTES = REGION_PAGES * PAGE_BYTES
MOST_PAGES = 1 << 31
MOST_FILES = 1 << 16
MOST_PARTS = 1 << 12

ZERO, THIS_IMAGE, FIRST_SOURCE = 0, 1, 2
MOST_SOURCES = 7

RUN = np.dtype([("num_pages", "<u4"), ("image", "<u4"), ("part", "<u4"), ("file", "<u4"), ("first", "<u8")])
"""A sequence of pages that are stored one after another. `image` says where: `ZERO` if all are zero and stored
nowhere, `THIS_IMAGE`, or `FIRST_SOURCE` + k for the older image that the manifest lists at `sources[k]`."""
REGION = np.dtype([("size_bytes", "<u4"), ("digest", "V16")])
DIGEST = np.dtype([("low", "<u8"), ("high", "<u8")])
"""The digest of one page. Digests are only compared for equality. The halves are numbers, so that numpy can compare
them."""
DIGEST_BYTES = 16
REGIONS_HEADER = struct.pack("<8sII", b"SPREGION", 1, 0)

_TABLE_MAGIC = b"SPTABLE\n"
_VERSION = 1
_HEADER = struct.Struct("<8s4I5Q16s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHeader:
    """The header at the beginning of the table of a page file.

    Args:
        file: the N of CRIU's `pages-N.img`.
        seed: the seed of the digests of pages.
        num_pages: all pages of the raw stream, which is the content of `pages-N.img`.
        num_stored: pages that are stored in the regions of this page file.
        num_runs: how many entries of the type `RUN` the table has.
        regions_bytes: the size of the file of regions.
        stream_digest: XXH3-128 of the raw stream, 16 bytes.
    """

    SIZE_BYTES: ClassVar[int] = _HEADER.size
    file: int
    seed: int
    num_pages: int
    num_stored: int
    num_runs: int
    regions_bytes: int
    stream_digest: bytes

    @property
    def num_regions(self) -> int:
        """Entries of the region table."""
        return -(-self.num_stored // REGION_PAGES)

    @property
    def table_bytes(self) -> int:
        """The exact size of the table."""
        runs, regions = self.num_runs * RUN.itemsize, self.num_regions * REGION.itemsize
        return self.SIZE_BYTES + runs + regions + self.num_pages * DIGEST_BYTES + DIGEST_BYTES

    def to_bytes(self) -> bytes:
        """The bytes of the header in the file."""
        return _HEADER.pack(
            _TABLE_MAGIC,
            _VERSION,
            PAGE_BYTES,
            REGION_PAGES,
            self.file,
            self.seed,
            self.num_pages,
            self.num_stored,
            self.num_runs,
            self.regions_bytes,
            self.stream_digest,
        )

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> "TableHeader":
        """Read a header, and check the range of each of its numbers.

        Args:
            data: the first `SIZE_BYTES` bytes of the table.
            name: the name of the file, for messages.

        Raises:
            ImageError: the data are not a header, have another version, or have numbers beyond the limits.
        """
        if len(data) < cls.SIZE_BYTES:
            raise ImageError(f"{name} is too short for a table of pages; it was not used")
        magic, version, page_bytes, region_pages, *numbers, digest = _HEADER.unpack(data[: cls.SIZE_BYTES])
        if magic != _TABLE_MAGIC:
            raise ImageError(f"{name} is not a table of pages; it was not used")
        if version != _VERSION:
            raise ImageError(
                f"{name} has version {version}, and this release reads version {_VERSION}; it was not used",
                hint="use the release of safepoint that wrote it",
            )
        header = cls(
            file=numbers[0],
            seed=numbers[1],
            num_pages=numbers[2],
            num_stored=numbers[3],
            num_runs=numbers[4],
            regions_bytes=numbers[5],
            stream_digest=digest,
        )
        is_sound = (
            (page_bytes, region_pages) == (PAGE_BYTES, REGION_PAGES)
            and header.file < MOST_FILES
            and header.num_stored <= header.num_pages <= MOST_PAGES
            and header.num_runs <= header.num_pages
            and header.regions_bytes <= len(REGIONS_HEADER) + header.num_stored * PAGE_BYTES
        )
        if not is_sound:
            raise ImageError(f"{name} has a header with impossible numbers; it was not used")
        return header
