"""The sockets of the rendezvous, on a thread of the launcher.

On every node, the server listens at a socket on loopback, and serves only processes of the same user. The clients are
the ranks, and torch elastic's agent, which supervises the ranks. On node 0, the socket leads to the store itself. On
any other node, the server passes each connection on to node 0. Before this, the two nodes prove to each other that
they belong to the job (`admission`).
"""

import asyncio
import contextlib
import errno
import logging
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import TypeVar

from safepoint.foundation import clock
from safepoint.training.rendezvous.admission import (
    Gate,
    Key,
    NoAnswerError,
    RefusedError,
    SameUser,
    is_same_user,
)
from safepoint.training.rendezvous.store_protocol import KeyValues, ProtocolError, serve

_log = logging.getLogger("safepoint")
_LOOPBACK = "127.0.0.1"
_BLOCK_BYTES = 64 << 10
_BACKLOG = 100
"""How many connections may wait to be accepted.

If the queue were longer, a node would wait too long behind programs that do not belong to the job.
"""
_PATIENCE_S = 120.0
"""For how long `_connect` tries again while node 0 does not answer in time."""
_AGAIN_S = 0.1
_FIRST_PATIENCE_S, _MORE_PATIENCE = 1.0, 1.1
_T = TypeVar("_T")
_Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class StoreServer:
    """Serves the job's store to the processes of one node and, on node 0, to the other nodes.

    Args:
        port: the port on loopback; 0 for any free port.
        listening: the descriptor of a socket that listens at this port already. The server closes this socket. If
            None, the server opens a socket.
    """

    def __init__(self, port: int = 0, listening: int | None = None) -> None:
        self._store = KeyValues()
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="safepoint-rendezvous", daemon=True)
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()
        """References to the tasks of connections, because the event loop itself keeps none."""
        self._transports: weakref.WeakSet[asyncio.WriteTransport] = weakref.WeakSet()
        """All connections. A connection stays open after its task has ended, until the client has read all
        answers."""
        self.requested_port = port
        """The port that was given; 0 for any free port."""
        self._listening = listening
        self._upstream: tuple[Key | SameUser, str, int] | None = None
        self.port = 0
        """The port on loopback; 0 before `start`."""

    def start(self) -> None:
        """Begin to serve the processes of this node.

        Raises:
            OSError: the port is taken.
        """
        self._thread.start()
        listening = (
            _bind(_LOOPBACK, self.requested_port)
            if self._listening is None
            else socket.socket(fileno=self._listening)
        )
        self.port = self._wait(self._listen(listening, self._local_client))

    def serve_nodes(self, gate: Gate, port: int) -> None:
        """On node 0: begin to serve the other nodes.

        Args:
            gate: decides which clients to admit.
            port: the port, on all addresses of this machine.

        Raises:
            OSError: the port is taken.
        """

        async def node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await gate.admit(reader, writer)
            await serve(self._store, reader, writer)

        self._wait(self._listen(_bind("", port), node))

    def pass_on(self, key: Key | SameUser, host: str, port: int) -> None:
        """On all nodes except node 0: from now on, pass the connections of this node's processes on to node 0.

        Args:
            key: makes the connections, and proves that this node belongs to the job.
            host: the address of node 0.
            port: the port at which node 0 serves the other nodes.

        Raises:
            OSError: node 0 cannot be reached now.
            RefusedError: node 0 refuses this node or does not answer, or the program at its address is not a
                rendezvous store of Safepoint.
        """

        async def try_once() -> None:
            _, writer = await _connect(key, host, port)
            writer.close()

        self._wait(try_once())
        self._upstream = key, host, port

    def close(self) -> None:
        """Stop the server, and close all connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._serve_until_stopped())

    async def _serve_until_stopped(self) -> None:
        await self._stopped.wait()
        for server in self._servers:
            server.close()
        await asyncio.sleep(0)  # a connection that was just accepted gets its task in the next iteration
        while connections := asyncio.all_tasks() - {asyncio.current_task()}:
            for connection in connections:
                connection.cancel()
            await asyncio.gather(*connections, return_exceptions=True)
        for transport in list(self._transports):
            if not transport.is_closing() or transport.get_write_buffer_size():  # `abort` fails if it is closed
                transport.abort()
        await asyncio.sleep(0)  # the sockets are closed in the next iteration of the event loop

    def _wait(self, work: Awaitable[_T]) -> _T:
        async def run() -> _T:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    async def _listen(self, listening: socket.socket, client: _Client) -> int:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await client(reader, writer)
            except (RefusedError, ProtocolError) as error:
                peer = writer.get_extra_info("peername")
                _log.debug("rendezvous: closed a connection from %s: %s", peer, error)
            except asyncio.CancelledError:  # the server ends, and does not wait until the client has read everything
                writer.transport.abort()
            except (OSError, asyncio.IncompleteReadError):
                pass  # the client has closed the connection

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._transports.add(writer.transport)
            task = asyncio.create_task(talk(reader, writer))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            # Close the socket here, and not in `talk`: if a task is cancelled before it has begun, nothing of `talk`
            # runs, and the socket would stay open.
            task.add_done_callback(lambda _: writer.close())

        server = await asyncio.start_server(connected, sock=listening, backlog=_BACKLOG)
        self._servers.append(server)
        return listening.getsockname()[1]

    async def _local_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not is_same_user(writer):
            raise RefusedError("the client belongs to another user")
        if self._upstream is None:
            await serve(self._store, reader, writer)
            return
        key, host, port = self._upstream
        others_reader, others_writer = await _connect(key, host, port)
        self._transports.add(others_writer.transport)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, others_writer))
                both.create_task(_copy(others_reader, writer))
        except* OSError:
            pass
        finally:
            others_writer.close()


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket. If `host` is empty and the machine has IPv6 and IPv4, the socket serves both."""
    if not host and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        except OSError as error:
            # If IPv6 is switched off, use IPv4. Raise all other errors: if this node served only IPv4, another user
            # could take the port for IPv6 and intercept connections.
            if error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:  # IPv6 is switched off
                raise
    return socket.create_server((host, port), backlog=_BACKLOG)


async def _connect(key: Key | SameUser, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to node 0. While node 0 does not answer, try again: other programs may keep it busy.

    If other programs connect very often, node 0's kernel drops some requests to connect. This node's kernel would
    repeat a dropped request only after 1, 3, 7, 15 and 31 s. A new connection may succeed sooner.
    """
    give_up_s, patience_s = clock.monotonic_s() + _PATIENCE_S, _FIRST_PATIENCE_S
    while True:
        try:
            return await key.connect(host, port, patience_s)
        except NoAnswerError:
            if clock.monotonic_s() > give_up_s:
                raise
        await asyncio.sleep(_AGAIN_S)
        patience_s *= _MORE_PATIENCE


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_BLOCK_BYTES):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()
