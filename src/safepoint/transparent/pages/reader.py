"""Reads a page file back into the raw stream of pages, through the page files of older images that it refers to.

Promises: the stream that `restore_pages` writes has the digest of the stream that CRIU wrote. If it has another
digest, `restore_pages` raises `ImageError`. Threads decompress ahead of the write; memory does not depend on the size
of the stream.
"""

import functools
import itertools
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

from safepoint.errors import ImageError
from safepoint.foundation.files import write_at
from safepoint.transparent.packages import require_packages
from safepoint.transparent.pages.layout import PAGE_BYTES, REGION_PAGES, ZERO
from safepoint.transparent.pages.regions import RegionFile
from safepoint.transparent.pages.table import PageFileId, PageTable, pieces

_NUM_CACHED = 32
"""How many decompressed regions of 256 KiB are kept. References to older pages often alternate between a few
regions."""
_NUM_TOGETHER = 8
"""How many pieces of up to 256 KiB a thread reads at a time. One piece would be too little work for a thread
switch."""
_ZEROS = bytes(REGION_PAGES * PAGE_BYTES)
_Piece = tuple[PageFileId, int, int]
"""The page file, the first stored page, and the number of pages."""
_Write = Callable[[memoryview, int], None]
"""Writes pages at an offset of the raw stream."""


def restore_pages(
    table: PageTable,
    files: Mapping[PageFileId, RegionFile],
    descriptor: int,
    *,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write the raw stream of a page file to an empty file. Zero pages become holes.

    Args:
        table: the table of the page file; `PageTable.check_runs` accepted it.
        files: the stored pages of each page file to which the table refers.
        descriptor: an empty file, open for writing.
        progress: called with the number of bytes restored since the last call.

    Raises:
        ImageError: stored pages were altered, or the stream differs from the stream that CRIU wrote.
        MissingExtraError: the extra `transparent` is not installed.
        OSError: the file cannot be written.
    """
    os.ftruncate(descriptor, table.header.num_pages * PAGE_BYTES)
    _read(table, files, functools.partial(write_at, descriptor), progress)


def check_pages(
    table: PageTable, files: Mapping[PageFileId, RegionFile], *, progress: Callable[[int], None] | None = None
) -> None:
    """Read the raw stream of a page file, and compare its digest; see `restore_pages`. Nothing is written."""
    _read(table, files, None, progress)


def _read(
    table: PageTable,
    files: Mapping[PageFileId, RegionFile],
    write: _Write | None,
    progress: Callable[[int], None] | None,
) -> None:
    """Read all pages, and write them if `write` is given. After the last page, compare the digest of all pages."""
    require_packages()
    digester = xxhash.xxh3_128()
    for pages in _read_ahead(table, _Regions(files), write):
        digester.update(pages)
        if progress is not None:
            progress(len(pages))
    if digester.digest() != table.header.stream_digest:
        raise ImageError(f"the pages of {table.name} differ from the pages that were stored: the digest is different")


class _Regions:
    """A cache of the regions that were decompressed last. Several threads may use it at the same time."""

    def __init__(self, files: Mapping[PageFileId, RegionFile]) -> None:
        self._files = files
        self._cache: OrderedDict[tuple[PageFileId, int], bytes | memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def pages(self, piece: _Piece) -> memoryview:
        """The pages of a piece, which lies in one region."""
        key, first, num_pages = piece
        begin = first % REGION_PAGES * PAGE_BYTES
        region = _ZEROS if key.image == ZERO else self._region(key, first // REGION_PAGES)
        return memoryview(region)[begin : begin + num_pages * PAGE_BYTES]

    def _region(self, key: PageFileId, number: int) -> bytes | memoryview:
        with self._lock:
            if (key, number) in self._cache:
                self._cache.move_to_end((key, number))
                return self._cache[key, number]
        found = self._files[key].read(number)
        with self._lock:
            self._cache[key, number] = found
            if len(self._cache) > _NUM_CACHED:
                self._cache.popitem(last=False)
        return found


def _read_ahead(table: PageTable, regions: _Regions, write: _Write | None) -> Iterator[memoryview]:
    """The pages in order. Other threads read, decompress and write pieces in advance."""

    def work(batch: Sequence[_Piece], offset: int) -> list[memoryview]:
        found: list[memoryview] = []
        for piece in batch:
            pages = regions.pages(piece)
            if write is not None and pages.obj is not _ZEROS:
                write(pages, offset)
            offset += len(pages)
            found.append(pages)
        return found

    num_threads = len(os.sched_getaffinity(0))
    waiting: deque[Future[list[memoryview]]] = deque()
    offset = 0
    with ThreadPoolExecutor(num_threads, thread_name_prefix="safepoint-regions") as pool:
        found = pieces(table)
        while batch := tuple(itertools.islice(found, _NUM_TOGETHER)):
            waiting.append(pool.submit(work, batch, offset))
            offset += sum(num_pages for _, _, num_pages in batch) * PAGE_BYTES
            if len(waiting) > 2 * num_threads:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
