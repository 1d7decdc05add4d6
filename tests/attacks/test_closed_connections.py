"""A command closes its connections to a cluster whose server stalls: in the handshake, in the headers, in a stream.

Each thread that waits gets an error of Safepoint at once, no thread is left, and nothing is sent afterwards.
"""

import contextlib
import itertools
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")

from safepoint.errors import SafepointError, StorageError, TransientError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.connection import connect_to
from safepoint.jobs.cluster.transport import client as transport
from tests.attacks.test_hostile_clusters import kubeconfig
from tests.support.certificates import make_certificates
from tests.support.tls_floods import FloodingServer, flood_handshake

Script = Callable[["Server", socket.socket], None]
SOON_S = 4.0
OK = b"HTTP/1.1 200 OK\r\n"


class Server:
    """A server that does with each connection what a script says."""

    def __init__(self, folder: Path, script: Script) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.certificate = make_certificates(folder) / "server.pem"
        self.context.load_cert_chain(self.certificate)
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self.received = b""
        self.has_begun, self.goes_on, self.is_over = (threading.Event() for _ in range(3))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            self._script(self, connection)

    def encrypted(self, connection: socket.socket) -> ssl.SSLSocket:
        return self.context.wrap_socket(connection, server_side=True)

    def request(self, connection: ssl.SSLSocket) -> None:
        """Read a request's head."""
        data = b""
        while b"\r\n\r\n" not in data and (block := connection.recv(65536)):
            data += block
        self.received += data
        self.has_begun.set()

    def close(self) -> None:
        self.is_over.set()
        self.goes_on.set()
        self._listener.close()


def silent(server: Server, connection: socket.socket) -> None:
    """No handshake."""
    server.has_begun.set()
    server.is_over.wait()


def half_a_handshake(server: Server, connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"\x16\x03\x03\x20\x00\x02")
    server.has_begun.set()
    server.is_over.wait()


def no_answer(server: Server, connection: socket.socket) -> None:
    with server.encrypted(connection) as encrypted:
        server.request(encrypted)
        server.is_over.wait()


def again_and_again(begin: bytes, again: bytes, pause_s: float = 0.01) -> Script:
    def script(server: Server, connection: socket.socket) -> None:
        with server.encrypted(connection) as encrypted:
            server.request(encrypted)
            encrypted.sendall(begin)
            while not server.is_over.wait(pause_s):
                encrypted.sendall(again)

    return script


def stream(begin: bytes) -> Script:
    """A stream that has begun, and says no more."""
    return again_and_again(begin, b"", 30)


def half_open(server: Server, connection: socket.socket) -> None:
    """The server sends no more, and says so only below TLS."""
    with server.encrypted(connection) as encrypted:
        server.request(encrypted)
        encrypted.sendall(OK + b"content-length: 1000\r\n\r\n")
        socket.socket.shutdown(encrypted, socket.SHUT_WR)
        server.is_over.wait()


