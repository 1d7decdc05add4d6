"""A large file into S3 in parts: many in flight, continued after a cut by sending only what is missing.

A part counts as sent when the server lists it with the size and the MD5 of the file's own bytes there, so that parts
of another content under the same key are never taken over. Servers whose ETag is not the MD5 (encryption with a key
of one's own) get every part again.
"""

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from holdfast.errors import ObjectNotFoundError, StorageError, TransientError
from holdfast.foundation import clock
from holdfast.storage.retry import DEFAULT_WITHIN_S
from holdfast.storage.s3_requests import PartOnServer, S3Requests, UploadId
from holdfast.storage.store import Progress

LEAST_PART_BYTES = 16 << 20
_MAX_PARTS = 9_000  # S3 allows 10,000
_NUM_PARTS = 64
_LARGE_PART_BYTES = 64 << 20
_IN_FLIGHT = 8
_BLOCK_BYTES = 1 << 20
_PAUSE_S = 0.5


def part_bytes_of(size_bytes: int) -> int:
    """How large the parts of a file are: the same in every process, or no upload could be continued."""
    # On a link with latency larger parts are quicker, and of a small file a cut costs less with smaller ones.
    least = max(-(-size_bytes // _MAX_PARTS), min(size_bytes // _NUM_PARTS, _LARGE_PART_BYTES))
    return max(LEAST_PART_BYTES, -(-least // _BLOCK_BYTES) * _BLOCK_BYTES)


def upload_in_parts(
    uploads: S3Requests,
    key: str,
    source: Path,
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
        source: a file of more than one part that does not change meanwhile.
        has_arrived: whether the object of this ETag is there; asked when the answer to the last request was lost.
        fence: see `Store.upload`.
        progress: see `Store.upload`.
        deadline_s: see `Store.upload`.

    Raises:
        ObjectNotFoundError: the upload was aborted meanwhile, by a `sweep` of whoever replaced this writer.
        StorageError: the request was refused.
    """
    size_bytes = source.stat().st_size
    windows = _windows(size_bytes)
    upload, etags = _begin_or_continue(uploads, key, source, windows, deadline_s)
    report = _Reporter(progress)
    report(sum(windows[number][1] for number in etags))

    def send(number: int) -> None:
        start, length = windows[number]
        etags[number] = uploads.send_part(
            upload, number, source, start=start, size_bytes=length, deadline_s=deadline_s
        )
        report(length)

    missing = [number for number in windows if number not in etags]
    with ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="holdfast-upload") as threads:
        futures: list[Future[None]] = [threads.submit(send, number) for number in missing]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
    for future in futures:
        if not future.cancelled():
            future.result()
    if len(etags) != len(windows):
        raise StorageError(f"the upload of {source} was stopped")
    if fence is not None:
        fence()
    try:
        _complete(uploads, upload, etags, deadline_s)
    except ObjectNotFoundError:
        if not has_arrived(etag_of_parts(etags)):
            raise


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


def _windows(size_bytes: int) -> dict[int, tuple[int, int]]:
    part_bytes = part_bytes_of(size_bytes)
    starts = range(0, size_bytes, part_bytes)
    return {number: (start, min(part_bytes, size_bytes - start)) for number, start in enumerate(starts, 1)}


def _begin_or_continue(
    uploads: S3Requests,
    key: str,
    source: Path,
    windows: dict[int, tuple[int, int]],
    deadline_s: float | None,
) -> tuple[UploadId, dict[int, str]]:
    begun = [upload for upload in uploads.find(key, deadline_s=deadline_s) if upload.key == key]
    begun.sort(key=lambda upload: upload.initiated, reverse=True)
    continued: tuple[UploadId, dict[int, str]] | None = None
    for upload in begun:
        with suppress(ObjectNotFoundError):
            if continued is None:
                present = list(uploads.parts(upload, deadline_s=deadline_s))
                etags = {part.number: part.etag for part in present if _is_of(part, source, windows)}
                if etags:
                    continued = upload, etags
                    continue
            # A writer that was replaced must not complete it over what comes now.
            uploads.abort(upload, deadline_s=deadline_s)
    return continued or (uploads.begin(key, deadline_s=deadline_s), {})


def _is_of(part: PartOnServer, source: Path, windows: dict[int, tuple[int, int]]) -> bool:
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


__all__ = ["LEAST_PART_BYTES", "etag_of_parts", "part_bytes_of", "upload_in_parts"]
