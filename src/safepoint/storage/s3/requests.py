"""Requests to S3: uploads that can be continued, listings, and ranged reads.

Promises: a request counts as successful only if its answer shows that. A listing that contradicts itself about
further pages is refused, and an upload is complete only if the answer says so. The names, memory and time of all
listings of one operation are limited.

A ranged read goes from the socket into a small buffer that stays in the processor's cache. So it takes a fraction of
the processor time that a library such as obstore takes (docs/benchmarks.md).
"""

import base64
import hashlib
import http.client
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from safepoint.errors import StorageError, TransientError
from safepoint.foundation import clock
from safepoint.storage.s3.answers import (
    BEGUN,
    COMPLETED,
    LISTING,
    SLOWEST_BYTES_PER_S,
    OtherAnswerError,
    identifier,
    key_in,
    number_in,
    other_answer,
    present,
    refusing_other_answers,
    size_of,
    text_in,
)
from safepoint.storage.s3.exchange import Request, S3Exchange, refuse_failure
from safepoint.storage.s3.file_parts import FilePart
from safepoint.storage.s3.retry import DEFAULT_WITHIN_S
from safepoint.storage.store import Sink, StoredObject

_BLOCK_BYTES = 1 << 20
_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_MOST_PARTS = 10_000
"""The largest number of a part in S3."""
MOST_LISTED = 2_000_000
MOST_LISTED_BYTES = 1 << 30
"""The limits of an operation: the number of names that it may list; and the bytes of all pages together. The second
limit is also the limit of the memory for the names. 2,000,000 `StoredObject`s take about 1 GB of memory."""
_LIST_WITHIN_S = 1800.0
"""How long an operation may list."""
_BYTES_OF_ITEM = 200
"""The memory that a listed object or upload takes, without its texts."""


