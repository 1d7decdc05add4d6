"""Limits the connections of programs that are not signed in, which could otherwise use up all connections.

A connection counts as known after a request in a valid session. Other connections end after ten seconds, and at most
64 of them are open at a time: a further one ends the oldest. With TLS, the handshake has the same time limit, and at
most 128 handshakes run.

A connection on loopback also notes which user of the machine has opened it, in `scope["state"]["user"]` of its
requests.
"""

import asyncio
import contextlib
import ipaddress
import itertools
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from safepoint.foundation import clock
from safepoint.foundation.channels.socket_owner import owner_of

_UNKNOWN_S = 10.0
_MOST_UNKNOWN = 64
_MOST_BEGINNING = 128
_numbers = itertools.count()


class BoundedListener(socket.socket):
    """A listening socket that bounds the connections which the server has not begun to serve."""

    def __init__(self, family: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._beginning: dict[socket.socket, float] = {}  # connection → when it began; the oldest one is first

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Shut others down that began too long ago, or that are too many."""
        connected, address = super().accept()
        now_s = clock.monotonic_s()
        self._beginning = {one: since_s for one, since_s in self._beginning.items() if one.fileno() >= 0}
        oldest = list(self._beginning)[: max(0, len(self._beginning) - _MOST_BEGINNING + 1)]
        late = [one for one, since_s in self._beginning.items() if now_s - since_s > _UNKNOWN_S]
        for one in {*oldest, *late}:
            del self._beginning[one]
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._beginning[connected] = now_s
        return connected, address

    def is_served(self, descriptor: int) -> None:
        """Note that the server has begun to serve a connection: with TLS, that the handshake is complete."""
        self._beginning = {one: since_s for one, since_s in self._beginning.items() if one.fileno() != descriptor}


class BoundedConnection(H11Protocol):
    """One connection. `listener` is the socket that has accepted it."""

    listener: BoundedListener
    _has_session = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Begin to serve the connection."""
        super().connection_made(transport)
        self.number = next(_numbers)
        self.app_state = {**self.app_state, "user": _user_of(transport)}
        self.listener.is_served(transport.get_extra_info("socket").fileno())
        self._limit = self.loop.call_later(_UNKNOWN_S, self._end_if_unknown)
        others: list[Any] = [one for one in self.connections if not getattr(one, "is_known", True)]
        for one in sorted(others, key=lambda one: one.number)[:-_MOST_UNKNOWN]:
            one.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection has ended."""
        self._limit.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Note whether the request was one of a session, before the next request takes its place."""
        self._has_session = self.is_known
        super().on_response_complete()

    @property
    def is_known(self) -> bool:
        """Whether a request on this connection was one of a session; `Guard` finds this out."""
        scope: Any = self.scope
        return self._has_session or (scope is not None and scope["state"].get("visitor") is not None)

    def _end_if_unknown(self) -> None:
        if not self.is_known:
            self.transport.abort()  # `close` would wait until the other side has read everything


def _user_of(transport: asyncio.Transport) -> str:
    """The user who has opened a connection on loopback; empty for a connection of another machine."""
    client, server = transport.get_extra_info("peername")[:2], transport.get_extra_info("sockname")[:2]
    if not ipaddress.ip_address(server[0].partition("%")[0]).is_loopback:
        return ""
    owner = owner_of(client, server)
    return "unknown" if owner is None else str(owner)


def protocol_of(listener: BoundedListener) -> type[BoundedConnection]:
    """The class of the connections that `listener` accepts."""
    return type("Connection", (BoundedConnection,), {"listener": listener})
