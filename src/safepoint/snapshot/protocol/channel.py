"""The connection between a rank and its keeper: frames of bytes over a Unix socket, with descriptors of memory.

The socket is in the abstract namespace: it has no file that would have to be removed. Any user may listen under such
a name, so rank and keeper each check that the process at the other end belongs to the same user.
"""

import contextlib
import os
import random
import socket
import struct
import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

from safepoint.foundation.processes import close_in_children

_HEADER = struct.Struct("<II")
MAX_FRAME_BYTES = 64 << 20
_MAX_DESCRIPTORS = 2
"""A message has at most one descriptor. A second one is received too, so that the message can be refused."""
_MAX_NAMES = 400
"""How many names are tried at most. Other users can listen under any number of names, and a name that does not answer
costs a millisecond."""
_CREDENTIALS = struct.Struct("3i")
_TIME = struct.Struct("ll")
_SOCKETS = Path("/proc/net/unix")
_LISTENING = "00010000"
"""The flags of a socket that listens, in the fourth column."""


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
    """Accept connections under `name`. If another user has taken it, use a longer name that begins with `name`.

    Raises:
        OSError: another keeper of this user has the name.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(f"\0{name}")
    except OSError:
        if _is_ours(name):
            server.close()
            raise
        server.bind(f"\0{name}-{uuid.uuid4().hex}")
    server.listen(128)
    return server


def _is_ours(name: str) -> bool:
    try:
        connect(name).close()
    except OSError:
        return False
    return True


def connect(name: str) -> Channel:
    """Connect to the keeper called `name`, under that name or one that `listen` used instead.

    Raises:
        OSError: there is no such keeper, or it belongs to another user.
    """
    try:
        return _connect(name, 1_000_000)
    except OSError:
        names = _similar_names(name)
        for other in random.sample(names, min(len(names), _MAX_NAMES)):
            with contextlib.suppress(OSError):
                return _connect(other, 1_000)
        raise


def _similar_names(name: str) -> list[str]:
    """The names of listening sockets on this machine that begin like those that `listen` uses instead of `name`.

    The file also has a line with the server's name for each connection that is not accepted yet. These are left out.
    """
    with contextlib.suppress(OSError):
        lines = [line.partition(" @") for line in _SOCKETS.read_text(errors="replace").splitlines()]
        return [
            other for state, _, other in lines if other.startswith(f"{name}-") and state.split()[3:4] == [_LISTENING]
        ]
    return []


def _connect(name: str, wait_us: int) -> Channel:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Connecting blocks while the socket's queue is full, and another user may keep the queue full.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(*divmod(wait_us, 1_000_000)))
        client.connect(f"\0{name}")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(0, 0))
        check_same_user(client)
    except OSError:
        client.close()
        raise
    close_in_children(client)
    return Channel(client)


def check_same_user(connected: socket.socket) -> None:
    """Check that the process at the other end belongs to this user.

    Raises:
        PermissionError: it belongs to another user, or this system cannot identify it.
    """
    if sys.platform != "linux":
        raise PermissionError("the other side cannot be identified on this system")
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    if user != os.getuid():
        raise PermissionError(f"the other side belongs to user {user}")
