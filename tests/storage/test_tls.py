"""Encrypted connections: an unknown certificate is refused with a word of its own, a named one is trusted."""

import datetime
import http.server
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from holdfast.errors import StorageError, TransientError
from holdfast.foundation import clock
from holdfast.storage.location import parse_location
from holdfast.storage.opening import open_store
from holdfast.storage.options import StorageOptions
from holdfast.storage.store import Store


class _Server(http.server.BaseHTTPRequestHandler):
    """Takes every put, and has one object of ten bytes."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(206)
        self.send_header("Content-Range", "bytes 0-9/10")
        self.send_header("Content-Length", "10")
        self.end_headers()
        self.wfile.write(b"0123456789")

    def log_message(self, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `ca.pem`, and `server.pem`: a key and the certificate for 127.0.0.1 that the CA signed."""
    folder = tmp_path_factory.mktemp("tls")
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    ca = _unsigned("CA", "CA", ca_key).add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    server = _unsigned("server", "CA", key).add_extension(address, critical=False)
    pem, pkcs8, bare = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "ca.pem").write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    signed = server.sign(ca_key, hashes.SHA256()).public_bytes(pem)
    (folder / "server.pem").write_bytes(key.private_bytes(pem, pkcs8, bare) + signed)
    return folder


def _unsigned(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(
        subject_name=x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)]),
        issuer_name=x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(days=1),
        not_valid_after=now + datetime.timedelta(days=1),
    )


@pytest.fixture
def endpoint(certificates: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = True
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
    """One request through the library and one of our own."""
    store.write("key", b"data", deadline_s=clock.monotonic_s() + 10)
    received = bytearray()
    store.stream("key", received.extend, start=0, length=10, deadline_s=clock.monotonic_s() + 10)
    return bytes(received)


def test_an_unknown_certificate_is_refused(endpoint: str) -> None:
    """At once, with the way out, and not as something that passes."""
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
    """By both clients."""
    assert use(reach(endpoint, ca_bundle=str(certificates / "ca.pem"))) == b"0123456789"


def test_verification_can_be_turned_off(endpoint: str) -> None:
    """For test systems; the start of a run warns of it."""
    assert use(reach(endpoint, verify_tls=False)) == b"0123456789"