class ListingBudget:
    """What an operation may take for its listings: names, memory, bytes of pages, and time.

    All listings of one operation share one budget. Several threads may use it.

    Args:
        what: the request, for messages.
        where: what the operation lists, for messages.
        deadline_s: when to give up, by the monotonic clock. The operation may take half an hour in any case.
    """

    def __init__(self, what: str, where: str, deadline_s: float | None) -> None:
        self._what = what
        self._where = where
        self._begun_s = clock.monotonic_s()
        latest_s = self._begun_s + _LIST_WITHIN_S
        self._until_s = latest_s if deadline_s is None else min(latest_s, deadline_s)
        self._lock = threading.Lock()
        self._num_names = self._page_bytes = self._kept_bytes = 0

    def check_time(self) -> None:
        """Raise TransientError if the operation has taken too long."""
        now_s = clock.monotonic_s()
        if now_s > self._until_s:
            raise TransientError(f"{self._what}: the listing took more than {now_s - self._begun_s:.0f} s")

    def take_page(self, num_bytes: int) -> None:
        """Count the bytes of a page. Raises StorageError if there are too many."""
        with self._lock:
            self._page_bytes += num_bytes
        self._check()

    def take_name(self, *texts: str) -> None:
        """Count a listed name with all texts that are kept for it. Raises StorageError if there are too many."""
        # The bytes of a page do not show how much memory its texts take: one character above U+FFFF makes Python
        # store every character of its text in 4 bytes.
        with self._lock:
            self._num_names += 1
            self._kept_bytes += _BYTES_OF_ITEM + sum(map(sys.getsizeof, texts))
        self._check()

    def _check(self) -> None:
        if self._num_names > MOST_LISTED or max(self._page_bytes, self._kept_bytes) > MOST_LISTED_BYTES:
            count = f"more than {min(self._num_names, MOST_LISTED)} names below {self._where!r}"
            raise StorageError(
                f"{self._what}: there are too many names to list, {count}",
                hint="use a location that only this run writes to",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadId:
    """A multipart upload that was begun.

    Args:
        key: the key within the bucket.
        upload_id: the server's name for the upload.
        initiated: when the upload was begun, RFC 3339 by the server's clock; empty if it is not known.
    """

    key: str
    upload_id: str
    initiated: str = ""

    @property
    def begun_s(self) -> float:
        """When the upload was begun, seconds since 1970; infinite if `initiated` is empty or invalid."""
        return clock.parse_utc_or_inf(self.initiated)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOnServer:
    """A part that the server has.

    Args:
        number: the number of the part, from 1.
        etag: the ETag that the server reports; on most servers, the MD5 of the part.
        size_bytes: its size.
    """

    number: int
    etag: str
    size_bytes: int


class S3Requests(S3Exchange):
    """Requests to one bucket; see `S3Exchange`."""

    def begin(self, key: str, *, deadline_s: float | None) -> UploadId:
        """Begin an upload."""
        answer = self._call(Request(method="POST", key=key, query={"uploads": ""}, answer=BEGUN), deadline_s)
        # The name is required: a part that is sent without an upload's name would replace the object itself.
        with refusing_other_answers(self._what("POST", key)):
            return UploadId(key=key, upload_id=present(text_in(answer.xml, "UploadId")))

    def objects(self, prefix: str, *, deadline_s: float | None) -> Iterator[StoredObject]:
        """The objects whose keys within the bucket begin with `prefix`, even if `Store` refuses their names."""
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"}
        markers = {"continuation-token": "NextContinuationToken"}
        budget = self.budget(prefix, deadline_s)
        for item in self._list("", query, markers, "Contents", budget, deadline_s):
            with refusing_other_answers(self._what("GET", "")):
                key, version = key_in(item), identifier(item.findtext("ETag"))
                budget.take_name(key, version)
                if not key.startswith(prefix):  # a hostile server may list keys outside the prefix
                    continue
                found = StoredObject(
                    key=key,
                    size_bytes=number_in(item, "Size"),
                    version=version,
                    modified_s=clock.parse_utc(text_in(item, "LastModified")),
                )
            yield found

    def budget(self, where: str, deadline_s: float | None) -> ListingBudget:
        """A budget for an operation that lists keys below `where`."""
        return ListingBudget(self._what("GET", ""), where, deadline_s)

    def find(
        self, prefix: str, *, deadline_s: float | None, budget: ListingBudget | None = None
    ) -> Iterator[UploadId]:
        """The unfinished uploads of all keys that begin with `prefix`.

        Args:
            prefix: the beginning of the keys.
            deadline_s: when to give up, by the monotonic clock.
            budget: the budget of the operation; None if this is its only listing.
        """
        query = {"uploads": "", "prefix": prefix, "max-uploads": "1000"}
        markers = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
        budget = budget or self.budget(prefix, deadline_s)
        for upload in self._list("", query, markers, "Upload", budget, deadline_s):
            # The identifier is required: a request to abort an upload without it would delete the object itself.
            with refusing_other_answers(self._what("GET", "")):
                key, name = key_in(upload), present(identifier(upload.findtext("UploadId")))
                begun = identifier(upload.findtext("Initiated"))
            budget.take_name(key, name, begun)
            if key.startswith(prefix):  # see `objects`
                yield UploadId(key=key, upload_id=name, initiated=begun)

    def parts(self, upload: UploadId, *, deadline_s: float | None) -> Iterator[PartOnServer]:
        """The parts of `upload` that have arrived, each number once."""
        query = {"uploadId": upload.upload_id, "max-parts": "1000"}
        markers = {"part-number-marker": "NextPartNumberMarker"}
        numbers = set[int]()
        budget = ListingBudget(self._what("GET", upload.key), upload.key, deadline_s)
        for part in self._list(upload.key, query, markers, "Part", budget, deadline_s):
            with refusing_other_answers(self._what("GET", upload.key)):
                found = PartOnServer(
                    number=number_in(part, "PartNumber"),
                    etag=identifier(part.findtext("ETag")).strip('"'),
                    size_bytes=number_in(part, "Size"),
                )
            # For each listed part, the caller reads a piece of the file. If parts could be listed again, it would
            # have no end.
            if not 1 <= found.number <= _MOST_PARTS or found.number in numbers:
                raise other_answer(self._what("GET", upload.key))
            numbers.add(found.number)
            yield found

    def _list(
        self,
        key: str,
        query: Mapping[str, str],
        markers: Mapping[str, str],
        name: str,
        budget: ListingBudget,
        deadline_s: float | None,
    ) -> Iterator[ElementTree.Element]:
        """The elements called `name` on all pages of a listing.

        The next page is requested with query parameters. For each of them, `markers` has the name of an element on
        the current page. The text of this element is the value of the parameter.

        The time limit includes the time that the caller needs for the elements.
        """
        what = self._what("GET", key)
        marker: dict[str, str] = {}
        seen = {_digest({})}
        while True:
            budget.check_time()
            answer = self._call(Request(method="GET", key=key, query={**query, **marker}, answer=LISTING), deadline_s)
            page = answer.xml
            budget.take_page(len(answer.body))
            with refusing_other_answers(what):
                is_last = _is_last(page, name)
            if page.findtext("EncodingType") == "url":
                for element in page.iter():
                    if element.tag == "Key":
                        element.text = unquote_plus(element.text or "", errors="surrogateescape")
            for element in page.iter(name):
                budget.check_time()
                yield element
            if is_last:
                return
            marker = {parameter: text_in(page, element) for parameter, element in markers.items()}
            if (digest := _digest(marker)) in seen:
                raise other_answer(what)
            seen.add(digest)

    def send_part(
        self, upload: UploadId, number: int, source: "FilePart | memoryview", md5: bytes, *, deadline_s: float | None
    ) -> str:
        """Send `source`, whose MD5 is `md5`, as part `number` and return its ETag.

        Most servers compare the part with `Content-MD5`. For other servers, `_call` compares `md5` with the ETag of
        the answer.
        """
        query = {"partNumber": str(number), "uploadId": upload.upload_id}
        headers = {"content-md5": base64.b64encode(md5).decode()}
        request = Request(method="PUT", key=upload.key, query=query, headers=headers, body=source, md5=md5.hex())
        answer = self._call(request, deadline_s)
        with refusing_other_answers(self._what("PUT", upload.key)):
            return present(identifier(answer.etag))

    def complete(self, upload: UploadId, etags: Mapping[int, str], *, deadline_s: float | None) -> None:
        """Complete an upload: the store joins its parts into one object.

        The request is sent only once: if its answer was lost, a second request would fail.

        Raises:
            ObjectNotFoundError: there is no such upload: it was aborted, or an earlier try completed it.
            TransientError: it is not known whether the server has completed the upload: the answer was lost, or it
                is not the result of a completed upload.
        """
        parts = "".join(
            f'<Part><PartNumber>{number}</PartNumber><ETag>"{etag}"</ETag></Part>'
            for number, etag in sorted(etags.items())
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        query = {"uploadId": upload.upload_id}
        request = Request(method="POST", key=upload.key, query=query, body=body, answer=COMPLETED)
        try:
            self._call(request, deadline_s, most_tries=1)
        except OtherAnswerError as error:
            raise TransientError(
                f"{self._what('POST', upload.key)}: the answer does not say that the upload is complete",
                hint=error.hint,
            ) from error

    def abort(self, upload: UploadId, *, deadline_s: float | None) -> None:
        """Make the server delete an unfinished upload and its parts."""
        self._delete(upload.key, {"uploadId": upload.upload_id}, deadline_s)

    def _delete(self, key: str, query: Mapping[str, str], deadline_s: float | None) -> None:
        answer = self._call(Request(method="DELETE", key=key, query=query), deadline_s)
        # S3 answers 204, some servers 200. The page of a proxy is no evidence that anything was deleted.
        if answer.status not in {200, 204} or answer.body.strip():
            raise other_answer(self._what("DELETE", key))

    def get(self, key: str, sink: Sink, *, start: int, length: int, deadline_s: float | None) -> None:
        """Read `length` bytes from `start` and pass them to `sink` in blocks, in order, each byte once.

        A block is valid until `sink` returns. If the connection is cut off, reading continues with the first byte
        that was not passed on.

        Raises:
            ObjectNotFoundError: there is no such object.
            StorageError: the object has fewer bytes than requested.
        """
        what = self._what("GET", key)
        buffer = memoryview(bytearray(min(_BLOCK_BYTES, length)))
        done = 0
        end_s = clock.monotonic_s() + DEFAULT_WITHIN_S + length / SLOWEST_BYTES_PER_S

        def receive(response: http.client.HTTPResponse) -> None:
            nonlocal done
            refuse_failure(response, what)
            self._check_range(response, what, first=start + done, end=start + length)
            while done < length:
                count = response.readinto(buffer[: length - done])
                if count == 0:
                    raise TransientError(f"the answer for {what} was cut off")
                sink(buffer[:count])
                done += count
            response.read(1)  # receive the end of the answer, so that the connection can be used again

        def request() -> Request:
            headers = {"range": f"bytes={start + done}-{start + length - 1}"}
            return Request(method="GET", key=key, query={}, headers=headers, answer_bytes=length - done)

        while done < length:
            before = done
            try:
                self._exchange(request, what, receive, deadline_s)
            except TransientError:
                # If bytes have arrived, read on. Without `deadline_s`, each `_exchange` has a time limit of its own,
                # and `end_s` limits the whole read.
                if done == before or clock.monotonic_s() > end_s:
                    raise

    def _check_range(self, response: http.client.HTTPResponse, what: str, *, first: int, end: int | None) -> None:
        """Raise StorageError unless the answer has the bytes from `first` to `end`. If `end` is None, to the object's
        end."""
        found = _RANGE.fullmatch(response.headers.get("Content-Range") or "")
        start, last, size = map(int, found.groups()) if found is not None else (-1, 0, 0)
        if start == first <= last < size < (end or 0):
            raise StorageError(f"{what}: the object has {size} bytes, not {end}")
        if start != first or last + 1 != (size if end is None else end) or not start <= last < size:
            raise StorageError(f"{what}: the server's answer has another range of bytes than the request")


def _digest(marker: Mapping[str, str]) -> bytes:
    """A short value in the place of a marker, which a server may make long."""
    return hashlib.sha256("".join(marker.values()).encode()).digest()


def _is_last(page: ElementTree.Element, name: str) -> bool:
    """Whether no page follows `page`, which lists elements called `name`.

    Raises:
        ValueError: the page does not state it clearly, or does not have the stated number of objects.
    """
    ends = [element.text or "" for element in page.findall("IsTruncated")]
    # S3, Ceph RGW, MinIO and moto state it on each page of objects. Listings of parts or uploads may not state it.
    num_least = 1 if name == "Contents" else 0
    if not num_least <= len(ends) <= 1 or not set(ends) <= {"true", "false"}:
        raise ValueError("the page does not state whether it is the last one")
    # Listings of parts, and of uploads, may name the last part or key on their last page, too.
    is_last = ends == ["false"] or not ends
    markers = ["NextContinuationToken", *([] if ends else ["NextKeyMarker", "NextPartNumberMarker"])]
    if is_last and any(text_in(page, marker) for marker in markers):
        raise ValueError("the last page names the next one")
    for element in page.findall("KeyCount"):
        if size_of(element.text) != sum(1 for _ in page.iter(name)):
            raise ValueError("the page has another number of objects than it states")
    return is_last
