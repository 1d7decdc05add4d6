"""Reads a page file back into the raw stream of pages, through the page files of older images that it refers to.

Promises: the stream that `restore_pages` writes has the digest that was computed when CRIU had written it, or there
is an `ImageError`. Threads decompress ahead of the write; memory does not depend on the size of the stream.
"""

import itertools
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

from safepoint.errors import ImageError
from safepoint.foundation.files import write_at
from safepoint.transparent.packages import require_packages
from safepoint.transparent.pages.layout import PAGE_BYTES, REGION_PAGES, ZERO
from safepoint.transparent.pages.regions import RegionFile
from safepoint.transparent.pages.table import PageFileId, PageTable, pieces

_NUM_CACHED = 32
"""How many decompressed regions of 256 KiB are kept: pages that equal older ones often come from a few in turn."""
_NUM_AHEAD = 64
_ZEROS = bytes(REGION_PAGES * PAGE_BYTES)


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
        ImageError: stored pages were altered, or the stream differs from the one that CRIU wrote.
        MissingExtraError: the extra `transparent` is not installed.
        OSError: the file cannot be written.
    """
    offset = 0
    writing: deque[Future[None]] = deque()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="safepoint-write") as pool:
        for pages in _checked(table, files, progress):
            if pages.obj is not _ZEROS:
                writing.append(pool.submit(write_at, descriptor, pages, offset))
            if len(writing) > _NUM_AHEAD:
                writing.popleft().result()
            offset += len(pages)
        for one in writing:
            one.result()
    os.ftruncate(descriptor, offset)


def check_pages(
    table: PageTable, files: Mapping[PageFileId, RegionFile], *, progress: Callable[[int], None] | None = None
) -> None:
    """Read the raw stream of a page file, and compare its digest; see `restore_pages`. Nothing is written."""
    for _ in _checked(table, files, progress):
        pass


def _checked(
    table: PageTable, files: Mapping[PageFileId, RegionFile], progress: Callable[[int], None] | None
) -> Iterator[memoryview]:
    """The pages in order. After the last ones, their digest is compared."""
    require_packages()
    digester = xxhash.xxh3_128()
    for pages in _read_ahead(table, files):
        digester.update(pages)
        yield pages
        if progress is not None:
            progress(len(pages))
    if digester.digest() != table.header.stream_digest:
        raise ImageError(f"the pages of {table.name} are not those that were stored: their digest does not match")


def _read_ahead(table: PageTable, files: Mapping[PageFileId, RegionFile]) -> Iterator[memoryview]:
    """The pages in order. Regions are read and decompressed in other threads, some pieces ahead."""
    cache: OrderedDict[tuple[PageFileId, int], Future[bytes]] = OrderedDict()
    waiting: deque[tuple[Future[bytes] | None, int, int]] = deque()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="safepoint-regions") as pool:

        def region_of(key: PageFileId, number: int) -> Future[bytes]:
            future = cache.get((key, number))
            if future is None:
                future = cache[key, number] = pool.submit(files[key].read, number)
                if len(cache) > _NUM_CACHED:
                    cache.popitem(last=False)
            else:
                cache.move_to_end((key, number))
            return future

        found = pieces(table)
        while True:
            for key, first, num_pages in itertools.islice(found, _NUM_AHEAD - len(waiting)):
                begin = first % REGION_PAGES * PAGE_BYTES
                future = None if key.image == ZERO else region_of(key, first // REGION_PAGES)
                waiting.append((future, begin, begin + num_pages * PAGE_BYTES))
            if not waiting:
                return
            future, begin, end = waiting.popleft()
            yield memoryview(_ZEROS if future is None else future.result())[begin:end]
