"""The five S3 requests about multipart uploads, which obstore keeps to itself.

Connections are kept open and used again; a file's bytes go from the page cache to the socket without passing through
Python where the connection is not encrypted.
"""

import http.client
import os
import re
import ssl
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

from holdfast.errors import StorageError
from holdfast.storage import failures
from holdfast.storage.options import StorageOptions
from holdfast.storage.retry import retry
from holdfast.storage.signing import encoded_path, encoded_query, signed_headers

_BLOCK_BYTES = 1 << 20
_MAX_ANSWER_BYTES = 16 << 20
_CODE = re.compile(rb"<Code>([A-Za-z0-9]+)</Code>")


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadId:
    """An upload that was begun.

    Args:
        key: within the bucket.
        upload_id: the server's name for it.
        initiated: when it was begun, RFC 3339 by the server's clock.
    """

    key: str
    upload_id: str
    initiated: str = ""

    @property
    def begun_s(self) -> float:
        """When it was begun, seconds since 1970; infinite when the server does not say."""
        try:
            return datetime.fromisoformat(self.initiated).timestamp()
        except ValueError:
            return float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOnServer:
    """A part that the server has.

    Args:
        number: from 1.
        etag: as the server names it; the MD5 of the part on most servers.
        size_bytes: its size.
    """

    number: int
    etag: str
    size_bytes: int


