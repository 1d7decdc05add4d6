"""Writes a page file: a raw stream of pages becomes `pages-N.regions` and `pages-N.table`.

The stream is read once, in blocks of 4 MiB. Data that grows with the stream (runs, digests) is written to temporary
files and joined at the end, so the memory does not depend on the size of the stream. Other threads compress regions
meanwhile.

Not promised: that the files are durable or committed. `transparent.images` does that.
"""

import contextlib
import os
import tempfile
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from safepoint.checkpoint.format.digest import FileDigest
from safepoint.errors import ImageError
from safepoint.foundation.shared_folders import no_links
from safepoint.transparent.packages import require_packages
from safepoint.transparent.pages.contents import digest_of_zero, digest_pages, find_zero
from safepoint.transparent.pages.layout import (
    DIGEST,
    FIRST_SOURCE,
    MOST_PAGES,
    PAGE_BYTES,
    REGION_BYTES,
    REGION_PAGES,
    REGIONS_HEADER,
    RUN,
    THIS_IMAGE,
    TableHeader,
)
from safepoint.transparent.pages.older import OlderPages
from safepoint.transparent.pages.regions import compress
from safepoint.transparent.protection.files import FileProtection, ProtectedWriter

BLOCK_BYTES = 4 << 20
_MODE = 0o600
_COPY_BYTES = 1 << 20


class PageStream(Protocol):
    """A raw stream of pages, such as an open `pages-N.img`."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Read the next bytes into the buffer, and return their number; 0 at the end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPages:
    """A page file that was written.

    Args:
        num_pages: pages of the stream.
        num_zero: how many of these pages are zeros.
        num_equal: pages that equal a page of an older image.
        num_stored: pages in the regions.
        table: size and digests of `pages-N.table`.
        regions: size and digests of `pages-N.regions`.
    """

    num_pages: int
    num_zero: int
    num_equal: int
    num_stored: int
    table: FileDigest
    regions: FileDigest


def table_name(file: int) -> str:
    """The name of the table that replaces CRIU's `pages-N.img`."""
    return f"pages-{file}.table"


def regions_name(file: int) -> str:
    """The name of the file with the stored pages of CRIU's `pages-N.img`."""
    return f"pages-{file}.regions"


def write_pages(
    source: PageStream,
    folder: Path,
    *,
    part: int,
    file: int,
    seed: int,
    older: OlderPages | None = None,
    protect: Callable[[str], FileProtection | None] = lambda _: None,
    progress: Callable[[int], None] | None = None,
) -> WrittenPages:
    """Read a raw stream of pages to its end, and write its page file.

    Args:
        source: the stream, such as an open `pages-N.img`, at its beginning.
        folder: where the two files are created.
        part: the number of the part of the image.
        file: the N of CRIU's `pages-N.img`.
        seed: the seed of the chain.
        older: the pages of the previous image; None for an image that refers to no other image.
        protect: the protection of a file, by its name.
        progress: called with the number of bytes read since the last call.

    Raises:
        ImageError: the stream does not end with a whole page.
        MissingExtraError: the extra `transparent` is not installed.
        OSError: the stream cannot be read, or the files cannot be written.
    """
    require_packages()
    if older is not None:
        older.begin(part, file)
    buffer = bytearray(BLOCK_BYTES)
    stream = xxhash.xxh3_128()
    with contextlib.ExitStack() as stack:
        name = regions_name(file)
        target = ProtectedWriter(stack.enter_context(_created(folder / name)), protect(name))
        regions = _Regions(target, stack, folder)
        pages = _Pages(part, file, seed, older, regions, stack, folder)
        while block := _fill(source, buffer):
            if len(block) % PAGE_BYTES:
                raise ImageError(f"pages-{file}.img does not end with a whole page; it was not stored")
            stream.update(block)
            pages.add(block)
            if progress is not None:
                progress(len(block))
        regions.end()
        runs = pages.runs
        runs.end()
        header = TableHeader(
            file=file,
            seed=seed,
            num_pages=pages.num_pages,
            num_stored=regions.num_pages,
            num_runs=runs.num_runs,
            regions_bytes=regions.size_bytes,
            stream_digest=stream.digest(),
        )
        name = table_name(file)
        target = ProtectedWriter(stack.enter_context(_created(folder / name)), protect(name))
        table = _write_table(target, header, (runs.spilled, regions.spilled, pages.spilled))
        return WrittenPages(
            num_pages=pages.num_pages,
            num_zero=pages.num_zero,
            num_equal=pages.num_pages - pages.num_zero - regions.num_pages,
            num_stored=regions.num_pages,
            table=table,
            regions=regions.file.end(),
        )


@contextlib.contextmanager
def _created(path: Path) -> Generator[BinaryIO]:
    with os.fdopen(no_links.create_file(path, _MODE), "wb") as file:
        yield file


def _fill(source: PageStream, buffer: bytearray) -> memoryview:
    """The next block: as many bytes as fit into the buffer, or the bytes up to the end of the stream."""
    view, length = memoryview(buffer), 0
    while length < len(view):
        count = source.readinto(view[length:])
        if not count:
            break
        length += count
    return view[:length]


