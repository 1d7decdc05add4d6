"""Requests to S3: how they are sent and repeated; uploads that can be continued, listings, and ranged reads.

A ranged read goes from the socket into a small buffer that stays in the processor's cache. So it takes a fraction of
the processor time that a library such as obstore takes (docs/benchmarks.md).

Connections are kept open and used again. Through an unencrypted connection, the kernel sends a file's bytes without
passing them through Python.
"""

import base64
import contextlib
import functools
import http.client
import os
import re
import ssl
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, TypeVar, cast
from urllib.parse import SplitResult, unquote, unquote_plus, urlsplit
from xml.etree import ElementTree

from safepoint.errors import StorageError, TransientError
from safepoint.foundation import clock
from safepoint.foundation.closed_requests import TimedResponse, limit_connecting
from safepoint.storage import failures
from safepoint.storage.options import StorageOptions, proxy_of
from safepoint.storage.s3.answers import (
    SLOWEST_BYTES_PER_S,
    number_in,
    other_answer,
    parsed,
    present,
    refusing_other_answers,
    text_in,
)
from safepoint.storage.s3.credentials import Keys, KeySource
from safepoint.storage.s3.file_parts import FilePart, PartReader
from safepoint.storage.s3.retry import DEFAULT_WITHIN_S, retry
from safepoint.storage.s3.signing import encoded_path, encoded_query, signed_headers
from safepoint.storage.store import Sink, StoredObject

_BLOCK_BYTES = 1 << 20
MAX_ANSWER_BYTES = 16 << 20
_MD5 = re.compile(r"[0-9a-f]{32}")
_ENCRYPTION = "x-amz-server-side-encryption"
_RANGE = re.compile(r"bytes (\d{1,19})-\d{1,19}/(\d{1,19})")
_T = TypeVar("_T")
_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")
_ERROR = re.compile(rb"<Error[\s>]")
MOST_LISTED = 2_000_000
MOST_LISTED_BYTES = 1 << 30
"""The limits of a listing: the number of names, and the bytes of all pages together. 2,000,000 `StoredObject`s take
about 1 GB of memory."""
_LIST_WITHIN_S = 1800.0
"""How long a listing may take."""


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


