"""How a rank finds its keeper, and connects to it over a Unix socket.

The keeper is the process of a node that writes snapshots to disk.

The socket is in the abstract namespace: it has no file that would have to be removed. Any user can listen under a
name in this namespace, so rank and keeper each check that the process at the other end belongs to the same user.

A keeper has several possible names, and uses the first free name. The names are computed from a key that other users
do not know. They see a name only while a keeper uses it. When this keeper dies, they can take this name, but not the
name that the next keeper with the same key will use.
"""

import errno
import hashlib
import os
import socket
import struct
import sys
import uuid

from safepoint.foundation.channels.channel import Channel
from safepoint.foundation.processes import close_in_children, is_this_user

_NUM_NAMES = 8
"""How many names a keeper may use. Another user can take one of them each time that a keeper dies."""
_SHORT_US, _LONG_US = 10_000, 1_000_000
"""How long to wait for a socket whose queue is full. All names are tried with the short wait first, because another
user may keep a queue full."""
_CREDENTIALS = struct.Struct("3i")
_TIME = struct.Struct("ll")


def new_keeper_key() -> str:
    """A new key for a keeper, which no other process has."""
    return f"safepoint-{os.getuid()}-{os.getpid()}-{uuid.uuid4().hex}"


def names_of(key: str) -> list[str]:
    """The names that the keeper with this key may use, in this order.

    Args:
        key: a part that everyone may know, a dash, and a part that only this user knows.
    """
    known, _, secret = key.rpartition("-")
    digests = (hashlib.sha256(f"{secret} {number}".encode()).hexdigest() for number in range(_NUM_NAMES))
    return [f"{known}-{digest[:24]}" for digest in digests]


def listen(key: str) -> socket.socket:
    """Accept connections under the first name of `key` that no other user has taken.

    Raises:
        OSError: another keeper of this user has the key, or other users have taken all names.
    """
    if _is_in_use(key):
        raise OSError(errno.EADDRINUSE, "the name of the keeper is in use")
    for name in names_of(key):
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.bind(f"\0{name}")
        except OSError:
            server.close()
            continue
        server.listen(128)
        return server
    raise OSError(errno.EADDRINUSE, "other users have taken all names of the keeper")


def _is_in_use(key: str) -> bool:
    try:
        connect(key).close()
    except OSError:
        return False
    return True


def connect(key: str) -> Channel:
    """Connect to the keeper with this key.

    Raises:
        OSError: no keeper with this key listens, the keeper belongs to another user, or its queue stays full.
    """
    failure: OSError = ConnectionRefusedError(errno.ECONNREFUSED, "no keeper listens")
    names = names_of(key)
    for wait_us in (_SHORT_US, _LONG_US):
        full: list[str] = []
        for name in names:
            try:
                return _connect(name, wait_us)
            except BlockingIOError as error:
                failure = error
                full.append(name)
            except ConnectionRefusedError:
                continue
            except OSError as error:
                failure = error
        names = full
    raise failure


def _connect(name: str, wait_us: int) -> Channel:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
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
        PermissionError: the process belongs to another user, or this system cannot identify it.
    """
    if sys.platform != "linux":
        raise PermissionError("the other side cannot be identified on this system")
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    if not is_this_user(user):
        raise PermissionError(f"the other side belongs to user {user}")