class S3Uploads:
    """Multipart uploads into one bucket.

    Args:
        bucket: the bucket.
        options: endpoint and credentials; keys must be there (`StorageOptions.has_keys`).
    """

    def __init__(self, bucket: str, options: StorageOptions) -> None:
        self._bucket = bucket
        self._options = options
        endpoint = urlsplit(options.endpoint or f"https://{bucket}.s3.{options.region}.amazonaws.com")
        self._is_tls = endpoint.scheme.lower() == "https"
        self._netloc = endpoint.netloc
        # AWS itself wants the bucket in the host's name, other servers in the path.
        self._root = f"{endpoint.path.rstrip('/')}/{bucket}" if options.endpoint else ""
        self._tls = _tls_context(options) if self._is_tls else None
        self._idle: list[http.client.HTTPConnection] = []  # append and pop are atomic
        weakref.finalize(self, _close_all, self._idle)

    def begin(self, key: str, *, deadline_s: float | None) -> UploadId:
        """Begin an upload."""
        answer = self._call(_Request(method="POST", key=key, query={"uploads": ""}), deadline_s)
        return UploadId(key=key, upload_id=_text(answer.xml, "UploadId"))

    def find(self, prefix: str, *, deadline_s: float | None) -> Iterator[UploadId]:
        """The unfinished uploads of all keys that begin with `prefix`."""
        marker: dict[str, str] = {}
        while True:
            query = {"uploads": "", "prefix": prefix, "max-uploads": "1000", **marker}
            page = self._call(_Request(method="GET", key="", query=query), deadline_s).xml
            for upload in page.iter("Upload"):
                yield UploadId(
                    key=_text(upload, "Key"),
                    upload_id=_text(upload, "UploadId"),
                    initiated=_text(upload, "Initiated"),
                )
            if _text(page, "IsTruncated") != "true":
                return
            marker = {
                "key-marker": _text(page, "NextKeyMarker"),
                "upload-id-marker": _text(page, "NextUploadIdMarker"),
            }

    def parts(self, upload: UploadId, *, deadline_s: float | None) -> Iterator[PartOnServer]:
        """The parts of `upload` that have arrived."""
        marker = "0"
        while True:
            query = {"uploadId": upload.upload_id, "max-parts": "1000", "part-number-marker": marker}
            page = self._call(_Request(method="GET", key=upload.key, query=query), deadline_s).xml
            for part in page.iter("Part"):
                yield PartOnServer(
                    number=int(_text(part, "PartNumber")),
                    etag=_text(part, "ETag").strip('"'),
                    size_bytes=int(_text(part, "Size")),
                )
            if _text(page, "IsTruncated") != "true":
                return
            marker = _text(page, "NextPartNumberMarker")

    def send_part(
        self, upload: UploadId, number: int, source: Path, *, start: int, size_bytes: int, deadline_s: float | None
    ) -> str:
        """Send `size_bytes` of `source` from `start` on as part `number` and return its ETag."""
        query = {"partNumber": str(number), "uploadId": upload.upload_id}
        window = _Window(source=source, start=start, size_bytes=size_bytes)
        return self._call(_Request(method="PUT", key=upload.key, query=query, window=window), deadline_s).etag

    def complete(self, upload: UploadId, etags: Mapping[int, str], *, deadline_s: float | None) -> None:
        """Make the parts one object.

        Raises:
            ObjectNotFoundError: there is no such upload: it was aborted, or an earlier try completed it.
        """
        parts = "".join(
            f'<Part><PartNumber>{number}</PartNumber><ETag>"{etag}"</ETag></Part>'
            for number, etag in sorted(etags.items())
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        query = {"uploadId": upload.upload_id}
        self._call(_Request(method="POST", key=upload.key, query=query, body=body), deadline_s)

    def abort(self, upload: UploadId, *, deadline_s: float | None) -> None:
        """Forget an upload and its parts."""
        self._call(_Request(method="DELETE", key=upload.key, query={"uploadId": upload.upload_id}), deadline_s)

    def _call(self, request: "_Request", deadline_s: float | None) -> "_Answer":
        what = f"{request.method} s3://{self._bucket}/{request.key}"

        def attempt(timeout_s: float) -> _Answer:
            connection = self._connection(timeout_s)
            try:
                answer = self._once(connection, request, what)
            except (OSError, http.client.HTTPException, ElementTree.ParseError) as error:
                connection.close()
                raise failures.from_connection(f"{type(error).__name__} {error}", what) from error
            except BaseException:
                connection.close()
                raise
            self._idle.append(connection)
            return answer

        return retry(attempt, deadline_s=deadline_s, try_s=self._options.request_timeout_s)

    def _once(self, connection: http.client.HTTPConnection, request: "_Request", what: str) -> "_Answer":
        options, window = self._options, request.window
        assert options.access_key_id is not None
        assert options.secret_access_key is not None
        path = encoded_path(f"{self._root}/{request.key}" if request.key else self._root or "/")
        length = window.size_bytes if window else len(request.body)
        headers = signed_headers(
            method=request.method,
            path=path,
            query=request.query,
            headers={"host": self._netloc, "content-length": str(length)},
            access_key_id=options.access_key_id,
            secret_access_key=options.secret_access_key,
            session_token=options.session_token,
            region=options.region,
        )
        url = f"{path}?{encoded_query(request.query)}"
        connection.putrequest(request.method, url, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders(request.body or None)
        if window is not None:
            _send_window(connection, window)
        response = connection.getresponse()
        data = response.read(_MAX_ANSWER_BYTES)
        # A server may answer 200 first and find out later that it failed: then the body is an error.
        if response.status >= 300 or b"<Error>" in data:
            code = _CODE.search(data)
            status = response.status if response.status >= 300 else 500
            raise failures.from_status(status, code[1].decode() if code else "", what)
        root = _parsed(data, what) if request.method == "GET" or "uploads" in request.query else None
        return _Answer(root=root, etag=(response.headers.get("ETag") or "").strip('"'))

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        try:
            connection = self._idle.pop()
        except IndexError:
            if self._is_tls:
                return http.client.HTTPSConnection(self._netloc, timeout=timeout_s, context=self._tls)
            return http.client.HTTPConnection(self._netloc, timeout=timeout_s)
        connection.timeout = timeout_s
        if connection.sock is not None:  # the server has closed it otherwise, and it opens itself again
            connection.sock.settimeout(timeout_s)
        return connection


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    for connection in connections:
        connection.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    source: Path
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    method: str
    key: str
    query: Mapping[str, str]
    body: bytes = b""
    window: _Window | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    root: ElementTree.Element | None
    etag: str

    @property
    def xml(self) -> ElementTree.Element:
        assert self.root is not None
        return self.root


def _send_window(connection: http.client.HTTPConnection, window: _Window) -> None:
    socket, start, end = connection.sock, window.start, window.start + window.size_bytes
    with window.source.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size < end:
            raise StorageError(f"{window.source} became shorter while it was uploaded")
        if not isinstance(socket, ssl.SSLSocket):
            socket.sendfile(file, offset=start, count=window.size_bytes)
            return
        while start < end:
            block = os.pread(file.fileno(), min(_BLOCK_BYTES, end - start), start)
            socket.sendall(block)
            start += len(block)


def _tls_context(options: StorageOptions) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=options.ca_bundle)
    if not options.verify_tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _parsed(data: bytes, what: str) -> ElementTree.Element:
    # No entity is ever defined in these answers; without a DTD none can be expanded.
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise StorageError(f"{what}: the server's answer is not S3's")
    root = ElementTree.fromstring(data)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def _text(element: ElementTree.Element, name: str) -> str:
    return (element.findtext(name) or "").strip()


__all__ = ["PartOnServer", "S3Uploads", "UploadId"]
