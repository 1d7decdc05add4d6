"""Encrypted connections: an unknown certificate is refused with a message of its own, and a named one is trusted."""

import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from safepoint.errors import StorageError, TransientError
from safepoint.foundation import clock
from safepoint.storage.location import parse_location
from safepoint.storage.opening import open_store
from safepoint.storage.options import StorageOptions
from safepoint.storage.store import Store
from tests.support.certificates import encrypted, make_certificates


class _Server(http.server.BaseHTTPRequestHandler):
    """A server that accepts every PUT, and has one object of ten bytes."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.md5(body).hexdigest()}"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(206)
        self.send_header("Content-Range", "bytes 0-9/10")
        self.send_header("Content-Length", "10")
        self.end_headers()
        self.wfile.write(b"0123456789")

    def log_message(self, *args: object) -> None:
        """Write no log of requests."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `make_certificates`."""
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def endpoint(certificates: Path) -> Iterator[str]:
    server = encrypted(_Server, certificates)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def reach(endpoint: str, **options: object) -> Store:
    keys = {"access_key_id": "key", "secret_access_key": "secret"}
    location = parse_location("s3://bucket/run")
    return open_store(location, StorageOptions(endpoint=endpoint, **keys, **options))  # type: ignore[arg-type]


def use(store: Store) -> bytes:
    """Send one request through the library and one of our own."""
    store.write("key", b"data", deadline_s=clock.monotonic_s() + 10)
    received = bytearray()
    store.stream("key", received.extend, start=0, length=10, deadline_s=clock.monotonic_s() + 10)
    return bytes(received)


def test_an_unknown_certificate_is_refused(endpoint: str) -> None:
    """It is refused at once, with what to do, and is not a transient error."""
    store = reach(endpoint)
    for request in (
        lambda: store.write("key", b""),
        lambda: store.stream("key", lambda block: None, start=0, length=10),
    ):
        with pytest.raises(StorageError, match="certificate is not trusted") as error:
            request()
        assert not isinstance(error.value, TransientError)
        assert "AWS_CA_BUNDLE" in str(error.value)


def test_a_named_certificate_is_trusted(endpoint: str, certificates: Path) -> None:
    """Both clients trust it."""
    assert use(reach(endpoint, ca_bundle=str(certificates / "ca.pem"))) == b"0123456789"


def test_verification_can_be_turned_off(endpoint: str) -> None:
    """Test systems can turn verification off; the start of a run prints a warning."""
    assert use(reach(endpoint, verify_tls=False)) == b"0123456789"
