"""Answers that must arrive in time, over real connections."""

import functools
import http.client
import socket
import sys
import threading
from typing import Any, cast

import pytest

from safepoint.foundation import clock
from safepoint.foundation.closed_requests import TimedResponse

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
