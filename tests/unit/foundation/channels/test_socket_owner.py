"""The kernel's two ways to say who owns a socket agree."""

import os
import socket
from collections.abc import Callable, Iterator

import pytest

from safepoint.foundation.channels import socket_owner
from safepoint.foundation.channels.socket_owner import Address, owner_of

_WAYS = ("_ask", "_find")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")])
def test_an_open_socket_has_its_user(way: str, family: int, host: str, listener: socket.socket) -> None:
    ask: Callable[[Address, Address], int | None] = getattr(socket_owner, way)
    server = listener.getsockname()
    with socket.socket(family) as connecting:
        connecting.connect((host, server[1]))
        with listener.accept()[0] as accepted:
            assert ask(accepted.getpeername(), server) == os.geteuid()


@pytest.mark.parametrize("way", _WAYS)
def test_a_closed_socket_has_no_user(way: str, listener: socket.socket) -> None:
    """Half closed, and after the end."""
    ask: Callable[[Address, Address], int | None] = getattr(socket_owner, way)
    server = listener.getsockname()
    connecting = socket.create_connection(server)
    accepted, client = listener.accept()
    connecting.close()
    assert ask(client, server) is None
    accepted.close()
    assert ask(client, server) is None


@pytest.mark.parametrize("way", _WAYS)
def test_a_listener_is_no_client(way: str, listener: socket.socket) -> None:
    ask: Callable[[Address, Address], int | None] = getattr(socket_owner, way)
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert ask(other.getsockname(), listener.getsockname()) is None


def test_the_table_is_read_where_the_kernel_cannot_be_asked(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(socket_owner, "_ask", refuse)
    with socket.create_connection(listener.getsockname()) as connecting:
        assert owner_of(connecting.getsockname(), listener.getsockname()) == os.geteuid()
