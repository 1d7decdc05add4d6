"""Answers that must arrive in time, over real connections."""

import functools
import http.client
import socket
import sys
import threading
import urllib.request
from typing import Any, cast

import pytest

from safepoint.foundation import clock
from safepoint.foundation.closed_requests import TimedResponse, exchange

_HEADERS, _BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n", b"body"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has TCP_QUICKACK")
def test_headers_are_acknowledged_before_the_body_is_awaited() -> None:
    """A server that sends the body when the headers have been acknowledged does not wait for Linux's 40 ms."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_serve, args=(server, 4))
        thread.start()
        connection = http.client.HTTPConnection(*server.getsockname(), timeout=10)
        until_s = clock.monotonic_s() + 10
        connection.response_class = cast("Any", functools.partial(TimedResponse, until_s=until_s))
        acknowledges_at_once: list[int] = []
        for _ in range(4):
            connection.request("GET", "/")
            answer = connection.getresponse()
            # The kernel delays acknowledgements on a connection on which requests and answers take turns.
            acknowledges_at_once.append(connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK))
            assert answer.read(4) == _BODY
        connection.close()
        thread.join(10)
    assert acknowledges_at_once == [1, 1, 1, 1]


def _serve(server: socket.socket, num_requests: int) -> None:
    connection, _ = server.accept()
    with connection:
        for _ in range(num_requests):
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                request += connection.recv(4096)
            connection.sendall(_HEADERS)
            connection.sendall(_BODY)
        connection.recv(1)  # the client closes first: the end of a connection changes how the kernel acknowledges


def _answered(answer: bytes, *, max_bytes: int | None) -> bytes:
    """What `exchange` returns if the server sends `answer` and closes the connection."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                request += connection.recv(4096)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{server.getsockname()[1]}/")
            return exchange(request, to="the server", timeout_s=10, max_bytes=max_bytes)
        finally:
            thread.join(10)


_OK = b"HTTP/1.1 200 OK\r\n"
_LONG = [
    _OK + b"Content-Length: 11\r\n\r\n" + b"x" * 11,
    _OK + b"Connection: close\r\n\r\n" + b"x" * 11,
    _OK + b"Transfer-Encoding: chunked\r\n\r\nb\r\n" + b"x" * 11 + b"\r\n0\r\n\r\n",
]


@pytest.mark.parametrize("answer", _LONG)
def test_a_body_that_is_too_long_is_refused(answer: bytes) -> None:
    """A caller that got only its beginning could take it for the whole."""
    with pytest.raises(OSError, match=r"^the answer of the server has more than 10 bytes$"):
        _answered(answer, max_bytes=10)
    assert _answered(answer, max_bytes=11) == b"x" * 11
    assert _answered(answer, max_bytes=None) == b""


@pytest.mark.parametrize("body", [b"", b"x", b"x" * 10])
def test_a_body_that_is_cut_off_is_refused(body: bytes) -> None:
    """The connection ends before the end that the headers, or the chunks, state."""
    with pytest.raises(OSError, match="the connection to the server ended before the end of its answer"):
        _answered(_OK + b"Content-Length: 11\r\n\r\n" + body, max_bytes=100)
    with pytest.raises(OSError, match="the answer of the server is not HTTP: IncompleteRead"):
        _answered(_OK + b"Transfer-Encoding: chunked\r\n\r\nb\r\n" + body, max_bytes=100)


def test_an_answer_without_a_body() -> None:
    assert _answered(b"HTTP/1.1 204 No Content\r\n\r\n", max_bytes=10) == b""
    assert _answered(_OK + b"Content-Length: 0\r\n\r\n", max_bytes=10) == b""
