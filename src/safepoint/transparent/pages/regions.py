"""Regions: 64 stored pages that are compressed together, and the file that holds them.

A region is one LZ4 block, or its raw bytes if LZ4 saves less than a sixteenth: raw bytes need no decompression.
LZ4 releases Python's global lock, so threads compress and decompress on several processors.
"""

import contextlib
import functools
import importlib
from pathlib import Path
from typing import Any

import xxhash

from safepoint.errors import ImageError
from safepoint.transparent.pages.layout import PAGE_BYTES, REGION_PAGES, REGIONS_HEADER
from safepoint.transparent.pages.table import PageTable
from safepoint.transparent.protection.files import FileProtection, ProtectedFile

_LEAST_SAVED = 16
"""A region is stored compressed if compression saves at least this fraction of its bytes: 1/n."""


@functools.cache
def _block() -> Any:
    return importlib.import_module("lz4.block")  # by name, because the package has no types


def compress(pages: memoryview) -> memoryview:
    """The bytes that are stored for the pages of a region: compressed bytes, or `pages` itself."""
    packed: bytes = _block().compress(pages, store_size=False)
    return memoryview(packed) if len(packed) <= len(pages) - len(pages) // _LEAST_SAVED else pages


def decompress(stored: bytes | memoryview, size_bytes: int) -> bytes | memoryview:
    """The pages of a region, from its stored bytes.

    Raises:
        ImageError: the bytes do not decompress to exactly `size_bytes`.
    """
    if len(stored) == size_bytes:
        return stored
    block = _block()
    try:
        pages: bytes = block.decompress(stored, uncompressed_size=size_bytes)
    except block.LZ4BlockError as error:
        raise ImageError(f"a region of pages cannot be decompressed: {error}; it was not used") from error
    if len(pages) != size_bytes:
        raise ImageError(f"a region has {len(pages)} bytes instead of {size_bytes}; it was not used")
    return pages


class RegionFile:
    """The stored pages of one page file, read region by region. Several threads may read at the same time."""

    def __init__(
        self,
        path: Path,
        table: PageTable,
        protection: FileProtection | None = None,
        *,
        is_kept_open: bool = True,
    ) -> None:
        """Open the file of regions that `table` describes.

        Args:
            path: the file.
            table: its table.
            protection: how it is protected.
            is_kept_open: whether the file stays open until `close`. If False, the file is opened for each region,
                because the number of descriptors of a process is limited.

        Raises:
            ImageError: the file is not a file of regions, or has another size than the table states.
            OSError: the file cannot be read, is a link, or is not a regular file.
        """
        self.name = path.name
        self._digests = table.regions["digest"]
        self._offsets = table.region_offsets()
        self._num_stored = table.header.num_stored
        self._place = path, protection
        self._kept = ProtectedFile(path, protection) if is_kept_open else None
        try:
            with self._opened() as file:
                _check_header(file, table)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        if self._kept is not None:
            self._kept.close()

    def _opened(self) -> contextlib.AbstractContextManager[ProtectedFile]:
        return ProtectedFile(*self._place) if self._kept is None else contextlib.nullcontext(self._kept)

    def read(self, region: int) -> bytes | memoryview:
        """The pages of a region; `region` is below the number of regions in the table.

        Raises:
            ImageError: the stored bytes were altered.
        """
        begin, end = int(self._offsets[region]), int(self._offsets[region + 1])
        with self._opened() as file:
            stored = file.view(begin, end - begin)
            is_authentic = file.is_authenticated
        if not is_authentic and xxhash.xxh3_128_digest(stored) != self._digests[region].tobytes():
            raise ImageError(f"region {region} of {self.name} was altered after it was written; it was not used")
        num_pages = min(REGION_PAGES, self._num_stored - region * REGION_PAGES)
        return decompress(stored, num_pages * PAGE_BYTES)


def _check_header(file: ProtectedFile, table: PageTable) -> None:
    header = file.read(0, min(len(REGIONS_HEADER), file.size_bytes))
    if file.size_bytes != table.header.regions_bytes or header != REGIONS_HEADER:
        raise ImageError(f"{file.name} is not the file of regions that {table.name} describes; it was not used")
