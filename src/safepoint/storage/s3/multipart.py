"""Large files and streams into S3 in parts: many in flight, continued after a cut by sending only what is missing.

A part counts as sent when the server lists it with the size and the MD5 of the source's own bytes there, so that
parts of another content under the same key are never taken over. Servers whose ETag is not the MD5 (encryption with a
key of one's own) get every part again.
"""

import hashlib
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from safepoint.errors import ObjectNotFoundError, StorageError, TransientError
from safepoint.foundation import clock
from safepoint.storage.s3.requests import PartOnServer, S3Requests, UploadId
from safepoint.storage.s3.retry import DEFAULT_WITHIN_S
from safepoint.storage.store import Content, Progress, check_length

LEAST_PART_BYTES = 16 << 20
_MAX_PARTS = 9_000  # S3 allows 10,000
_NUM_PARTS = 64
_LARGE_PART_BYTES = 64 << 20
_IN_FLIGHT = 8
_BLOCK_BYTES = 1 << 20
_PAUSE_S = 0.5
# Parts of a stream wait in memory, so they are smaller and fewer.
STREAM_PART_BYTES = 8 << 20
STREAM_MEMORY_BYTES = 32 << 20
_Windows = Mapping[int, tuple[int, int]]
"""Number of a part → where it begins, and its size."""


