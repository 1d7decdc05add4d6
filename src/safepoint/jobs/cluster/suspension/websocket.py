"""The messages of a WebSocket (RFC 6455), read from a connection that the HTTP client has opened and upgraded.

The module has only what `pods/exec` needs: it reads messages of the server, and answers the server's pings.
"""

import base64
import math
import os
from collections.abc import Iterator
from typing import Protocol

import httpcore2
from wsproto.frame_protocol import FrameProtocol, Opcode, ParseFailed

from safepoint.errors import StorageError, TransientError, WaitTimeoutError
from safepoint.foundation import clock

_MOST_BYTES = 1 << 20
_MOST_FRAMES = 1 << 16
"""The limit of the number of frames in all messages together. Without this limit, a server could keep this process
busy with tiny frames."""
_BLOCK_BYTES = 64 << 10
_WRITE_S = 10.0


class Connection(Protocol):
    """The network connection below the WebSocket: httpx's `network_stream`."""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Some bytes; empty at the end."""
        ...

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send bytes."""
        ...


def upgrade_headers(protocols: str) -> dict[str, str]:
    """The headers of the request that opens a WebSocket.

    Args:
        protocols: the protocols that the client supports, the preferred one first.
    """
    return {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": base64.b64encode(os.urandom(16)).decode(),
        "sec-websocket-protocol": protocols,
    }


def messages(connection: Connection, *, idle_s: float, limit_s: float = math.inf) -> Iterator[bytes]:
    """The messages of the server, until it closes the WebSocket.

    Args:
        connection: the network connection, after the upgrade.
        idle_s: how long the server may send nothing.
        limit_s: how long all messages together may take. Without this limit, a server could send pings for ever.

    Raises:
        TransientError: the connection broke, or the server was silent.
        WaitTimeoutError: the messages took longer than `limit_s`.
        StorageError: a message is too large, there are too many frames, or the server has sent a frame that a server
            may not send.
    """
    protocol, message, num_frames = FrameProtocol(client=True, extensions=[]), bytearray(), 0
    deadline_s = clock.monotonic_s() + limit_s
    left_s = limit_s
    try:
        while block := connection.read(_BLOCK_BYTES, timeout=min(idle_s, max(0.0, left_s))):
            left_s = deadline_s - clock.monotonic_s()
            if left_s < 0:
                raise _too_late(limit_s)
            protocol.receive_bytes(block)
            for frame in protocol.received_frames():
                num_frames += 1
                if num_frames > _MOST_FRAMES:
                    raise StorageError(f"the cluster sent more than {_MOST_FRAMES:,} frames")
                if isinstance(frame.payload, tuple):  # the reason why the server closes the WebSocket
                    return
                data = frame.payload.encode() if isinstance(frame.payload, str) else bytes(frame.payload)
                if frame.opcode is Opcode.PING:
                    connection.write(bytes(protocol.pong(data)), timeout=_WRITE_S)
                elif frame.opcode is not Opcode.PONG:
                    message += data
                    if len(message) > _MOST_BYTES:
                        raise StorageError(f"the cluster sent a message of more than {_MOST_BYTES:,} bytes")
                    if frame.message_finished:
                        yield bytes(message)
                        message.clear()
    except ParseFailed as error:
        raise StorageError(f"the cluster sent data that a WebSocket server may not send: {error}") from error
    except (httpcore2.TimeoutException, httpcore2.NetworkError, OSError) as error:
        if isinstance(error, httpcore2.TimeoutException) and clock.monotonic_s() >= deadline_s:
            raise _too_late(limit_s) from error
        raise TransientError(f"the connection broke: {str(error) or type(error).__name__}") from error
    raise TransientError("the connection ended too early")


def _too_late(limit_s: float) -> WaitTimeoutError:
    return WaitTimeoutError(f"the program did not end within {limit_s:g} s")
