"""Uploads large files and streams to S3 in parts, several at once; a repeated upload sends only the missing parts.

Promises: an upload counts as complete if the answer to its last request says so, or if the object has the content of
this source. The work for what the server lists is limited: each part of a file is read once to compare it, and the
parts of a few uploads are listed.

A part counts as sent if the server lists it with the size and the MD5 of this part of the source. So parts of another
source under the same key are never used. On servers whose ETags are not MD5s (encryption with the customer's key), a
repeated upload sends every part again.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import suppress

from safepoint.errors import ObjectNotFoundError, StorageError, TransientError
from safepoint.foundation import clock
from safepoint.storage.failures import changed_in_transit
from safepoint.storage.s3.exchange import is_md5
from safepoint.storage.s3.file_parts import FilePart, md5_of
from safepoint.storage.s3.requests import PartOnServer, S3Requests, UploadId
from safepoint.storage.s3.retry import DEFAULT_WITHIN_S
from safepoint.storage.store import WHOLE_BYTES, Content, OpenFile, Progress, StoredObject, check_length

_MAX_PARTS = 9_000  # S3 allows 10,000
_NUM_PARTS = 64
_LARGE_PART_BYTES = 64 << 20
_IN_FLIGHT = 8
_BLOCK_BYTES = 1 << 20
_PAUSE_S = 0.5
_MOST_EXAMINED = 8
"""Of so many unfinished uploads of one object, the newest ones, the parts are listed. The others are aborted."""
# Parts of a stream wait in memory, so they are smaller than parts of a file, and fewer are under way at once.
STREAM_PART_BYTES = 8 << 20
STREAM_MEMORY_BYTES = 32 << 20
_Parts = Mapping[int, tuple[int, int]]
"""Number of a part → its first byte in the source, and its size in bytes."""


def part_bytes_of(size_bytes: int, *, is_stream: bool) -> int:
    """The size of the parts of a source.

    Every process computes the same size, so that a process can continue the upload of another process.
    """
    least = -(-size_bytes // _MAX_PARTS)
    if not is_stream:
        # Large parts are faster on a link with high latency. Small parts lose less when the connection breaks.
        least = max(least, min(size_bytes // _NUM_PARTS, _LARGE_PART_BYTES))
    in_blocks = -(-least // _BLOCK_BYTES) * _BLOCK_BYTES
    return max(STREAM_PART_BYTES if is_stream else WHOLE_BYTES, in_blocks)


def upload_in_parts(
    uploads: S3Requests,
    key: str,
    source: OpenFile | Content,
    *,
    find: Callable[[], StoredObject | None],
    fence: Callable[[], None] | None,
    progress: Progress | None,
    deadline_s: float | None,
) -> None:
    """Upload `source`.

    Args:
        uploads: the bucket.
        key: the key within the bucket.
        source: a file or stream of more than one part. A file must not change during the upload.
        find: returns the object, or None if there is none. It is called if an earlier request may have completed the
            upload, although its answer was lost.
        fence: see `Store.upload`.
        progress: see `Store.upload`.
        deadline_s: see `Store.upload`.

    Raises:
        ObjectNotFoundError: a newer writer has replaced this writer, and has aborted the upload with `sweep`.
        StorageError: a request was refused, or the source has another size than announced.
        TransientError: a request failed until the deadline, or the bytes that arrived differ from the bytes that were
            sent.
    """
    size_bytes = source.size_bytes
    part_bytes = part_bytes_of(size_bytes, is_stream=isinstance(source, Content))
    starts = range(0, size_bytes, part_bytes)
    parts = {number: (start, min(part_bytes, size_bytes - start)) for number, start in enumerate(starts, 1)}
    progress = progress or _ignore
    md5s: dict[int, bytes] = {}
    if isinstance(source, Content):
        upload, etags = _send_stream(uploads, key, source, parts, md5s, progress, deadline_s)
    else:
        upload, etags = _send_file(uploads, key, source, parts, md5s, progress, deadline_s)
    if fence is not None:
        fence()
    try:
        _complete(uploads, upload, etags, deadline_s)
    except ObjectNotFoundError:
        if not _has_arrived(uploads, key, find(), parts, etags, md5s, deadline_s):
            raise
    for number in sorted(number for number, etag in etags.items() if not is_md5(etag)):
        if not _is_equal(uploads, key, parts[number], md5s[number], deadline_s):
            raise changed_in_transit(f"upload of {key}")


def _ignore(num_bytes: int) -> None:
    """Report no progress."""


def _is_equal(uploads: S3Requests, key: str, part: tuple[int, int], md5: bytes, deadline_s: float | None) -> bool:
    """Read a part of the object back and compare its MD5. The server's ETag is not an MD5, or says nothing."""
    found = hashlib.md5(usedforsecurity=False)
    uploads.get(key, found.update, start=part[0], length=part[1], deadline_s=deadline_s)
    return found.digest() == md5