def part_bytes_of(source: Path | Content) -> int:
    """How large the parts of a source are: the same in every process, or no upload could be continued."""
    size_bytes = source.size_bytes if isinstance(source, Content) else source.stat().st_size
    least = -(-size_bytes // _MAX_PARTS)
    if isinstance(source, Content):
        return max(STREAM_PART_BYTES, _in_blocks(least))
    # On a link with latency larger parts are quicker, and of a small file a cut costs less with smaller ones.
    least = max(least, min(size_bytes // _NUM_PARTS, _LARGE_PART_BYTES))
    return max(LEAST_PART_BYTES, _in_blocks(least))


def _in_blocks(size_bytes: int) -> int:
    return -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def upload_in_parts(
    uploads: S3Requests,
    key: str,
    source: Path | Content,
    *,
    has_arrived: Callable[[str], bool],
    fence: Callable[[], None] | None,
    progress: Progress | None,
    deadline_s: float | None,
) -> None:
    """Upload `source`.

    Args:
        uploads: the bucket.
        key: within the bucket.
        source: of more than one part; a file does not change meanwhile.
        has_arrived: whether the object of this ETag is there; asked when the answer to the last request was lost.
        fence: see `Store.upload`.
        progress: see `Store.upload`.
        deadline_s: see `Store.upload`.

    Raises:
        ObjectNotFoundError: the upload was aborted meanwhile, by a `sweep` of the writer that replaced this one.
        StorageError: the request was refused, or the source has another size than announced.
    """
    windows = _windows(source)
    report = _Reporter(progress)
    if isinstance(source, Content):
        upload, etags = _send_stream(uploads, key, source, windows, report, deadline_s)
    else:
        upload, etags = _send_file(uploads, key, source, windows, report, deadline_s)
    if len(etags) != len(windows):
        raise StorageError(f"the upload of {key} was stopped")
    if fence is not None:
        fence()
    try:
        _complete(uploads, upload, etags, deadline_s)
    except ObjectNotFoundError:
        if not has_arrived(etag_of_parts(etags)):
            raise


def _send_file(
    uploads: S3Requests, key: str, source: Path, windows: _Windows, report: "_Reporter", deadline_s: float | None
) -> tuple[UploadId, dict[int, str]]:
    upload, etags = _begin_or_continue(uploads, key, lambda part: _is_of(part, source, windows), deadline_s)
    report(sum(windows[number][1] for number in etags))

    def send(number: int) -> None:
        start, length = windows[number]
        etags[number] = uploads.send_part(
            upload, number, source, start=start, size_bytes=length, deadline_s=deadline_s
        )
        report(length)

    missing = [number for number in windows if number not in etags]
    with ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="safepoint-upload") as threads:
        futures: list[Future[None]] = [threads.submit(send, number) for number in missing]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
    for future in futures:
        if not future.cancelled():
            future.result()
    return upload, etags


def _send_stream(
    uploads: S3Requests, key: str, content: Content, windows: _Windows, report: "_Reporter", deadline_s: float | None
) -> tuple[UploadId, dict[int, str]]:
    # The content of a part on the server can only be compared when the stream has brought its bytes.
    upload, present = _begin_or_continue(
        uploads, key, lambda part: windows.get(part.number, (0, -1))[1] == part.size_bytes, deadline_s
    )
    etags: dict[int, str] = {}

    def send(number: int, data: memoryview) -> None:
        found = present.get(number)
        if found is None or hashlib.md5(data, usedforsecurity=False).hexdigest() != found:
            found = uploads.send_part(upload, number, data, start=0, size_bytes=len(data), deadline_s=deadline_s)
        etags[number] = found
        report(len(data))

    with _PartsInMemory(windows, send) as parts:
        content.pour(parts.take)
        check_length(content, parts.num_bytes)
    return upload, etags


class _PartsInMemory:
    """Cuts a stream into parts and sends several at once; `take` waits for a free buffer.

    Left without an error when all have been sent.

    Args:
        windows: the parts.
        send: takes a part's number and its bytes; called on several threads.
    """

    def __init__(self, windows: _Windows, send: Callable[[int, memoryview], None]) -> None:
        self._windows = windows
        self._send = send
        self._part_bytes = windows[1][1]
        num_buffers = max(1, STREAM_MEMORY_BYTES // self._part_bytes)
        self._unmade = min(num_buffers, len(windows))
        self._free = queue.SimpleQueue[bytearray]()
        self._threads = ThreadPoolExecutor(num_buffers, thread_name_prefix="safepoint-upload")
        self._under_way: set[Future[None]] = set()
        self._buffer: bytearray | None = None
        self._filled = 0
        self._number = 1
        self.num_bytes = 0
        """How many have come."""

    def take(self, block: memoryview) -> None:
        """Add the next bytes.

        Raises:
            StorageError: a part could not be sent, or there are more bytes than parts.
        """
        self.num_bytes += len(block)
        while block:
            if self._number not in self._windows:
                raise StorageError("a stream delivered more bytes than it announced; nothing was written")
            if self._buffer is None:
                self._buffer = self._next_buffer()
            length = self._windows[self._number][1]
            head = block[: length - self._filled]
            self._buffer[self._filled : self._filled + len(head)] = head
            self._filled += len(head)
            block = block[len(head) :]
            if self._filled == length:
                self._under_way.add(self._threads.submit(self._send_one, self._number, self._buffer, length))
                self._buffer, self._filled, self._number = None, 0, self._number + 1

    def _send_one(self, number: int, buffer: bytearray, length: int) -> None:
        try:
            self._send(number, memoryview(buffer)[:length])
        finally:
            self._free.put(buffer)

    def _next_buffer(self) -> bytearray:
        if self._unmade:
            self._unmade -= 1
            buffer = bytearray(self._part_bytes)
        else:
            buffer = self._free.get()
        self._raise_failure()
        return buffer

    def _raise_failure(self) -> None:
        done = {future for future in self._under_way if future.done()}
        self._under_way -= done
        for future in done:
            future.result()

    def __enter__(self) -> "_PartsInMemory":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            wait(self._under_way, return_when=FIRST_EXCEPTION)
        self._threads.shutdown(wait=True, cancel_futures=True)
        if error is None:
            for future in self._under_way:
                if not future.cancelled():
                    future.result()


def _complete(uploads: S3Requests, upload: UploadId, etags: dict[int, str], deadline_s: float | None) -> None:
    if deadline_s is None:
        deadline_s = clock.monotonic_s() + DEFAULT_WITHIN_S
    while True:
        try:
            uploads.complete(upload, etags, deadline_s=deadline_s)
        except TransientError:
            if clock.monotonic_s() + _PAUSE_S > deadline_s:
                raise
            clock.sleep(_PAUSE_S)
            # Ceph RGW and moto answer 500 when the upload is gone; asked for its parts, they say so.
            next(uploads.parts(upload, deadline_s=deadline_s), None)
        else:
            return


def etag_of_parts(etags: dict[int, str]) -> str:
    """The ETag that S3 gives an object of these parts: the MD5 of their MD5s, and their number."""
    with suppress(ValueError):
        digests = b"".join(bytes.fromhex(etags[number]) for number in sorted(etags))
        return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"
    return ""


def _windows(source: Path | Content) -> dict[int, tuple[int, int]]:
    size_bytes = source.size_bytes if isinstance(source, Content) else source.stat().st_size
    part_bytes = part_bytes_of(source)
    starts = range(0, size_bytes, part_bytes)
    return {number: (start, min(part_bytes, size_bytes - start)) for number, start in enumerate(starts, 1)}


def _begin_or_continue(
    uploads: S3Requests, key: str, is_kept: Callable[[PartOnServer], bool], deadline_s: float | None
) -> tuple[UploadId, dict[int, str]]:
    """The newest unfinished upload of the key that has parts, with their ETags; or a new upload without parts."""
    begun = [upload for upload in uploads.find(key, deadline_s=deadline_s) if upload.key == key]
    begun.sort(key=lambda upload: upload.initiated, reverse=True)
    continued: tuple[UploadId, dict[int, str]] | None = None
    for upload in begun:
        with suppress(ObjectNotFoundError):
            if continued is None:
                present = list(uploads.parts(upload, deadline_s=deadline_s))
                etags = {part.number: part.etag for part in present if is_kept(part)}
                if etags:
                    continued = upload, etags
                    continue
            # A writer that was replaced must not complete it over what comes now.
            uploads.abort(upload, deadline_s=deadline_s)
    return continued or (uploads.begin(key, deadline_s=deadline_s), {})


def _is_of(part: PartOnServer, source: Path, windows: _Windows) -> bool:
    start, length = windows.get(part.number, (0, -1))
    if part.size_bytes != length:
        return False
    md5 = hashlib.md5(usedforsecurity=False)
    with source.open("rb", buffering=0) as file:
        file.seek(start)
        while length > 0 and (block := file.read(min(_BLOCK_BYTES, length))):
            md5.update(block)
            length -= len(block)
    return md5.hexdigest() == part.etag


class _Reporter:
    """Passes progress on from several threads, one at a time."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._lock = threading.Lock()

    def __call__(self, num_bytes: int) -> None:
        if self._progress is not None and num_bytes:
            with self._lock:
                self._progress(num_bytes)