class _Pages:
    """Sorts the pages of each block into zero, equal and stored pages."""

    def __init__(
        self,
        part: int,
        file: int,
        seed: int,
        older: OlderPages | None,
        regions: "_Regions",
        stack: contextlib.ExitStack,
        folder: Path,
    ) -> None:
        self.num_pages = self.num_zero = 0
        self.runs = _Runs(_spill(stack, folder))
        self.spilled = _spill(stack, folder)
        self._own = (part, file)
        self._seed = seed
        self._zero_digest = digest_of_zero(seed)
        self._older = older
        self._regions = regions

    def add(self, block: memoryview) -> None:
        are_zero = find_zero(block)
        inside = np.flatnonzero(~are_zero)
        of_others = digest_pages(block, inside, self._seed)
        digests = np.empty(len(are_zero), DIGEST)
        digests[:] = self._zero_digest
        digests[inside] = of_others
        places = np.zeros(len(are_zero), RUN)
        places["num_pages"] = 1
        if self._older is not None:
            found = self._older.find(inside + self.num_pages, of_others)
            is_equal = found >= 0
            places[inside[is_equal]] = self._older.references(found[is_equal])
        # `image` is still 0 for a page that equals no older page. A hostile older image may state that the page which
        # was found is zero; then `image` is 1. Both kinds of pages are stored.
        stored = inside[places["image"][inside] < FIRST_SOURCE]
        first = self._regions.num_pages
        places["image"][stored] = THIS_IMAGE
        places["part"][stored], places["file"][stored] = self._own
        places["first"][stored] = np.arange(first, first + len(stored), dtype=np.uint64)
        self._regions.add(np.frombuffer(block, np.uint8).reshape(-1, PAGE_BYTES)[stored])
        self.runs.add(places)
        self.spilled.write(digests.tobytes())
        self.num_pages += len(are_zero)
        self.num_zero += len(are_zero) - len(inside)
        if self.num_pages > MOST_PAGES:
            raise ImageError(f"pages-{self._own[1]}.img has more than {MOST_PAGES} pages; it was not stored")


class _Runs:
    """Joins pages whose places follow each other into runs."""

    def __init__(self, spilled: IO[bytes]) -> None:
        self.num_runs = 0
        self.spilled = spilled
        self._last = np.zeros(0, RUN)

    def add(self, places: NDArray[Any]) -> None:
        """Add the places of further pages; each place has one page."""
        every = np.concatenate([self._last, places])
        before, after = every[:-1], every[1:]
        is_next = after["first"] == before["first"] + before["num_pages"]
        is_next |= after["image"] == 0
        for name in ("image", "part", "file"):
            is_next &= after[name] == before[name]
        begins = np.flatnonzero(np.concatenate([[True], ~is_next]))
        runs = every[begins]
        runs["num_pages"] = np.add.reduceat(every["num_pages"], begins)
        self._write(runs[:-1])
        self._last = runs[-1:]

    def end(self) -> None:
        self._write(self._last)

    def _write(self, runs: NDArray[Any]) -> None:
        self.num_runs += len(runs)
        self.spilled.write(runs.tobytes())


class _Regions:
    """Compresses stored pages in other threads, and writes the regions in order."""

    def __init__(self, file: ProtectedWriter, stack: contextlib.ExitStack, folder: Path) -> None:
        self.num_pages = 0
        self.file = file
        self.spilled = _spill(stack, folder)
        num_threads = len(os.sched_getaffinity(0))
        self._pool = stack.enter_context(ThreadPoolExecutor(num_threads, thread_name_prefix="safepoint-regions"))
        self._most_pending = 2 * num_threads
        self._pending: deque[Future[memoryview]] = deque()
        self._partial = bytearray()
        self.size_bytes = 0
        self._write(memoryview(REGIONS_HEADER))

    def add(self, pages: NDArray[np.uint8]) -> None:
        """Add pages, shape (N, 4096), contiguous."""
        self.num_pages += len(pages)
        view = pages.data.cast("B") if len(pages) else memoryview(b"")
        while view:
            if not self._partial and len(view) >= REGION_BYTES:
                piece, view = view[:REGION_BYTES], view[REGION_BYTES:]
                self._submit(piece)
                continue
            room = REGION_BYTES - len(self._partial)
            self._partial += view[:room]
            view = view[room:]
            if len(self._partial) == REGION_BYTES:
                self._submit_partial()

    def end(self) -> None:
        if self._partial:
            self._submit_partial()
        while self._pending:
            self._write_next()

    def _submit_partial(self) -> None:
        self._submit(memoryview(bytes(self._partial)))
        self._partial.clear()

    def _submit(self, pages: memoryview) -> None:
        self._pending.append(self._pool.submit(compress, pages))
        while len(self._pending) > self._most_pending:
            self._write_next()

    def _write_next(self) -> None:
        stored = self._pending.popleft().result()
        self.spilled.write(len(stored).to_bytes(4, "little") + xxhash.xxh3_128_digest(stored))
        self._write(stored)

    def _write(self, data: memoryview) -> None:
        self.file.write(data)
        self.size_bytes += len(data)


def _spill(stack: contextlib.ExitStack, folder: Path) -> IO[bytes]:
    """A file without a name, which exists until the stack ends."""
    return stack.enter_context(tempfile.TemporaryFile(dir=folder))


def _write_table(target: ProtectedWriter, header: TableHeader, spilled: tuple[IO[bytes], ...]) -> FileDigest:
    own = xxhash.xxh3_128()

    def write(data: bytes) -> None:
        target.write(data)
        own.update(data)

    write(header.to_bytes())
    for file in spilled:
        file.seek(0)
        while data := file.read(_COPY_BYTES):
            write(data)
    write(own.digest())
    return target.end()


assert BLOCK_BYTES % (REGION_PAGES * PAGE_BYTES) == 0
