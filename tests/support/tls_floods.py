"""A TLS server that sends records without data, as fast as the client takes them.

OpenSSL processes such records inside of one call of the client, such as `SSLSocket.recv`. While they arrive, the call
does not return.
"""

import socket
import ssl
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

_HELLO_REQUESTS = b"\x16\x03\x03\x00\x04\x00\x00\x00\x00" * (1 << 16)
"""Records with a message that asks for a handshake. During a handshake a client ignores them."""
_TICKET = b"\x04" + (14).to_bytes(3, "big") + b"\0\0\0\x0a" + b"\0\0\0\1" + b"\0" + b"\0\1" + b"t" + b"\0\0"
_AT_ONCE = 16


def flood_handshake(connection: socket.socket) -> None:
    """Answer the client's first message with messages that it ignores, until it closes the connection."""
    connection.recv(1 << 16)
    while True:
        connection.sendall(_HELLO_REQUESTS)


class FloodingServer:
    """The server's side of one connection with TLS 1.3.

    Args:
        connection: the connection; the client has sent nothing yet.
        certificate: a PEM file with a key and a certificate.
    """

    def __init__(self, connection: socket.socket, certificate: Path) -> None:
        self._connection = connection
        self._received, self._sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        with TemporaryDirectory() as folder:
            secrets = Path(folder, "secrets")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
            context.keylog_filename = str(secrets)
            self._tls = context.wrap_bio(self._received, self._sent, server_side=True)
            while not self._is_done():
                self._receive()
            lines = [line.split() for line in secrets.read_text().splitlines()]
        secret = next(bytes.fromhex(words[2]) for words in lines if words[0] == "SERVER_TRAFFIC_SECRET_0")
        name = (self._tls.cipher() or ("",))[0]
        assert "GCM" in name, name
        hashing = hashes.SHA384() if "384" in name else hashes.SHA256()
        key = _expanded(secret, b"key", 32 if "256_GCM" in name else 16, hashing)
        self._aead, self._nonce = AESGCM(key), int.from_bytes(_expanded(secret, b"iv", 12, hashing), "big")
        self._num_records = 0

    def _is_done(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self._connection.sendall(self._sent.read())
        return True

    def _receive(self) -> None:
        if not (data := self._connection.recv(1 << 16)):
            raise ConnectionError
        self._received.write(data)

    def read_head(self) -> bytes:
        """Read until the end of a request's headers."""
        head = b""
        while b"\r\n\r\n" not in head:
            try:
                head += self._tls.read(1 << 16)
            except ssl.SSLWantReadError:
                self._receive()
        return head

    def send(self, data: bytes) -> None:
        """Send data to the client's program."""
        self._connection.sendall(self._record(data, b"\x17"))

    def flood(self) -> None:
        """Send session tickets until the client closes the connection."""
        while True:
            self._connection.sendall(b"".join(self._record(_TICKET * 900, b"\x16") for _ in range(_AT_ONCE)))

    def _record(self, data: bytes, kind: bytes) -> bytes:
        header = b"\x17\x03\x03" + struct.pack(">H", len(data) + 17)
        nonce = (self._nonce ^ self._num_records).to_bytes(12, "big")
        self._num_records += 1
        return header + self._aead.encrypt(nonce, data + kind, header)


def _expanded(secret: bytes, label: bytes, length: int, hashing: hashes.HashAlgorithm) -> bytes:
    """HKDF-Expand-Label of RFC 8446, section 7.1."""
    name = b"tls13 " + label
    return HKDFExpand(hashing, length, struct.pack(">HB", length, len(name)) + name + b"\0").derive(secret)


__all__ = ["FloodingServer", "flood_handshake"]
