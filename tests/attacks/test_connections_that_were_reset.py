"""Another user ends a connection at once, and its pair of addresses becomes that of a connection of this user.

The kernel names the user of the socket that has these addresses now. What the other user has sent can still be read
from the connection that was reset. So a program that asks only the kernel would obey the other user.
"""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest

from safepoint.dashboard.access.connections import _user_of
from safepoint.foundation.channels.socket_owner import owner_of, user_at_other_end
from safepoint.training.integrations.strangers import _stranger_of
from safepoint.training.rendezvous.store_server import StoreServer

_MAGIC = bytes([0]) + (0x3C85F7CE).to_bytes(4, "little")
_PING = bytes([13]) + b"ping"


def _text(value: bytes) -> bytes:
    return struct.pack("=Q", len(value)) + value


_SET = bytes([1]) + _text(b"planted") + _text(b"value")


def connect(address: tuple[str, int], port: int = 0, host: str = "127.0.0.1") -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    client.bind((host, port))
    client.connect(address)
    return client


def send_and_reset(address: tuple[str, int], data: bytes) -> int:
    """Connect, send, and end the connection; returns the port, which is free again."""
    client = connect(address)
    port = client.getsockname()[1]
    client.sendall(data)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
    client.close()
    return port


@pytest.fixture
def listener() -> Generator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def test_the_store_does_not_obey(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is busy while it happens. A stranger can use up all other ports, so a rank gets this one."""
    server = StoreServer()
    server.start()
    address = ("127.0.0.1", server.port)
    is_free, is_held = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        is_free.wait(60)

    server._loop.call_soon_threadsafe(hold)
    assert is_held.wait(60)
    port = send_and_reset(address, _MAGIC + _SET)
    with connect(address, port) as rank:
        is_free.set()
        rank.settimeout(60)
        rank.sendall(_MAGIC + _PING)
        assert rank.recv(4) == b"ping"  # connections are served in the order in which they were made
    assert server._store.values == {}
    server.close()


def test_the_user_is_unknown(listener: socket.socket) -> None:
    """Although the kernel names this user for the same pair of addresses."""
    address = listener.getsockname()
    port = send_and_reset(address, b"data")
    with connect(address, port) as rank, listener.accept()[0] as first, listener.accept()[0] as second:
        assert owner_of(rank.getsockname(), address) == os.geteuid()
        assert first.recv(4) == b"data"
        assert user_at_other_end(first) is None
        assert user_at_other_end(second) == os.geteuid()
        assert seen_by_dashboard(first, rank.getsockname(), address) == "unknown"
        assert seen_by_dashboard(second, rank.getsockname(), address) == str(os.geteuid())


def seen_by_dashboard(connected: socket.socket, client: tuple[str, int], server: tuple[str, int]) -> str:
    known = {"socket": connected, "peername": client, "sockname": server}
    transport: Any = SimpleNamespace(get_extra_info=known.get)
    return _user_of(transport)


def own_address() -> str:
    """An address of this machine that is not on loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # nothing is sent
        if (host := probe.getsockname()[0]) != "0.0.0.0":
            return host
    pytest.skip("this machine has only loopback")


def test_half_a_connection_between_two_addresses_of_this_machine() -> None:
    """It is not taken for a connection of another machine, whose users the kernel cannot name."""
    with socket.create_server((own_address(), 0)) as listener, connect(listener.getsockname()) as client:
        client.sendall(b"data")
        client.shutdown(socket.SHUT_WR)
        with listener.accept()[0] as accepted:
            assert accepted.recv(4) == b"data"
            assert accepted.recv(1) == b""
            assert seen_by_dashboard(accepted, client.getsockname(), listener.getsockname()) == "unknown"
            assert _stranger_of(accepted, {listener.getsockname()[1]}) == "an unknown user"
