"""Certificates of an authority that no client trusts, for servers on this machine."""

import datetime
import http.server
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def make_certificates(folder: Path, host: str = "127.0.0.1") -> Path:
    """Write `ca.pem` and `server.pem` into `folder`: a CA, and the key and certificate for an address."""
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
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


def encrypted(
    handler: type[http.server.BaseHTTPRequestHandler], certificates: Path
) -> http.server.ThreadingHTTPServer:
    """A TLS server on a free port of this machine that does not serve yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = True
    return server
