"""The connection between a rank and its keeper: frames of bytes over a Unix socket, with descriptors of memory.

The socket is in the abstract namespace: it has no file, so nothing is left of it. Only processes of the same user can
connect.
"""

import contextlib
import os
import socket
import struct
import sys
import threading
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

_HEADER = struct.Struct("<II")
MAX_FRAME_BYTES = 64 << 20
_MAX_DESCRIPTORS = 2
"""One more than any message has, so that a second one is noticed."""
_CREDENTIALS = struct.Struct("3i")


class Channel:
    """One connection; several threads may send, one receives.

    Args:
        connected: the socket.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()

    def send(self, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one frame, and descriptors of which the other side gets copies.

        Raises:
            OSError: the other side has closed the connection.
            ValueError: the frame is too long.
        """
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(body)} bytes is longer than {MAX_FRAME_BYTES}")
        header = _HEADER.pack(len(body), len(descriptors))
        with self._sending:
            socket.send_fds(self._socket, [header], list(descriptors))
            self._socket.sendall(body)

    def receive(self) -> tuple[bytes, list[int]] | None:
        """The next frame and its descriptors, which the caller closes.

        Returns:
            None when the other side has closed the connection, or has sent bytes that are not a frame.
        """
        descriptors: list[int] = []
        body = None
        with contextlib.suppress(OSError):
            header, descriptors, _, _ = socket.recv_fds(self._socket, _HEADER.size, _MAX_DESCRIPTORS)
            if len(header) == _HEADER.size:
                length, _ = _HEADER.unpack(header)
                body = self._receive_exactly(length) if length <= MAX_FRAME_BYTES else None
        if body is None:
            close_all(descriptors)
            return None
        return body, descriptors

    def _receive_exactly(self, length: int) -> bytes | None:
        body = bytearray()
        while len(body) < length:
            data = self._socket.recv(length - len(body))
            if not data:
                return None
            body += data
        return bytes(body)

    def close(self) -> None:
        """End the connection; a thread in `receive` gets None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that came with a frame and are not used."""
    for descriptor in descriptors:
        os.close(descriptor)


def new_keeper_name() -> str:
    """A name for a keeper that no other process uses."""
    return f"safepoint-{os.getuid()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def listen(name: str) -> socket.socket:
    """Accept connections under `name`.

    Raises:
        OSError: another keeper uses the name.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(f"\0{name}")
    except OSError:
        server.close()
        raise
    server.listen(128)
    return server


_not_for_children: "weakref.WeakSet[Any]" = weakref.WeakSet()


def close_in_children(connection: Any) -> None:
    """Close `connection` in forked processes: a data loader's worker would keep it open after its parent has died."""
    _not_for_children.add(connection)


def _close_in_child() -> None:
    for connection in list(_not_for_children):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


def connect(name: str) -> Channel:
    """Connect to the keeper called `name`.

    Raises:
        OSError: there is none, or it belongs to another user.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.connect(f"\0{name}")
        check_same_user(client)
    except OSError:
        client.close()
        raise
    close_in_children(client)
    return Channel(client)


def check_same_user(connected: socket.socket) -> None:
    """Check that the process at the other end belongs to this user.

    Raises:
        PermissionError: it does not.
    """
    if sys.platform != "linux":
        raise PermissionError("the other side cannot be identified on this system")
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    if user != os.getuid():
        raise PermissionError(f"the other side belongs to user {user}")