def _has_arrived(
    uploads: S3Requests,
    key: str,
    found: StoredObject | None,
    parts: _Parts,
    etags: Mapping[int, str],
    md5s: Mapping[int, bytes],
    deadline_s: float | None,
) -> bool:
    """Whether `found` has the content of this source: the object may be older, or another writer's."""
    if found is None or found.size_bytes != sum(length for _, length in parts.values()):
        return False
    version = found.version.strip('"')
    if version == _etag_of_parts(etags):
        return True
    # On S3, the ETag of an object that was uploaded in parts contains a "-". Without "-", the server computes ETags
    # in another way, and the expected ETag is unknown. Then only the content shows whether the upload is complete.
    return "-" not in version and all(
        _is_equal(uploads, key, part, md5s.get(number) or bytes.fromhex(etags[number]), deadline_s)
        for number, part in parts.items()
    )


def _send_file(
    uploads: S3Requests,
    key: str,
    source: OpenFile,
    parts: _Parts,
    md5s: dict[int, bytes],
    progress: Progress,
    deadline_s: float | None,
) -> tuple[UploadId, dict[int, str]]:
    @functools.cache
    def md5_of_part(number: int) -> bytes:
        if deadline_s is not None and clock.monotonic_s() > deadline_s:
            raise TransientError(f"upload of {key}: the parts were not compared before the deadline")
        return md5_of(FilePart(source, *parts[number]))

    def is_kept(part: PartOnServer) -> bool:
        is_candidate = parts.get(part.number, (0, -1))[1] == part.size_bytes and is_md5(part.etag)
        return is_candidate and md5_of_part(part.number).hex() == part.etag

    upload, etags = _begin_or_continue(uploads, key, is_kept, deadline_s)
    if etags:
        progress(sum(parts[number][1] for number in etags))

    def send(number: int) -> str:
        part = FilePart(source, *parts[number])
        md5s[number] = md5_of_part(number)
        return uploads.send_part(upload, number, part, md5s[number], deadline_s=deadline_s)

    threads = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="safepoint-upload")
    try:
        under_way = {threads.submit(send, number): number for number in parts if number not in etags}
        for future in as_completed(under_way):
            etags[under_way[future]] = future.result()
            progress(parts[under_way[future]][1])
    finally:
        threads.shutdown(cancel_futures=True)
    return upload, etags


def _send_stream(
    uploads: S3Requests,
    key: str,
    content: Content,
    parts: _Parts,
    md5s: dict[int, bytes],
    progress: Progress,
    deadline_s: float | None,
) -> tuple[UploadId, dict[int, str]]:
    # Only sizes are compared here. `send` compares the MD5 of a part when the stream has delivered its bytes.
    upload, present = _begin_or_continue(
        uploads, key, lambda part: parts.get(part.number, (0, -1))[1] == part.size_bytes, deadline_s
    )

    def send(number: int, data: memoryview) -> str:
        found, md5s[number] = present.get(number), md5_of(data)
        if found is None or md5s[number].hex() != found:
            found = uploads.send_part(upload, number, data, md5s[number], deadline_s=deadline_s)
        return found

    stream = _StreamInParts(parts, send, progress)
    try:
        content.write_to(stream.take)
        check_length(content, stream.num_bytes)
        stream.finish()
    finally:
        stream.close()
    return upload, stream.etags


