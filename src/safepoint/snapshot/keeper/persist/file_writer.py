"""Writes the images of checkpoint files (the bytes of files, in memory) to durable files.

Large files are written one after the other, with two threads for each file: one computes the checksums in the
archives of `torch.save` and the digest of the file, and the other writes. Both process the bytes that have already
been copied into the image (`Source.available`), so they begin before the copying has ended. Where the file system
allows it, these writes bypass the page cache: a checkpoint is not read again soon, and would displace the training's
data from the cache.

A pool of threads writes the small files, several at a time, while the large files are written. A thread begins to
write a small file when the image of the file is complete.
"""

import errno
import itertools
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safepoint.checkpoint.format.digest import FileDigest, FileDigester, digest_bytes
from safepoint.checkpoint.format.manifest import FileEntry
from safepoint.foundation import clock, files
from safepoint.foundation.shared_folders import no_links
from safepoint.snapshot.images.torch_archive import Archive, records_of
from safepoint.snapshot.memory.block import PAGE_BYTES, SMALL_BYTES, Block

STAGED = 1 << 62
"""The result of `Source.available` when the rank has staged its part: it has copied all its files into memory."""
_WRITE_BYTES = 4 << 20
_POLL_S = 0.0005
_NUM_SMALL_WRITERS = 8
_CANNOT_DIRECT = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class GivenUpError(Exception):
    """The image will never be complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file's image in memory.

    Args:
        path: the path of the file, relative to the checkpoint.
        block: the block (a piece of shared memory) that holds the image.
        offset: where the image begins in the block.
        size_bytes: the size of the file.
        archives: the archives in the file, in their order (see `safepoint.snapshot.images.image`).
        has_block_alone: whether the block holds this file and nothing else.
        available: returns how many bytes of the block have been copied so far, or STAGED. It raises GivenUpError if
            no more bytes will be copied.
    """

    path: str
    block: Block
    offset: int
    size_bytes: int
    archives: tuple[Archive, ...]
    has_block_alone: bool
    available: Callable[[], int]

    def wait_for(self, end: int) -> None:
        """Wait until the first `end` bytes of the file are copied.

        Raises:
            GivenUpError: these bytes will not be copied.
        """
        while self.available() < self.offset + end:
            clock.sleep(_POLL_S)

    def wait_until_staged(self) -> None:
        """Wait until the file's rank has reported that its part is complete and unchanged since the snapshot.

        Raises:
            GivenUpError: the rank will not report that.
        """
        while self.available() < STAGED:
            clock.sleep(_POLL_S)

    def view(self, start: int, length: int) -> memoryview:
        """A part of the file."""
        return self.block.view(self.offset + start, length)


def write_files(sources: list[Source], folder: Path) -> list[FileEntry]:
    """Write all files into `folder`, and fsync the files. The commit fsyncs the folders.

    Args:
        sources: the files. No two of them have the same path; the caller has to ensure that, for example with
            `merge`.
        folder: the folder in which the files are written.

    Raises:
        GivenUpError: an image will not be complete.
        OSError: a file cannot be written, for example because the disk is full, has failed or is read-only.
    """
    for source in sources:
        no_links.make_folders((folder / source.path).parent)
    small = [source for source in sources if source.size_bytes < SMALL_BYTES]
    large = [source for source in sources if source.size_bytes >= SMALL_BYTES]
    with ThreadPoolExecutor(_NUM_SMALL_WRITERS, "safepoint-small-files") as pool:
        # During an fsync, a thread only waits for the disk. So eight calls at the same time take about as long as
        # one.
        waiting = [pool.submit(_write_small, source, folder / source.path) for source in small]
        entries = [_write_large(source, folder / source.path) for source in large]
        entries += [result.result() for result in waiting]
    return entries


