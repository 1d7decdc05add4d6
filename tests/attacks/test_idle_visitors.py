"""Programs that are not signed in keep connections to the dashboard open, and send no request, or half of one."""

import contextlib
import http.client
import socket
import ssl
from collections.abc import Generator
from pathlib import Path

import pytest

from safepoint.foundation import clock
from tests.support.browser import Served, served
from tests.support.certificates import make_certificates

_LIMIT_S = 10.0
HALVES = {
    "nothing": b"",
    "half of a header": b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nX-Header: ",
    "half of a form": b"POST /enter HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\na=",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path


@contextlib.contextmanager
def connections(port: int, count: int, data: bytes) -> Generator[list[socket.socket]]:
    opened = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(count)]
    try:
        for one in opened:
            with contextlib.suppress(OSError):  # the server has closed it
                one.sendall(data)
        yield opened
    finally:
        for one in opened:
            one.close()


def status(server: Served, path: str, cookie: str = "", context: ssl.SSLContext | None = None) -> int:
    if context is None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=context)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Cookie": cookie} if cookie else {})
        return connection.getresponse().status


def enter(server: Served, context: ssl.SSLContext | None = None) -> str:
    """Use the link, and return the cookie."""
    path = "/" + server.link.partition("://")[2].partition("/")[2]
    if context is None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=context)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().headers["set-cookie"].split(";")[0]


@pytest.mark.parametrize("kind", HALVES)
def test_many_connections(kind: str, home: Path) -> None:
    """The visitor is served, and the other connections end."""
    with served(home) as server:
        cookie = enter(server)
        with connections(server.port, 300, HALVES[kind]) as others:
            began_s = clock.monotonic_s()
            assert status(server, "/jobs", cookie) == 200
            assert status(server, "/jobs") == 401
            for one in others:
                with contextlib.suppress(ConnectionError):
                    while one.recv(1 << 16):  # an answer, and then the end
                        pass
            # The bound is generous: without a limit, the connections would stay open for ever.
            assert clock.monotonic_s() - began_s < 6 * _LIMIT_S
        assert status(server, "/jobs", cookie) == 200


def test_a_connection_of_a_session_stays(home: Path) -> None:
    """Further connections of others end those of others."""
    with served(home) as server:
        cookie = enter(server)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
            socket_before = None
            with contextlib.ExitStack() as others:
                for _ in range(20):  # in between requests, because an idle connection ends after five seconds
                    connection.request("GET", "/static/dashboard.css", headers={"Cookie": cookie})
                    answer = connection.getresponse()
                    answer.read()
                    assert answer.status == 200
                    assert socket_before in {None, connection.sock}, "the connection stays"
                    socket_before = connection.sock
                    others.enter_context(connections(server.port, 10, b""))


def test_handshakes_that_never_end(home: Path) -> None:
    folder = make_certificates(home)
    pem = str(folder / "server.pem")
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    with served(home, "--tls-certificate", pem, "--tls-key", pem) as server:
        cookie = enter(server, context)
        with connections(server.port, 1100, b"\x16\x03\x01\x02\x00") as others:
            assert status(server, "/jobs", cookie, context) == 200
            for one in others[:900]:  # the oldest ones; asyncio alone would close them after 60 s
                one.settimeout(2 * _LIMIT_S)
                with contextlib.suppress(ConnectionError):
                    assert one.recv(1) == b""


def test_many_connections_of_a_session(home: Path) -> None:
    """A viewer who keeps pages open does not use up the connections of others."""
    with served(home) as server:
        viewer = enter(server)
        server.next_link()
        operator = enter(server)
        ask = f"GET /live HTTP/1.1\r\nHost: localhost\r\nCookie: {viewer}\r\n\r\n".encode()
        with contextlib.ExitStack() as opened:
            for _ in range(300):
                one = opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
                one.sendall(ask)
                assert one.recv(1 << 16)
            assert status(server, "/jobs", operator) == 200
            assert status(server, "/jobs", viewer) == 200
