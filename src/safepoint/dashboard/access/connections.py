"""Limits how many connections each session has, and how many connections without a session there are.

If there were no limits, one session or program could use up all connections of the server.

A connection belongs to the session of its last request. A connection without a session ends after ten seconds. At
most 64 connections of each session are open at a time, and at most 64 connections without a session. If a 65th
connection of one of these groups is opened, the oldest connection of one user in the group ends: the user who has the
most connections in it. With TLS, a handshake also ends after ten seconds, and at most 64 handshakes run at a time.

The memory that connections without a session take is limited, too. At most 16 of them hold more than 128 KiB at a
time, and each of the 16 holds at most about 1.5 MiB. If a 17th connection holds more than 128 KiB, a connection ends
by the same rule.

For a connection from this machine, `scope["state"]["user"]` of its requests names the user of the machine who has
opened it. All connections from other machines count as connections of one user.
"""

import asyncio
import contextlib
import ipaddress
import itertools
import socket
from collections.abc import Iterable
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from safepoint.dashboard.access.request_reader import RequestReader
from safepoint.foundation import clock
from safepoint.foundation.channels.socket_owner import is_established, user_at_other_end

_UNKNOWN_S = 10.0
_MOST_OF_SESSION = 64
_MOST_BEGINNING = 64
_LARGE_BYTES = 128 << 10
_MOST_LARGE = 16
"""The limit of connections without a session that hold more than `_LARGE_BYTES`. A browser has at most six
connections to an address, and each of them needs the memory only until its request is read."""
ACCEPTED_AT_ONCE = 32
"""How many connections the event loop accepts at once. With TLS, each connection takes some memory, even if it ends
before it is served."""
_numbers = itertools.count()


class BoundedListener(socket.socket):
    """A listening socket that limits the number of connections that the server has not begun to serve."""

    def __init__(self, family: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._beginning: dict[socket.socket, float] = {}  # connection → when it began; the oldest one is first

    def listen(self, backlog: int = ACCEPTED_AT_ONCE, /) -> None:
        """Let as many connections wait as may begin. `backlog` is how many connections asyncio accepts at once."""
        del backlog
        super().listen(_MOST_BEGINNING)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. End connections that began too long ago and, if there are too many, the oldest."""
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
        """Note that the server has begun to serve a connection. With TLS, the handshake is then complete."""
        self._beginning = {one: since_s for one, since_s in self._beginning.items() if one.fileno() != descriptor}


class BoundedConnection(H11Protocol):
    """One connection. `listener` is the socket that has accepted it."""

    listener: BoundedListener
    _session: str | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = self._reader = RequestReader()

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Begin to serve the connection."""
        super().connection_made(transport)
        self.number = next(_numbers)
        self.user = _user_of(transport)
        self.app_state = {**self.app_state, "user": self.user}
        self.listener.is_served(transport.get_extra_info("socket").fileno())
        self._limit = self.loop.call_later(_UNKNOWN_S, self._end_if_unknown)
        of_session: dict[str | None, list[BoundedConnection]] = {}
        for one in self._oldest_first():
            of_session.setdefault(one.session, []).append(one)
        for connections in of_session.values():
            for one in _surplus(connections, _MOST_OF_SESSION):
                one.transport.abort()

    def _oldest_first(self) -> "list[BoundedConnection]":
        return sorted(cast("set[BoundedConnection]", self.connections), key=lambda one: one.number)

    def data_received(self, data: bytes) -> None:
        """Read what has arrived. If connections without a session hold too much, end some of them."""
        super().data_received(data)
        if self.is_large:
            for one in _surplus([one for one in self._oldest_first() if one.is_large], _MOST_LARGE):
                one.transport.abort()

    @property
    def is_large(self) -> bool:
        """Whether the connection has no session, and the server holds more than `_LARGE_BYTES` for it."""
        cycle: Any = self.cycle
        body_bytes = 0 if cycle is None else len(cycle.body)
        return self._reader.held_bytes + body_bytes > _LARGE_BYTES and self.session is None

    def send_400_response(self, msg: str) -> None:
        """Refuse an invalid request. If the answer to its beginning has begun or is being made, end the connection.

        The base class would then send two answers, and asyncio would write the error to the terminal.
        """
        cycle: Any = self.cycle
        is_answered = cycle is None or cycle.response_complete
        if is_answered and self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(self._reader.refusal or msg)
            return
        if cycle is not None:
            cycle.disconnected = True  # drops the answer that is being made
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection has ended."""
        self._limit.cancel()
        super().connection_lost(exc)
        # After a reset, the timer would keep the last request in memory for five seconds.
        self._unset_keepalive_if_required()

    def on_response_complete(self) -> None:
        """Note the session of the request, which replaces the session of the request before it."""
        self._session = self.session
        super().on_response_complete()

    @property
    def session(self) -> str | None:
        """The session of the last request that had a session; None if there was none. `Guard` sets the session."""
        scope: Any = self.scope
        visitor: Any = None if scope is None else scope["state"].get("visitor")
        return self._session if visitor is None else visitor.session

    def _end_if_unknown(self) -> None:
        if self.session is None:
            self.transport.abort()  # `close` would wait until the other side has read everything


def _surplus(connections: Iterable[BoundedConnection], most: int) -> list[BoundedConnection]:
    """The connections that have to end, because there are too many.

    The user with the most connections loses the oldest. So a stranger who opens connections all the time ends only
    connections of their own, and not the new connection of a visitor, which has no session yet.

    Args:
        connections: all connections of one group, oldest first.
        most: how many connections may stay.
    """
    of_user: dict[str, list[BoundedConnection]] = {}
    for one in connections:
        of_user.setdefault(one.user, []).append(one)
    num_left = sum(map(len, of_user.values())) - most
    return [max(of_user.values(), key=len).pop(0) for _ in range(num_left)]


def _user_of(transport: asyncio.Transport) -> str:
    """The user who has opened a connection from this machine, or `unknown`; empty for a connection from another
    machine."""
    connected: Any = transport.get_extra_info("socket")
    owner = user_at_other_end(connected)
    if owner is not None:
        return str(owner)
    # The client is on another machine, or the connection has ended, at least in one direction.
    client, server = (transport.get_extra_info(which)[0].partition("%")[0] for which in ("peername", "sockname"))
    is_here = client == server or ipaddress.ip_address(server).is_loopback
    return "unknown" if is_here or not is_established(connected) else ""


def protocol_of(listener: BoundedListener) -> type[BoundedConnection]:
    """The class of the connections that `listener` accepts."""
    return type("Connection", (BoundedConnection,), {"listener": listener})
