"""Sends requests to S3, repeats them, and receives their answers, which may be hostile.

Promises: the body of an answer takes no more memory than the limit of its kind: a page of a listing, another answer,
or the description of an error. An answer that does not have the form that S3 gives it is an error. A request and its
answer end at the caller's deadline. They end earlier if they take longer than the timeout of a request plus the time
that their bytes take at SLOWEST_BYTES_PER_S.

Connections are kept open and used again. Through an unencrypted connection, the kernel sends a file's bytes without
passing them through Python.
"""

import base64
import contextlib
import functools
import http.client
import os
import re
import socket
import ssl
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, TypeVar, cast
from urllib.parse import SplitResult, unquote, urlsplit
from xml.etree import ElementTree

from safepoint.errors import StorageError, TransientError
from safepoint.foundation import clock
from safepoint.foundation.closed_requests import TimedResponse, TimeLimit, limit_connecting
from safepoint.storage import failures
from safepoint.storage.options import StorageOptions, proxy_of
from safepoint.storage.s3.answers import SLOWEST_BYTES_PER_S, OtherAnswerError, is_error, other_answer, parsed
from safepoint.storage.s3.credentials import Keys, KeySource
from safepoint.storage.s3.file_parts import FilePart, PartReader
from safepoint.storage.s3.retry import retry
from safepoint.storage.s3.signing import encoded_path, encoded_query, signed_headers

_BLOCK_BYTES = 1 << 20
_RECEIVED_BYTES = 64 << 10
_MOST_PAGE_BYTES = 16 << 20
"""The limit of an answer in XML. A page of a listing has 1000 names."""
_MOST_BODY_BYTES = 64 << 10
"""The limit of all other answers, and of the description of an error. S3 sends no body, or a few hundred bytes."""
_MD5 = re.compile(r"[0-9a-f]{32}")
_ENCRYPTION = "x-amz-server-side-encryption"
_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")
_BROKEN = (OSError, http.client.HTTPException, ElementTree.ParseError)
"""What the standard library raises if a connection breaks."""
_T = TypeVar("_T")


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
        answer: the outermost element of the answer's XML; None if the answer has no XML.
    """

    method: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    body: bytes | memoryview | FilePart = b""
    md5: str = ""
    answer_bytes: int = 0
    answer: re.Pattern[str] | None = None

    @property
    def size_bytes(self) -> int:
        """The size of the body."""
        return self.body.size_bytes if isinstance(self.body, FilePart) else len(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer with a status from 200 to 299.

    Args:
        root: its XML, if the request expects XML.
        status: the status.
        headers: the headers.
        body: the bytes of the body.
    """

    root: ElementTree.Element | None
    status: int
    headers: Message
    body: bytearray

    @property
    def etag(self) -> str:
        """The ETag without its quotation marks; empty if there is none."""
        return (self.headers.get("ETag") or "").strip('"')

    @property
    def xml(self) -> ElementTree.Element:
        """The XML of the answer to a request that expects XML."""
        assert self.root is not None
        return self.root


