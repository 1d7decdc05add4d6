"""A server keeps a client inside of one call: it sends TLS records that carry no data, or takes a body very slowly.

The time limit of a request ends the request even then. It does not depend on the return of the call.
"""

import contextlib
import resource
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from safepoint.errors import TransientError
from safepoint.foundation import clock
from safepoint.foundation.closed_requests import exchange
from safepoint.storage.location import Location, Scheme
from safepoint.storage.object_store import ObjectStore
from safepoint.storage.options import StorageOptions
from safepoint.storage.s3 import exchange as exchange_module
from tests.support.certificates import make_certificates
from tests.support.hostile_s3 import Request, hostile_store
from tests.support.patience import PATIENCE
from tests.support.tls_floods import FloodingServer, flood_handshake

Serve = Callable[[socket.socket], object]
_LIMIT_S = 1.0
_SOON_S = 5.0 * PATIENCE
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
_MORE_MEMORY_BYTES = 64 << 20


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@contextlib.contextmanager
def served(serve: Serve, *, receive_bytes: int | None = None) -> Generator[int]:
    """The port of a server that passes each connection to `serve`, on a thread."""
    open_now: list[socket.socket] = []

    def run(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            serve(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                open_now.append(listener.accept()[0])
                threading.Thread(target=run, args=(open_now[-1],), daemon=True).start()

    with socket.socket() as listener:
        if receive_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            for one in open_now:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(one, socket.SHUT_RDWR)


def store_at(port: int, *, ca: Path | None = None, timeout_s: float = _LIMIT_S) -> ObjectStore:
    options = StorageOptions(
        endpoint=f"{'http' if ca is None else 'https'}://127.0.0.1:{port}",
        access_key_id="key",
        secret_access_key="secret",
        request_timeout_s=timeout_s,
        ca_bundle=str(ca) if ca is not None else None,
    )
    return ObjectStore(Location(scheme=Scheme.S3, bucket="bucket", path="run"), options)


def in_time(use: Callable[[], object]) -> BaseException | None:
    """The error of `use`. Fails if `use` does not end soon."""
    ends: list[BaseException | None] = []

    def run() -> None:
        try:
            use()
            ends.append(None)
        except BaseException as error:  # noqa: BLE001
            ends.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_SOON_S)
    assert ends, f"the call has not ended after {_SOON_S:g} s"
    return ends[0]


def tickets_after(begin: bytes, certificates: Path) -> Serve:
    """A server that begins an answer with `begin`, and then sends session tickets without end."""

    def serve(connection: socket.socket) -> None:
        server = FloodingServer(connection, certificates / "server.pem")
        server.read_head()
        if begin:
            server.send(begin)
        server.flood()

    return serve


def through_a_proxy(connection: socket.socket) -> None:
    """A server behind a proxy that floods the handshake in the tunnel."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(1 << 16)
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    flood_handshake(connection)


def floods(certificates: Path) -> dict[str, Serve]:
    return {
        "handshake": flood_handshake,
        "status": tickets_after(b"", certificates),
        "headers": tickets_after(b"HTTP/1.1 200 OK\r\n", certificates),
        "body": tickets_after(_ANSWER, certificates),
        "body without a length": tickets_after(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", certificates),
    }


FLOODS = ["handshake", "status", "headers", "body", "body without a length"]


class TestRecordsWithoutData:
    @pytest.mark.parametrize("name", FLOODS)
    def test_a_request_to_s3(self, name: str, certificates: Path) -> None:
        """Neither the time nor the memory grows with what the server sends."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with served(floods(certificates)[name]) as port:
            store, deadline_s = store_at(port, ca=certificates / "ca.pem"), clock.monotonic_s() + 1.5
            error = in_time(lambda: list(store.list(deadline_s=deadline_s)))
        assert isinstance(error, TransientError), error
        assert "in time" in str(error)
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < _MORE_MEMORY_BYTES

    @pytest.mark.parametrize("name", FLOODS)
    def test_a_request_for_keys(self, name: str, certificates: Path) -> None:
        """A body without a length ends with the connection. What had arrived before the limit is not an answer."""
        context = ssl.create_default_context(cafile=certificates / "ca.pem")
        with served(floods(certificates)[name]) as port:
            request = urllib.request.Request(f"https://127.0.0.1:{port}/")
            error = in_time(
                lambda: exchange(request, to="the server", timeout_s=_LIMIT_S, max_bytes=100, context=context)
            )
        assert isinstance(error, TimeoutError) or "timed out" in str(error), error

    def test_a_tunnel(self, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        context = ssl.create_default_context(cafile=certificates / "ca.pem")
        with served(through_a_proxy) as port:
            monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
            request = urllib.request.Request("https://server.test/")
            error = in_time(
                lambda: exchange(request, to="the server", timeout_s=_LIMIT_S, max_bytes=100, context=context)
            )
            assert isinstance(error, TimeoutError) or "timed out" in str(error), error
            options = StorageOptions(
                endpoint="https://server.test", access_key_id="key", secret_access_key="s", request_timeout_s=_LIMIT_S
            )
            store = ObjectStore(Location(scheme=Scheme.S3, bucket="bucket", path="run"), options)
            deadline_s = clock.monotonic_s() + 1.5
            assert isinstance(in_time(lambda: list(store.list(deadline_s=deadline_s))), TransientError)


class TestBodiesThatTakeLong:
    """The limit of a body grows with its size, but the deadline of the caller still holds."""

    def test_an_answer(self) -> None:
        def answer(request: Request) -> bool:
            request.send_response(206)
            for name, value in {"Content-Length": size, "Content-Range": f"bytes 0-{size - 1}/{size}"}.items():
                request.send_header(name, str(value))
            request.end_headers()
            while not is_over.wait(0.1):
                request.wfile.write(b"x")
            return True

        size, is_over, found = 64 << 20, threading.Event(), bytearray()
        try:
            with hostile_store(answer, timeout_s=_LIMIT_S) as (store, _):
                deadline_s = clock.monotonic_s() + 1.5
                error = in_time(lambda: store.stream("a", found.extend, start=0, length=size, deadline_s=deadline_s))
        finally:
            is_over.set()
        assert isinstance(error, TransientError), error
        assert bytes(found) == b"x" * len(found)

    @pytest.mark.parametrize("is_encrypted", [False, True])
    def test_an_upload(self, is_encrypted: bool, certificates: Path, tmp_path: Path) -> None:
        """Each call that sends a piece ends before its own timeout."""
        with slow_reader(certificates if is_encrypted else None) as (store, _):
            deadline_s = clock.monotonic_s() + 2
            error = in_time(lambda: store.upload("a", file_of(64 << 20, tmp_path), deadline_s=deadline_s))
        assert isinstance(error, TransientError), error

    @pytest.mark.parametrize("is_encrypted", [False, True])
    def test_the_lowest_rate_of_an_upload(
        self, is_encrypted: bool, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A request that is slower than the lowest rate ends, so that the next one can use a better connection."""
        monkeypatch.setattr(exchange_module, "SLOWEST_BYTES_PER_S", 1 << 40)
        with slow_reader(certificates if is_encrypted else None) as (store, has_ended):
            deadline_s = clock.monotonic_s() + 2 * _SOON_S
            file, errors = file_of(8 << 20, tmp_path), list[BaseException | None]()

            def upload() -> None:
                try:
                    store.upload("a", file, deadline_s=deadline_s)
                except TransientError as error:
                    errors.append(error)

            use = threading.Thread(target=upload)
            use.start()
            assert has_ended.wait(_SOON_S)
            use.join()
            assert len(errors) == 1


def file_of(size: int, folder: Path) -> Path:
    with (folder / "file").open("wb") as opened:
        opened.truncate(size)
    return folder / "file"


@contextlib.contextmanager
def slow_reader(certificates: Path | None) -> Generator[tuple[ObjectStore, threading.Event]]:
    """A server that reads 1.2 MB of a body in a second, so that no piece exceeds the timeout.

    The event is set when the client has ended a request with a body.
    """
    is_over, has_ended = threading.Event(), threading.Event()

    def serve(connection: socket.socket) -> None:
        if certificates is None:
            serve_one(connection)
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates / "server.pem")
        with context.wrap_socket(connection, server_side=True) as encrypted:
            serve_one(encrypted)

    def serve_one(connection: socket.socket) -> None:
        while True:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                if not (byte := connection.recv(1)):
                    return
                head += byte
            if head.startswith(b"PUT"):
                break
            begun = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
            none = b"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"
            body = begun if head.startswith(b"POST") else none
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        buffer = bytearray(6000)
        with contextlib.suppress(OSError):
            while connection.recv_into(buffer) and not is_over.wait(0.005):
                pass
        has_ended.set()

    with served(serve, receive_bytes=8192) as port:
        try:
            yield store_at(port, ca=certificates and certificates / "ca.pem", timeout_s=2.5), has_ended
        finally:
            is_over.set()