class _StreamInParts:
    """Cuts a stream into parts and sends several at once; `take` waits for a free buffer.

    Args:
        parts: the parts.
        send: takes a part's number and its bytes, and returns its ETag; called on several threads.
        progress: called on the thread of `take` and `finish`.
    """

    def __init__(self, parts: _Parts, send: Callable[[int, memoryview], str], progress: Progress) -> None:
        self._parts = parts
        self._send = send
        self._progress = progress
        self._part_bytes = parts[1][1]
        self._num_buffers = max(1, STREAM_MEMORY_BYTES // self._part_bytes)
        self._threads = ThreadPoolExecutor(self._num_buffers, thread_name_prefix="safepoint-upload")
        self._under_way: dict[Future[str], tuple[int, bytearray]] = {}
        self._buffer: bytearray | None = None
        self._filled = 0
        self._number = 1
        self.num_bytes = 0
        """How many bytes `take` has received."""
        self.etags: dict[int, str] = {}
        """The ETags of the parts that have been sent, by number."""

    def take(self, block: memoryview) -> None:
        """Add the next bytes.

        Raises:
            StorageError: a part could not be sent, or the stream has more bytes than all parts together.
        """
        self.num_bytes += len(block)
        while block:
            if self._number not in self._parts:
                raise StorageError("a stream delivered more bytes than it announced; nothing was written")
            if self._buffer is None:
                is_full = len(self._under_way) == self._num_buffers
                self._buffer = self._wait_for_one() if is_full else bytearray(self._part_bytes)
            length = self._parts[self._number][1]
            head = block[: length - self._filled]
            self._buffer[self._filled : self._filled + len(head)] = head
            self._filled += len(head)
            block = block[len(head) :]
            if self._filled == length:
                future = self._threads.submit(self._send, self._number, memoryview(self._buffer)[:length])
                self._under_way[future] = self._number, self._buffer
                self._buffer, self._filled, self._number = None, 0, self._number + 1

    def finish(self) -> None:
        """Wait until all parts have been sent.

        Raises:
            StorageError: a part could not be sent.
        """
        while self._under_way:
            self._wait_for_one()

    def close(self) -> None:
        """Wait for the parts that are being sent, and send no further parts."""
        self._threads.shutdown(cancel_futures=True)

    def _wait_for_one(self) -> bytearray:
        """Wait until any part has been sent; returns its buffer."""
        future = next(iter(wait(self._under_way, return_when=FIRST_COMPLETED).done))
        number, buffer = self._under_way.pop(future)
        self.etags[number] = future.result()
        self._progress(self._parts[number][1])
        return buffer


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
            # If the upload does not exist any more, Ceph RGW and moto answer 500. The request for its parts then
            # raises ObjectNotFoundError.
            next(uploads.parts(upload, deadline_s=deadline_s), None)
        else:
            return


def _etag_of_parts(etags: Mapping[int, str]) -> str:
    """The ETag that S3 gives an object of these parts: the MD5 of their MD5s, and their number. Empty if an ETag is
    not an MD5."""
    with suppress(ValueError):
        digests = b"".join(bytes.fromhex(etags[number]) for number in sorted(etags))
        return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"
    return ""


def _begin_or_continue(
    uploads: S3Requests, key: str, is_kept: Callable[[PartOnServer], bool], deadline_s: float | None
) -> tuple[UploadId, dict[int, str]]:
    """An upload of the key, with the ETags of the parts that need not be sent again.

    Of the newest unfinished uploads, the first one with a part for which `is_kept` returns True is continued. If
    there is no such upload, a new upload begins. All other unfinished uploads of the key are aborted.
    """
    begun = [upload for upload in uploads.find(key, deadline_s=deadline_s) if upload.key == key]
    begun.sort(key=lambda upload: upload.initiated, reverse=True)
    continued: tuple[UploadId, dict[int, str]] | None = None
    for number, upload in enumerate(begun):
        with suppress(ObjectNotFoundError):
            etags: dict[int, str] = {}
            if continued is None and number < _MOST_EXAMINED:
                present = uploads.parts(upload, deadline_s=deadline_s)
                etags = {part.number: part.etag for part in present if is_kept(part)}
            if etags:
                continued = upload, etags
            else:
                # A replaced writer could still complete this upload, and overwrite the new object. So it is aborted.
                uploads.abort(upload, deadline_s=deadline_s)
    return continued or (uploads.begin(key, deadline_s=deadline_s), {})
