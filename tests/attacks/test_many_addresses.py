"""A name server states many addresses for a server, and none of them answers."""

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Generator
from typing import Any

import pytest

from safepoint.foundation import clock
from safepoint.foundation.closed_requests import exchange
from tests.support.patience import PATIENCE

_LIMIT_S = 1.0


@contextlib.contextmanager
def silent_address() -> Generator[int]:
    """A port whose queue of connections is full, so that a further connection waits."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting: list[socket.socket] = []
        try:
            for _ in range(3):
                waiting.append(socket.socket())
                waiting[-1].setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    waiting[-1].connect(server.getsockname())
            yield server.getsockname()[1]
        finally:
            for one in waiting:
                one.close()


def name(monkeypatch: pytest.MonkeyPatch, ports: list[int]) -> None:
    """Let `many.test` have an address for each port."""

    def find(host: str, port: int, *_: Any) -> list[Any]:
        assert host == "many.test"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in ports]

    monkeypatch.setattr(socket, "getaddrinfo", find)


def request() -> bytes:
    one = urllib.request.Request("http://many.test/")
    return exchange(one, to="the server", timeout_s=_LIMIT_S, max_bytes=100)


def test_no_address_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with silent_address() as port:
        name(monkeypatch, [port] * 20)
        began_s = clock.monotonic_s()
        with pytest.raises(OSError, match="timed out"):
            request()
        # Each address alone would take the whole limit.
        assert clock.monotonic_s() - began_s < 10 * _LIMIT_S * PATIENCE


def test_the_last_address_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with silent_address() as port, socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connected:
                connected.recv(1000)
                connected.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nyes")

        thread = threading.Thread(target=answer)
        thread.start()
        name(monkeypatch, [port, port, server.getsockname()[1]])
        assert request() == b"ye"
        thread.join()


def test_there_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    name(monkeypatch, [])
    with pytest.raises(OSError, match="timed out"):
        request()