def _write_small(source: Source, target: Path) -> FileEntry:
    source.wait_for(source.size_bytes)
    seal_archive(source)
    content = bytes(source.view(0, source.size_bytes))
    descriptor = no_links.create_file(target)
    try:
        files.write_at(descriptor, memoryview(content), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileEntry.of(source.path, FileDigest(size_bytes=len(content), digest=digest_bytes(content)))


def _write_large(source: Source, target: Path) -> FileEntry:
    preparing = Preparing(source)
    thread = threading.Thread(target=preparing.run, name="safepoint-digest", daemon=True)
    thread.start()
    try:
        with _Writer(target) as writer:
            done = 0
            while done < source.size_bytes:
                ready = preparing.wait_for(min(done + _WRITE_BYTES, source.size_bytes))
                while done < ready and (ready - done >= _WRITE_BYTES or ready == source.size_bytes):
                    length = min(_WRITE_BYTES, ready - done)
                    writer.write(source, done, length)
                    done += length
            writer.finish(source.size_bytes)
    finally:
        preparing.stop()
        thread.join()
    return FileEntry.of(source.path, preparing.result())


class _Writer:
    """A file that is being written. Its writes bypass the page cache as long as the file system and the place of
    the image in memory allow that."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._is_direct = hasattr(os, "O_DIRECT")
        try:
            direct = os.O_DIRECT if self._is_direct else 0
            self._descriptor = no_links.open_file(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | direct)
        except OSError as error:
            if not self._is_direct or error.errno not in _CANNOT_DIRECT:
                raise
            self._is_direct = False
            no_links.unlink(target)  # some file systems create the file, then refuse to open it
            self._descriptor = no_links.create_file(target)

    def write(self, source: Source, start: int, length: int) -> None:
        """Write `length` bytes of the image from `start`."""
        if self._is_direct:
            # Only whole pages can be written, so the last write may go beyond the end of the file. `finish` sets the
            # length.
            whole = -(-length // PAGE_BYTES) * PAGE_BYTES
            try:
                if source.offset % PAGE_BYTES == 0 and start % PAGE_BYTES == 0:
                    files.write_at(self._descriptor, source.view(start, whole), start)
                    return
            except OSError as error:
                if error.errno not in _CANNOT_DIRECT:
                    raise
            self._leave_direct()
        files.write_at(self._descriptor, source.view(start, length), start)

    def _leave_direct(self) -> None:
        self._is_direct = False
        descriptor = no_links.open_file(self._target, os.O_WRONLY)
        is_same = os.path.samestat(os.fstat(descriptor), os.fstat(self._descriptor))
        os.close(self._descriptor)
        self._descriptor = descriptor
        if not is_same:
            raise OSError(errno.ESTALE, "another file has replaced this file", str(self._target))

    def finish(self, size_bytes: int) -> None:
        os.ftruncate(self._descriptor, size_bytes)
        os.fsync(self._descriptor)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


# ---- checksums and digest -----------------------------------------------------------------------------------------


class Preparing:
    """Reads an image once while it is being filled, and computes the checksums of its archives and the digest of the
    file.

    Args:
        source: the image.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._ready = 0
        self._error: BaseException | None = None
        self._is_stopped = False
        self._changed = threading.Condition()
        self._digesting = FileDigester()

    def run(self) -> None:
        """Compute the checksums and the digest. This method is the body of the thread."""
        try:
            for start, length in _steps(self._source):
                if self._is_stopped:
                    return
                self._digesting.update(self._source.view(start, length))
                self._advance(start + length)
        except BaseException as error:  # noqa: BLE001  the writing thread raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _advance(self, ready: int) -> None:
        with self._changed:
            self._ready = ready
            self._changed.notify_all()

    def wait_for(self, end: int) -> int:
        """Wait until the first `end` bytes are final. Returns how many bytes are final.

        Raises:
            GivenUpError: the bytes will not be copied.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready >= end or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._ready

    def stop(self) -> None:
        """Stop before the next part."""
        self._is_stopped = True

    def result(self) -> FileDigest:
        """The digest of the whole file."""
        return self._digesting.result()


def digest_source(source: Source) -> FileEntry:
    """The manifest entry of a file whose image is complete. The checksums are written into the image in memory. No
    file is written."""
    preparing = Preparing(source)
    preparing.run()
    preparing.wait_for(source.size_bytes)
    return FileEntry.of(source.path, preparing.result())


def seal_archive(source: Source) -> None:
    """Fill in the checksums of the archives in a completely copied image."""
    if source.archives:
        for _ in _steps(source):
            pass


def _steps(source: Source) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of each part of the file, in order, when its bytes and its checksums are final."""
    if not source.archives:
        for start in range(0, source.size_bytes, _WRITE_BYTES):
            length = min(_WRITE_BYTES, source.size_bytes - start)
            source.wait_for(start + length)
            yield start, length
        return
    place = 0
    for record in itertools.chain.from_iterable(records_of(archive, source.view) for archive in source.archives):
        checksum = 0
        for at in range(record.data, record.data + record.size, _WRITE_BYTES):
            length = min(_WRITE_BYTES, record.data + record.size - at)
            source.wait_for(at + length)
            checksum = zlib.crc32(source.view(at, length), checksum)
            if at + length < record.data + record.size:
                yield place, at + length - place
                place = at + length
        value = struct.pack("<I", checksum)
        for at in record.checksums:
            source.view(at, len(value))[:] = value
        # Short records form one part together: handling hundreds of tiny parts takes longer than reading them.
        if record.end - place >= SMALL_BYTES:
            yield place, record.end - place
            place = record.end
    source.wait_for(source.size_bytes)
    yield place, source.size_bytes - place