class S3Requests:
    """Requests to one bucket.

    Args:
        bucket: the bucket.
        options: the endpoint and its certificates.
        keys: the source of the keys that sign the requests.
    """

    def __init__(self, bucket: str, options: StorageOptions, keys: KeySource) -> None:
        self._bucket = bucket
        self._options = options
        self._keys = keys
        endpoint = urlsplit(options.endpoint or f"https://{bucket}.s3.{options.region}.amazonaws.com")
        self._is_tls = endpoint.scheme.lower() == "https"
        self._netloc = endpoint.netloc
        # AWS requires the bucket in the host name, other servers accept it in the path.
        self._root = f"{endpoint.path.rstrip('/')}/{bucket}" if options.endpoint else ""
        self._tls = options.tls_context() if self._is_tls else None
        self._proxy = urlsplit(proxy_of(endpoint.geturl()) or "")
        # Several threads use this list; `append` and `pop` are atomic.
        self._idle: list[http.client.HTTPConnection] = []
        weakref.finalize(self, _close_all, self._idle)

    def begin(self, key: str, *, deadline_s: float | None) -> UploadId:
        """Begin an upload."""
        answer = self._call(Request(method="POST", key=key, query={"uploads": ""}), deadline_s)
        # The name is required: a part that is sent without an upload's name would replace the object itself.
        with refusing_other_answers(self._what("POST", key)):
            return UploadId(key=key, upload_id=present(text_in(answer.xml, "UploadId")))

    def objects(self, prefix: str, *, deadline_s: float | None) -> Iterator[StoredObject]:
        """The objects whose keys within the bucket begin with `prefix`, even if `Store` refuses their names."""
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"}
        markers = {"continuation-token": "NextContinuationToken"}
        for item in self._list("", query, markers, "Contents", deadline_s):
            key = item.findtext("Key") or ""
            if not key.startswith(prefix):  # a hostile server may list keys outside the prefix
                continue
            with refusing_other_answers(self._what("GET", "")):
                found = StoredObject(
                    key=key,
                    size_bytes=number_in(item, "Size"),
                    version=text_in(item, "ETag"),
                    modified_s=clock.parse_utc(text_in(item, "LastModified")),
                )
            yield found

    def find(self, prefix: str, *, deadline_s: float | None) -> Iterator[UploadId]:
        """The unfinished uploads of all keys that begin with `prefix`."""
        query = {"uploads": "", "prefix": prefix, "max-uploads": "1000"}
        markers = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
        for upload in self._list("", query, markers, "Upload", deadline_s):
            key = upload.findtext("Key") or ""
            if key.startswith(prefix):  # see `objects`
                name, begun = text_in(upload, "UploadId"), text_in(upload, "Initiated")
                yield UploadId(key=key, upload_id=name, initiated=begun)

    def parts(self, upload: UploadId, *, deadline_s: float | None) -> Iterator[PartOnServer]:
        """The parts of `upload` that have arrived."""
        query = {"uploadId": upload.upload_id, "max-parts": "1000"}
        markers = {"part-number-marker": "NextPartNumberMarker"}
        for part in self._list(upload.key, query, markers, "Part", deadline_s):
            with refusing_other_answers(self._what("GET", upload.key)):
                found = PartOnServer(
                    number=number_in(part, "PartNumber"),
                    etag=text_in(part, "ETag").strip('"'),
                    size_bytes=number_in(part, "Size"),
                )
            yield found

    def _list(
        self, key: str, query: Mapping[str, str], markers: Mapping[str, str], name: str, deadline_s: float | None
    ) -> Iterator[ElementTree.Element]:
        """The elements called `name` on all pages of a listing.

        `markers` maps each query parameter that requests the next page to the name of an element. The text of this
        element on the current page is the value of the parameter.
        """
        what = self._what("GET", key)
        marker: dict[str, str] = {}
        seen, num_listed, num_bytes, end_s = {""}, 0, 0, clock.monotonic_s() + _LIST_WITHIN_S
        while True:
            if clock.monotonic_s() > end_s:
                raise TransientError(f"{what}: the listing took more than {_LIST_WITHIN_S:.0f} s")
            answer = self._call(Request(method="GET", key=key, query={**query, **marker}), deadline_s)
            page, num_bytes = answer.xml, num_bytes + answer.size_bytes
            if page.findtext("EncodingType") == "url":
                for element in page.iter():
                    if element.tag == "Key":
                        element.text = unquote_plus(element.text or "", errors="surrogateescape")
            for element in page.iter(name):
                num_listed += 1
                if num_listed > MOST_LISTED or num_bytes > MOST_LISTED_BYTES:
                    count = f"more than {min(num_listed, MOST_LISTED)} names below {query.get('prefix', key)!r}"
                    raise StorageError(
                        f"{what}: there are too many names to list, {count}",
                        hint="use a location that only this run writes to",
                    )
                yield element
            if text_in(page, "IsTruncated") != "true":
                return
            marker = {parameter: text_in(page, element) for parameter, element in markers.items()}
            if "".join(marker.values()) in seen:
                raise other_answer(what)
            seen.add("".join(marker.values()))

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
        return self._call(request, deadline_s).etag

    def complete(self, upload: UploadId, etags: Mapping[int, str], *, deadline_s: float | None) -> None:
        """Complete an upload: the store joins its parts into one object.

        The request is sent only once: if its answer was lost, a second request would fail.

        Raises:
            ObjectNotFoundError: there is no such upload: it was aborted, or an earlier try completed it.
            TransientError: it is not known whether the server has completed the upload.
        """
        parts = "".join(
            f'<Part><PartNumber>{number}</PartNumber><ETag>"{etag}"</ETag></Part>'
            for number, etag in sorted(etags.items())
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        query = {"uploadId": upload.upload_id}
        self._call(Request(method="POST", key=upload.key, query=query, body=body), deadline_s, most_tries=1)

    def abort(self, upload: UploadId, *, deadline_s: float | None) -> None:
        """Make the server delete an unfinished upload and its parts."""
        self._call(Request(method="DELETE", key=upload.key, query={"uploadId": upload.upload_id}), deadline_s)

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
            if response.status >= 300:
                raise refusal(response.status, response.read(MAX_ANSWER_BYTES), what)
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

    def _what(self, method: str, key: str) -> str:
        return f"{method} s3://{self._bucket}/{key}"

    def _check_range(self, response: http.client.HTTPResponse, what: str, *, first: int, end: int) -> None:
        found = _RANGE.fullmatch(response.headers.get("Content-Range") or "")
        if found is None or int(found[1]) != first:
            raise StorageError(f"{what}: the server's answer has another range of bytes than the request")
        if int(found[2]) < end:
            raise StorageError(f"{what}: the object has {found[2]} bytes, not {end}")

    def _call(self, request: "Request", deadline_s: float | None, *, most_tries: int | None = None) -> "_Answer":
        what = self._what(request.method, request.key)

        def receive(response: http.client.HTTPResponse) -> _Answer:
            data = response.read(MAX_ANSWER_BYTES)
            # A server may fail after it has sent the status 200. Then the body describes an error.
            if response.status >= 300 or _ERROR.search(data):
                raise refusal(response.status, data, what)
            if response.length and len(data) < MAX_ANSWER_BYTES:  # the body may have been the description of an error
                raise TransientError(f"the answer for {what} was cut off")
            root = parsed(data, what) if request.method == "GET" or "uploads" in request.query else None
            answer = _Answer(root=root, headers=response.headers, size_bytes=len(data))
            # If the object is encrypted with another key than the server's own, its ETag is not an MD5. Servers that
            # support such keys compare Content-MD5.
            is_encrypted = response.headers.get(_ENCRYPTION, "AES256") != "AES256"
            is_encrypted = is_encrypted or f"{_ENCRYPTION}-customer-algorithm" in response.headers
            if request.md5 not in {"", answer.etag} and is_md5(answer.etag) and not is_encrypted:
                raise failures.changed_in_transit(what)
            return answer

        return self._exchange(lambda: request, what, receive, deadline_s, most_tries=most_tries)

    def _exchange(
        self,
        request: "Callable[[], Request]",
        what: str,
        receive: Callable[[http.client.HTTPResponse], _T],
        deadline_s: float | None,
        *,
        most_tries: int | None = None,
    ) -> _T:
        def attempt(timeout_s: float) -> _T:
            return self._keys.use(lambda keys: exchange(timeout_s, keys))

        def exchange(timeout_s: float, keys: Keys) -> _T:
            connection, sent = self._connection(timeout_s), request()
            until_s = clock.monotonic_s() + timeout_s + (sent.size_bytes + sent.answer_bytes) / SLOWEST_BYTES_PER_S
            connection.response_class = cast("Any", functools.partial(TimedResponse, until_s=until_s))
            limit_connecting(connection, clock.monotonic_s() + timeout_s)
            # If the server closes the connection after this answer, http.client leaves the socket to the response.
            # So both the connection and the response are closed.
            with contextlib.ExitStack() as closing:
                closing.callback(connection.close)
                try:
                    response = closing.enter_context(self._send(connection, sent, keys, what))
                    result = receive(response)
                except (OSError, http.client.HTTPException, ElementTree.ParseError) as error:
                    raise failures.from_connection(f"{type(error).__name__} {error}", what) from error
                closing.pop_all()
            self._idle.append(connection)
            return result

        try_s = self._options.request_timeout_s
        return retry(attempt, deadline_s=deadline_s, try_s=try_s, most_tries=most_tries)

    def _send(
        self, connection: http.client.HTTPConnection, request: "Request", keys: Keys, what: str
    ) -> http.client.HTTPResponse:
        body = request.body
        path = encoded_path(f"{self._root}/{request.key}" if request.key else self._root or "/")
        headers = signed_headers(
            method=request.method,
            path=path,
            query=request.query,
            headers={"host": self._netloc, "content-length": str(request.size_bytes), **request.headers},
            access_key_id=keys.access_key_id,
            secret_access_key=keys.secret_access_key,
            session_token=keys.session_token,
            region=self._options.region,
        )
        url = f"{path}?{encoded_query(request.query)}" if request.query else path
        connection.putrequest(request.method, url, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        try:
            _send_body(connection, body)
        except (BrokenPipeError, ConnectionResetError) as error:
            # A server that refuses a request may close the connection before it has read the body. Its answer has
            # the reason.
            with contextlib.suppress(OSError, http.client.HTTPException):
                response = connection.getresponse()
                if response.status >= 300:
                    raise refusal(response.status, response.read(MAX_ANSWER_BYTES), what) from error
            raise
        return connection.getresponse()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        try:
            connection = self._idle.pop()
        except IndexError:
            if self._proxy.hostname:
                return self._tunnel(self._proxy, timeout_s)
            if self._is_tls:
                return http.client.HTTPSConnection(self._netloc, timeout=timeout_s, context=self._tls)
            return http.client.HTTPConnection(self._netloc, timeout=timeout_s)
        connection.timeout = timeout_s
        if connection.sock is not None:  # None: the connection was closed, and http.client opens it again
            connection.sock.settimeout(timeout_s)
        return connection

    def _tunnel(self, proxy: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
        """A connection to the server through a proxy. The proxy sees the server's name, but not the requests."""
        address = f"{proxy.hostname}:{proxy.port or 80}"
        connection = http.client.HTTPSConnection(address, timeout=timeout_s, context=self._tls)
        word = f"{unquote(proxy.username or '')}:{unquote(proxy.password or '')}".encode()
        known = {"Proxy-Authorization": f"Basic {base64.b64encode(word).decode()}"} if proxy.username else {}
        connection.set_tunnel(self._netloc, headers=known)
        return connection


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    for connection in connections:
        connection.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that is not signed yet.

    Args:
        method: `GET`, `PUT`, …
        key: the key of the object; empty for the bucket.
        query: names and values, not encoded.
        headers: further headers; names in lower case.
        body: the bytes to send.
        md5: the MD5 of the body, in hexadecimal digits. The ETag of the answer is compared with it; empty for no
            comparison.
        answer_bytes: the expected size of the answer's body; the time limit of the request grows with it.
    """

    method: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    body: bytes | memoryview | FilePart = b""
    md5: str = ""
    answer_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """The size of the body."""
        return self.body.size_bytes if isinstance(self.body, FilePart) else len(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    root: ElementTree.Element | None
    headers: Message
    size_bytes: int

    @property
    def etag(self) -> str:
        return (self.headers.get("ETag") or "").strip('"')

    @property
    def xml(self) -> ElementTree.Element:
        assert self.root is not None
        return self.root


def is_md5(etag: str) -> bool:
    """Whether an ETag looks like the MD5 of the content."""
    return _MD5.fullmatch(etag) is not None


def _send_body(connection: http.client.HTTPConnection, body: bytes | memoryview | FilePart) -> None:
    socket = connection.sock
    if not isinstance(body, FilePart):
        for begin in range(0, len(body), _BLOCK_BYTES):  # in blocks, because the timeout applies to each call
            socket.sendall(body[begin : begin + _BLOCK_BYTES])
        return
    start, end = body.start, body.start + body.size_bytes
    if os.fstat(body.file.descriptor).st_size < end:
        raise StorageError(f"{body.file.name} became shorter while it was uploaded")
    reader = PartReader(body.file.descriptor, start)
    if not isinstance(socket, ssl.SSLSocket):
        socket.sendfile(cast("Any", reader), offset=start, count=body.size_bytes)
        return
    while block := reader.read(min(_BLOCK_BYTES, end - reader.position)):
        socket.sendall(block)
    if reader.position < end:
        raise StorageError(f"{body.file.name} became shorter while it was uploaded")


def refusal(status: int, data: bytes, what: str) -> StorageError:
    """The error for an answer whose status states a failure.

    Also the error for an answer whose status states a success, but whose body describes a failure.
    """
    code = _CODE.search(data)
    return failures.from_status(status if status >= 300 else 500, code[1].decode() if code else "", what)
