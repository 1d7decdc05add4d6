"""Regions: 64 stored pages that are compressed together, and the file that holds them.

A region is one LZ4 block, or its raw bytes where LZ4 saves less than a sixteenth: then reading it back costs nothing.
LZ4 releases Python's global lock, so threads compress and decompress on several processors.
"""

import contextlib
import importlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import xxhash

from safepoint.errors import ImageError
from safepoint.foundation.shared_folders.opening import open_file
from safepoint.transparent.pages.layout import PAGE_BYTES, REGION_PAGES, REGIONS_HEADER
from safepoint.transparent.pages.table import PageTable

_LEAST_SAVED = 16
"""A region is stored compressed if that saves at least one of this many parts."""


def _block() -> Any:
    return importlib.import_module("lz4.block")  # by name, because the package has no types


def compress(pages: memoryview) -> memoryview:
    """The bytes that are stored for the pages of a region: compressed ones, or `pages` itself."""
    packed: bytes = _block().compress(pages, store_size=False)
    return memoryview(packed) if len(packed) <= len(pages) - len(pages) // _LEAST_SAVED else pages


def decompress(stored: bytes, size_bytes: int) -> bytes:
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

    def __init__(self, path: Path, table: PageTable, *, is_kept_open: bool = True) -> None:
        """Open the file of regions at `path`, which `table` describes.

        Args:
            path: the file.
            table: its table.
            is_kept_open: whether the file stays open until `close`. A file that is not is opened for each region,
                because a process may have few descriptors.

        Raises:
            ImageError: it has another size than the table states, or another header.
            OSError: the file cannot be read, is a link, or is not a regular file.
        """
        self.name = path.name
        self._digests = table.regions["digest"]
        self._offsets = table.region_offsets()
        self._num_stored = table.header.num_stored
        self._path = path
        self._kept = open_file(path) if is_kept_open else None
        with self._opened() as descriptor:
            size_bytes = os.fstat(descriptor).st_size
            is_described = (
                size_bytes == table.header.regions_bytes
                and self._read(descriptor, 0, len(REGIONS_HEADER)) == REGIONS_HEADER
            )
        if not is_described:
            self.close()
            raise ImageError(f"{self.name} is not the file of regions that {table.name} describes; it was not used")

    def close(self) -> None:
        """Close the file."""
        if self._kept is not None:
            os.close(self._kept)

    @contextlib.contextmanager
    def _opened(self) -> Generator[int]:
        if self._kept is not None:
            yield self._kept
            return
        descriptor = open_file(self._path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, region: int) -> bytes:
        """The pages of a region; `region` is below the number of regions in the table.

        Raises:
            ImageError: the stored bytes were altered.
        """
        begin, end = int(self._offsets[region]), int(self._offsets[region + 1])
        with self._opened() as descriptor:
            stored = self._read(descriptor, begin, end - begin)
        if xxhash.xxh3_128_digest(stored) != self._digests[region].tobytes():
            raise ImageError(f"region {region} of {self.name} was altered after it was written; it was not used")
        num_pages = min(REGION_PAGES, self._num_stored - region * REGION_PAGES)
        return decompress(stored, num_pages * PAGE_BYTES)

    def _read(self, descriptor: int, offset: int, length: int) -> bytes:
        pieces: list[bytes] = []
        while length:
            piece = os.pread(descriptor, length, offset)
            if not piece:
                raise ImageError(f"{self.name} ends too early; it was not used")
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
