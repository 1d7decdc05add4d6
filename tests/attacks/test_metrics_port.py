"""Clients of the metrics port that are slow, many, silent, or send garbage: none takes what the launcher needs."""

import contextlib
import http.client
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.progress import metrics_server
from safepoint.progress.metrics_server import MetricsServer
from safepoint.progress.record import read_progress
from tests.unit.progress.test_record import FULL


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer(lambda: (FULL, False), host="127.0.0.1", port=0)
    yield server
    server.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def answer(server: MetricsServer) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        return connection.getresponse().status


def connect(server: MetricsServer, count: int, sent: bytes = b"GET /metrics HTTP/1.0\r\n") -> list[socket.socket]:
    """Connections that have sent a part of a request; those that the server has closed are among them."""
    made: list[socket.socket] = []
    for _ in range(count):
        made.append(socket.create_connection(("127.0.0.1", server.port), timeout=10))
        with contextlib.suppress(OSError):
            made[-1].sendall(sent)
    return made


def is_closed(connection: socket.socket, within_s: float) -> bool:
    connection.settimeout(within_s)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.0\r\n", b"\x80\x04K\x01.", b"A" * 60_000])
def test_400_slow_clients_take_few_descriptors_and_others_are_answered(server: MetricsServer, sent: bytes) -> None:
    before = descriptors()
    clients = connect(server, 400, sent)
    assert descriptors() - before - len(clients) <= 2 * metrics_server._MAX_CONNECTIONS
    assert sum(thread.name.startswith("Thread-") for thread in threading.enumerate()) <= 70
    assert answer(server) == 200
    for client in clients:
        client.close()


def test_a_request_that_drips_ends(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and the request does not."""
    monkeypatch.setattr(metrics_server, "_REQUEST_S", 1.0)
    (client,) = connect(server, 1)
    begun = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() - begun < 10:
            client.sendall(b"X-A: b\r\n")
            time.sleep(0.1)
    client.close()
    assert time.monotonic() - begun < 8
    assert answer(server) == 200


def test_a_client_that_does_not_read_ends(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_REQUEST_S", 0.5)
    before = descriptors()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.connect(("127.0.0.1", server.port))
    client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    client.close()
    deadline = time.monotonic() + 10
    while descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert descriptors() <= before


def test_without_descriptors_the_server_and_the_record_survive(server: MetricsServer, tmp_path: Path) -> None:
    """The record is read as unknown, connections wait, and both work again afterwards."""
    (tmp_path / "progress.json").write_bytes(FULL.to_bytes())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = [socket.socket() for _ in range(4)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors(), limits[1]))
    try:
        hogs: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                hogs.append(os.open("/dev/null", os.O_RDONLY))
        assert read_progress(tmp_path / "progress.json") is None
        used = time.process_time()
        for client in clients:
            client.settimeout(5)
            client.connect(("127.0.0.1", server.port))
        time.sleep(1)
        assert time.process_time() - used < 0.7  # it does not spin
    finally:
        for hog in hogs:
            os.close(hog)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for client in clients:
        client.close()
    assert read_progress(tmp_path / "progress.json") is not None
    assert answer(server) == 200
