"""The messages of a WebSocket (RFC 6455), read from a connection that the HTTP client has opened and upgraded.

Only what `pods/exec` needs: messages of the server are read, and its pings are answered.
"""

import base64
import os
import struct
from collections.abc import Iterator
from typing import Protocol

import httpcore2

from safepoint.errors import StorageError, TransientError

_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_LAST, _MASKED = 0x80, 0x80
_MOST_BYTES = 1 << 20
_BLOCK = 64 << 10
_WRITE_S = 10.0


class Connection(Protocol):
    """The connection below: httpx's `network_stream`."""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Some bytes; empty at the end."""
        ...

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send bytes."""
        ...


def upgrade_headers(protocols: str) -> dict[str, str]:
    """The headers of the request that opens a WebSocket.

    Args:
        protocols: the protocols that the client knows, the preferred one first.
    """
    return {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": base64.b64encode(os.urandom(16)).decode(),
        "sec-websocket-protocol": protocols,
    }


def messages(connection: Connection, *, idle_s: float) -> Iterator[bytes]:
    """The messages of the server, until it closes the WebSocket.

    Args:
        connection: after the upgrade.
        idle_s: how long the server may send nothing.

    Raises:
        TransientError: the connection broke, or the server was silent.
        StorageError: a message is too large.
    """
    reader = _Reader(connection, idle_s)
    message = b""
    while True:
        head, size = reader.take(2)
        kind, is_last = head & 0x0F, bool(head & _LAST)
        if size & _MASKED:
            raise StorageError("the cluster sent a masked message, which no server may")
        if size == 126:
            (size,) = struct.unpack("!H", reader.take(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", reader.take(8))
        if size + len(message) > _MOST_BYTES:
            raise StorageError(f"the cluster sent a message of more than {_MOST_BYTES:,} bytes")
        data = reader.take(size)
        if kind == _CLOSE:
            return
        if kind == _PING:
            reader.send(_PONG, data)
        elif kind in {_CONTINUED, _TEXT, _BINARY}:
            message += data
            if is_last:
                yield message
                message = b""


class _Reader:
    """The bytes of a connection, in the pieces that are asked for."""

    def __init__(self, connection: Connection, idle_s: float) -> None:
        self._connection, self._idle_s = connection, idle_s
        self._buffer = b""

    def take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            try:
                block = self._connection.read(_BLOCK, timeout=self._idle_s)
            except (httpcore2.TimeoutException, httpcore2.NetworkError, OSError) as error:
                raise TransientError(f"the connection broke: {str(error) or type(error).__name__}") from error
            if not block:
                raise TransientError("the connection ended too early")
            self._buffer += block
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def send(self, kind: int, data: bytes) -> None:
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[index % 4] for index, byte in enumerate(data))
        try:
            self._connection.write(bytes((kind | _LAST, _MASKED | len(data))) + mask + masked, timeout=_WRITE_S)
        except (httpcore2.TimeoutException, httpcore2.NetworkError, OSError) as error:
            raise TransientError(f"the connection broke: {error}") from error