def reads_nothing(server: Server, connection: socket.socket) -> None:
    """After the handshake, the client's large request does not fit into the buffers."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with server.encrypted(connection):
        server.has_begun.set()
        server.is_over.wait()


def handshake_without_end(server: Server, connection: socket.socket) -> None:
    server.has_begun.set()
    flood_handshake(connection)


def tickets(begin: bytes) -> Script:
    """Session tickets without end. OpenSSL processes them inside of one call."""

    def script(server: Server, connection: socket.socket) -> None:
        flooding = FloodingServer(connection, server.certificate)
        server.received += flooding.read_head()
        server.has_begun.set()
        if begin:
            flooding.send(begin)
        flooding.flood()

    return script


STALLS = {
    "silent": silent,
    "half a handshake": half_a_handshake,
    "no answer": no_answer,
    "headers": again_and_again(OK + b"x: ", b"a"),
    "interim answers": again_and_again(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "empty chunks of TLS": again_and_again(OK + b"content-length: 9\r\n\r\n", b""),
    "body": again_and_again(OK + b"content-length: 1000000\r\n\r\n", b" "),
    "trailers": again_and_again(OK + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"t: x\r\n"),
    "stream of a length": stream(OK + b"content-length: 1000\r\n\r\n"),
    "stream in chunks": stream(OK + b"transfer-encoding: chunked\r\n\r\n"),
    "stream to the end": stream(OK + b"\r\n"),
    "half open": half_open,
    "reads nothing": reads_nothing,
    "handshake without end": handshake_without_end,
    "tickets": tickets(b""),
    "tickets in a body": tickets(OK + b"content-length: 1000\r\n\r\n"),
}


@contextlib.contextmanager
def opened(folder: Path, script: Script) -> Iterator[tuple[Server, ClusterApi]]:
    server = Server(folder, script)
    file = kubeconfig(folder, server.url)
    ca = json.dumps({"certificate-authority": str(folder / "ca.pem")})[1:-1]
    file.write_text(file.read_text().replace('{"server"', f'{{{ca}, "server"'))
    api = ClusterApi(connect_to("c", file=file), within_s=0)
    try:
        yield server, api
    finally:
        server.close()
        api.close()


def started(uses: list[Callable[[], object]]) -> tuple[list[threading.Thread], list[BaseException | None]]:
    ends: list[BaseException | None] = []

    def run(use: Callable[[], object]) -> None:
        try:
            use()
            ends.append(None)
        except BaseException as error:  # noqa: BLE001
            ends.append(error)

    threads = [threading.Thread(target=run, args=(use,), daemon=True) for use in uses]
    for thread in threads:
        thread.start()
    return threads, ends


def threads_of_requests() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "safepoint-bounded"]


@pytest.mark.parametrize("name", STALLS)
@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_thread_that_waits(num_threads: int, name: str, tmp_path: Path) -> None:
    before = set(threads_of_requests())
    with opened(tmp_path, STALLS[name]) as (server, api):
        large = {"metadata": {"name": "a"}, "x": "x" * (16 << 20)}
        uses: list[Callable[[], object]] = [
            lambda: api.get("pods", "a"),
            lambda: list(api.watch("pods")),
            lambda: list(api.log("a", "b", follow=True)),
            lambda: api.create("pods", large),
        ]
        uses = uses if name == "reads nothing" or num_threads > 1 else uses[1:2]
        threads, ends = started(uses)
        assert server.has_begun.wait(10)
        time.sleep(0.3)
        begun_s = time.monotonic()
        api.close()
        for thread in threads:
            thread.join(SOON_S)
        assert time.monotonic() - begun_s < SOON_S
        assert not any(thread.is_alive() for thread in threads)
        # A stream that broke before was an error too.
        assert all(isinstance(end, StorageError) for end in ends), ends
        until_s = time.monotonic() + 7  # a handshake has 5 s
        while (left := set(threads_of_requests()) - before) and time.monotonic() < until_s:
            time.sleep(0.05)
        assert not left


def test_nothing_is_sent_after_it(tmp_path: Path) -> None:
    """The handshake is finished when the connections are closed already."""

    def late(server: Server, connection: socket.socket) -> None:
        server.has_begun.set()
        server.goes_on.wait()
        with server.encrypted(connection) as encrypted:
            server.request(encrypted)

    with opened(tmp_path, late) as (server, api):
        threads, ends = started([lambda: api.delete("pods", "a"), lambda: api.create("pods", {})])
        assert server.has_begun.wait(10)
        api.close()
        server.goes_on.set()
        for thread in threads:
            thread.join(SOON_S)
        time.sleep(1)
        assert len(ends) == 2
        assert all(isinstance(end, StorageError) for end in ends), ends
        assert server.received == b""


@pytest.mark.parametrize(
    "name", ["interim answers", "headers", "trailers", "no answer", "handshake without end", "tickets"]
)
def test_an_answer_that_takes_too_long(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread and the connection that waited for it end with it; the next request works."""
    monkeypatch.setattr(transport, "_EXCHANGE_S", 1.0)
    numbers = itertools.count()

    def first_stalls(server: Server, connection: socket.socket) -> None:
        if next(numbers) == 0:
            STALLS[name](server, connection)
            return
        with server.encrypted(connection) as encrypted:
            server.request(encrypted)
            encrypted.sendall(OK + b"content-length: 2\r\n\r\n{}")

    before = set(threads_of_requests())
    with opened(tmp_path, first_stalls) as (_, api):
        with pytest.raises(TransientError, match="did not answer within"):
            api.get("pods", "a")
        until_s = time.monotonic() + SOON_S
        while (left := set(threads_of_requests()) - before) and time.monotonic() < until_s:
            time.sleep(0.05)
        assert not left
        assert api.get("pods", "a") == {}


def test_closing_again_and_by_several_threads(tmp_path: Path) -> None:
    with opened(tmp_path, STALLS["stream in chunks"]) as (server, api):
        threads, ends = started([lambda: list(api.watch("pods"))] * 6)
        assert server.has_begun.wait(10)
        closing, closed = started([api.close] * 6)
        for thread in (*threads, *closing):
            thread.join(SOON_S)
        assert closed == [None] * 6
        assert all(isinstance(end, SafepointError) for end in ends), ends
        with pytest.raises(StorageError, match="was closed"):
            api.get("pods", "a")


def test_a_stream_that_its_own_thread_closes(tmp_path: Path) -> None:
    """It does not wait for itself for long."""

    def lines(server: Server, connection: socket.socket) -> None:
        with server.encrypted(connection) as encrypted:
            server.request(encrypted)
            encrypted.sendall(OK + b"content-length: 1000\r\n\r\nfirst\n")
            server.is_over.wait()

    with opened(tmp_path, lines) as (_, api):
        log: Any = api.log("a", "b", follow=True)
        assert next(log) == "first"
        begun_s = time.monotonic()
        api.close()
        assert time.monotonic() - begun_s < SOON_S
        with pytest.raises(StorageError):
            next(log)