class S3Exchange:
    """Sends requests to one bucket.

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

    def _what(self, method: str, key: str) -> str:
        return f"{method} s3://{self._bucket}/{key}"

    def _call(self, request: Request, deadline_s: float | None, *, most_tries: int | None = None) -> Answer:
        what = self._what(request.method, request.key)

        def receive(response: http.client.HTTPResponse) -> Answer:
            refuse_failure(response, what)
            most_bytes = _MOST_BODY_BYTES if request.answer is None else _MOST_PAGE_BYTES
            data = received(response, most_bytes + 1)
            if len(data) > most_bytes:
                raise other_answer(what)
            if response.length:
                raise TransientError(f"the answer for {what} was cut off")
            # A server may fail after it has sent the status 200. Then the body describes an error.
            if is_error(data):
                raise refusal(response.status, data, what)
            root = parsed(data, what, request.answer) if request.answer is not None else None
            answer = Answer(root=root, status=response.status, headers=response.headers, body=data)
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
        request: Callable[[], Request],
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
            now_s = clock.monotonic_s()
            until_s = now_s + timeout_s + (sent.size_bytes + sent.answer_bytes) / SLOWEST_BYTES_PER_S
            until_s = until_s if deadline_s is None else min(until_s, deadline_s)
            connecting, whole = TimeLimit(min(now_s + timeout_s, until_s)), TimeLimit(until_s)
            connection.response_class = cast("Any", functools.partial(TimedResponse, until_s=until_s))
            limit_connecting(connection, connecting)
            # If the server closes the connection after this answer, http.client leaves the socket to the response.
            # So both the connection and the response are closed.
            with contextlib.ExitStack() as closing:
                closing.callback(connection.close)
                try:
                    if connection.sock is None:
                        with connecting:
                            connection.connect()
                    with whole:
                        whole.watch(cast("socket.socket", connection.sock))
                        response = closing.enter_context(self._send(connection, sent, keys, what))
                        result = receive(response)
                except (*_BROKEN, OtherAnswerError, TransientError) as error:
                    if isinstance(error, StorageError) and not whole.has_passed:
                        raise
                    # An answer that the limit has cut off may look like another answer.
                    why = TimeoutError("the request took too long") if whole.has_passed else error
                    raise failures.from_connection(f"{type(why).__name__} {why}", what) from error
                closing.pop_all()
            self._idle.append(connection)
            return result

        try_s = self._options.request_timeout_s
        return retry(attempt, deadline_s=deadline_s, try_s=try_s, most_tries=most_tries)

    def _send(
        self, connection: http.client.HTTPConnection, request: Request, keys: Keys, what: str
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
        except (BrokenPipeError, ConnectionResetError):
            # A server that refuses a request may close the connection before it has read the body. Its answer has
            # the reason.
            with contextlib.suppress(OSError, http.client.HTTPException):
                refuse_failure(connection.getresponse(), what)
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


def _send_body(connection: http.client.HTTPConnection, body: bytes | memoryview | FilePart) -> None:
    connected = connection.sock
    if not isinstance(body, FilePart):
        for begin in range(0, len(body), _BLOCK_BYTES):  # in blocks, because the timeout applies to each call
            connected.sendall(body[begin : begin + _BLOCK_BYTES])
        return
    start, end = body.start, body.start + body.size_bytes
    if os.fstat(body.file.descriptor).st_size < end:
        raise StorageError(f"{body.file.name} became shorter while it was uploaded")
    reader = PartReader(body.file.descriptor, start)
    if not isinstance(connected, ssl.SSLSocket):
        connected.sendfile(cast("Any", reader), offset=start, count=body.size_bytes)
        return
    while block := reader.read(min(_BLOCK_BYTES, end - reader.position)):
        connected.sendall(block)
    if reader.position < end:
        raise StorageError(f"{body.file.name} became shorter while it was uploaded")


def received(response: http.client.HTTPResponse, most_bytes: int) -> bytearray:
    """The body of an answer, at most its first `most_bytes` bytes.

    `HTTPResponse.read` would keep each chunk of the body as an object of its own, and a server decides how small the
    chunks are.
    """
    found, block = bytearray(), memoryview(bytearray(min(_RECEIVED_BYTES, most_bytes)))
    while count := response.readinto(block[: most_bytes - len(found)]):
        found += block[:count]
    return found


def is_md5(etag: str) -> bool:
    """Whether an ETag looks like the MD5 of the content."""
    return _MD5.fullmatch(etag) is not None


def refuse_failure(response: http.client.HTTPResponse, what: str) -> None:
    """Raise the error for an answer whose status states no success."""
    if not 200 <= response.status < 300:
        raise refusal(response.status, received(response, _MOST_BODY_BYTES), what)


def refusal(status: int, data: bytes | bytearray, what: str) -> StorageError:
    """The error for an answer whose status states a failure.

    Also the error for an answer whose status states a success, but whose body describes a failure.
    """
    code = _CODE.search(data)
    return failures.from_status(status if status >= 300 else 500, code[1].decode() if code else "", what)
