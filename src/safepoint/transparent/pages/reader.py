"""Reads a page file back into the raw stream of pages, through the page files of older images that it refers to.

Promises: the stream that `restore_pages` writes has the digest of the stream that CRIU wrote. If it has another
digest, `restore_pages` raises `ImageError`. Large streams are written by several processes. Memory does not
depend on the size of the stream.
"""

import contextlib
import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import xxhash

from safepoint.errors import ImageError
from safepoint.foundation.files import write_at
from safepoint.transparent.packages import require_packages
from safepoint.transparent.pages.forked import forked
from safepoint.transparent.pages.layout import PAGE_BYTES, REGION_PAGES, ZERO
from safepoint.transparent.pages.regions import RegionFile
from safepoint.transparent.pages.table import PageFileId, PageTable, pieces

_NUM_CACHED = 32
"""How many decompressed regions of 256 KiB are kept. References to older pages often alternate between a few
regions."""
_NUM_TOGETHER = 16
"""How many pieces of up to 256 KiB a process writes at a time."""
_MOST_PROCESSES = 8
_LEAST_PAGES = 4096
"""The minimum number of pages that each process writes. For fewer pages, a process would take longer to start than to
write."""
_ZEROS = bytes(REGION_PAGES * PAGE_BYTES)
_Piece = tuple[PageFileId, int, int]
"""The page file, the first stored page, and the number of pages."""
_Files = Mapping[PageFileId, RegionFile]
"""The stored pages of each page file to which a table refers."""


def restore_pages(
    table: PageTable, files: _Files, descriptor: int, *, progress: Callable[[int], None] | None = None
) -> None:
    """Write the raw stream of a page file to an empty file. Zero pages become holes.

    Args:
        table: the table of the page file; `PageTable.check_runs` accepted it.
        files: the stored pages of each page file to which the table refers.
        descriptor: an empty file, open for reading and writing.
        progress: called with the number of bytes restored since the last call.

    Raises:
        ImageError: stored pages were altered, or the stream differs from the stream that CRIU wrote.
        MissingExtraError: the extra `transparent` is not installed.
        StorageError: a process that wrote pages was ended.
        OSError: the file cannot be read or written.
    """
    os.ftruncate(descriptor, table.header.num_pages * PAGE_BYTES)
    num_processes = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)), table.header.num_pages // _LEAST_PAGES)
    _compare(table, _restored(table, files, descriptor, max(1, num_processes)), progress)


def check_pages(table: PageTable, files: _Files, *, progress: Callable[[int], None] | None = None) -> None:
    """Read the raw stream of a page file, and compare its digest; see `restore_pages`. Nothing is written."""
    regions = _Regions(files)
    _compare(table, (regions.pages(piece) for piece in pieces(table)), progress)


def _compare(table: PageTable, stream: Generator[memoryview], progress: Callable[[int], None] | None) -> None:
    """Read the raw stream, and compare its digest with the digest in the table."""
    require_packages()
    digester = xxhash.xxh3_128()
    with contextlib.closing(stream):
        for pages in stream:
            digester.update(pages)
            if progress is not None:
                progress(len(pages))
    if digester.digest() != table.header.stream_digest:
        raise ImageError(f"the pages of {table.name} differ from the pages that were stored: the digest is different")


class _Regions:
    """A cache of the regions that were decompressed last."""

    def __init__(self, files: Mapping[PageFileId, RegionFile]) -> None:
        self._files = files
        self._cache: OrderedDict[tuple[PageFileId, int], bytes | memoryview] = OrderedDict()

    def pages(self, piece: _Piece) -> memoryview:
        """The pages of a piece, which lies in one region."""
        key, first, num_pages = piece
        begin = first % REGION_PAGES * PAGE_BYTES
        region = _ZEROS if key.image == ZERO else self._region(key, first // REGION_PAGES)
        return memoryview(region)[begin : begin + num_pages * PAGE_BYTES]

    def _region(self, key: PageFileId, number: int) -> bytes | memoryview:
        if (key, number) in self._cache:
            self._cache.move_to_end((key, number))
            return self._cache[key, number]
        found = self._files[key].read(number)
        self._cache[key, number] = found
        if len(self._cache) > _NUM_CACHED:
            self._cache.popitem(last=False)
        return found


def _restored(table: PageTable, files: _Files, descriptor: int, num_processes: int) -> Generator[memoryview]:
    """Write all pages, and read them back in their order. With one process, this process writes them itself."""

    def write(process: int) -> Iterator[None]:
        regions = _Regions(files)
        for offset, batch in itertools.islice(_batches(table), process, None, num_processes):
            _write(regions, batch, descriptor, offset)
            yield

    with forked(num_processes, write) if num_processes > 1 else _alone(write(0)) as wait:
        for number, (offset, batch) in enumerate(_batches(table)):
            wait(number % num_processes)
            yield _read_back(descriptor, offset, batch)


@contextlib.contextmanager
def _alone(steps: Iterator[None]) -> Generator[Callable[[int], None]]:
    """As `forked`, but this process does the work."""
    yield lambda _: next(steps)


def _batches(table: PageTable) -> Iterator[tuple[int, tuple[_Piece, ...]]]:
    """The pieces of the stream, some at a time, with their offset in the stream."""
    offset, found = 0, pieces(table)
    while batch := tuple(itertools.islice(found, _NUM_TOGETHER)):
        yield offset, batch
        offset += _num_bytes(batch)


def _num_bytes(batch: Sequence[_Piece]) -> int:
    return sum(num_pages for _, _, num_pages in batch) * PAGE_BYTES


def _write(regions: _Regions, batch: Sequence[_Piece], descriptor: int, offset: int) -> None:
    for piece in batch:
        pages = regions.pages(piece)
        if pages.obj is not _ZEROS:
            write_at(descriptor, pages, offset)
        offset += len(pages)


def _read_back(descriptor: int, offset: int, batch: Sequence[_Piece]) -> memoryview:
    pages = bytearray(_num_bytes(batch))
    done = 0
    while done < len(pages):
        num_read = os.preadv(descriptor, [memoryview(pages)[done:]], offset + done)
        if not num_read:
            raise ImageError("the file of raw pages was cut off by another program; nothing was restored")
        done += num_read
    return memoryview(pages)
