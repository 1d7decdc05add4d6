"""Who may connect to the rendezvous store: this user's processes on this machine, and nodes with the job's secret."""

import asyncio
import contextlib
import hmac
import ipaddress
import secrets
import struct
from collections import Counter
from collections.abc import Callable, Generator
from enum import IntEnum

from safepoint.foundation.channels.socket_owner import user_at_other_end
from safepoint.foundation.processes import is_this_user

_GREETING = b"safepoint rendezvous 1\n"
_NONCE_BYTES = 32
_REQUEST = struct.Struct(f">BI{_NONCE_BYTES}s{_NONCE_BYTES}s32s")
_HANDSHAKE_S = 5.0
_ACCEPTED_S = 0.01
_MAX_HANDSHAKES = 64


class RefusedError(Exception):
    """A client does not belong to this job, or this node has connected to a program that is not the job's store."""


class NoAnswerError(RefusedError):
    """Node 0 did not answer in time, or closed the connection, for example because it is busy."""


class _Proof(IntEnum):
    SECRET = 0
    """The node has the job's secret."""
    TOKEN = 1
    """The node does not have the secret. The node chooses a random token, and sends the token with each connection.
    Node 0 stores the token of the first connection under a node number. Later connections under this number need the
    same token."""


class Gate:
    """Admits the other nodes of a job.

    Args:
        secret: the job's secret.
        num_nodes: the number of nodes. Nodes 1 to `num_nodes - 1` may be admitted.
        is_open: whether to admit nodes that do not have the secret, too. If so, the first client that connects under
            a node number is admitted as this node.
        on_unproven: called with the number of a node that was admitted without the secret.
    """

    def __init__(
        self, secret: bytes, *, num_nodes: int, is_open: bool, on_unproven: Callable[[int], None] = lambda node: None
    ) -> None:
        self._secret = secret
        self._num_nodes = num_nodes
        self._is_open = is_open
        self._on_unproven = on_unproven
        self._tokens: dict[int, bytes] = {}
        self._running: dict[asyncio.StreamWriter, str] = {}

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Require the client at the other end to prove that it is a node of the job.

        Raises:
            RefusedError: the client sends no valid proof in time. The caller closes the connection.
        """
        with self._counting(writer):
            try:
                async with asyncio.timeout(_HANDSHAKE_S):
                    await self._check(reader, writer)
            except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
                raise RefusedError("the client did not complete the handshake") from error

    @contextlib.contextmanager
    def _counting(self, writer: asyncio.StreamWriter) -> Generator[None]:
        """Count a handshake as unfinished while the block runs, and limit the number of unfinished handshakes.

        Without a limit, other programs could use up the file descriptors of this process. If the limit is reached,
        this process closes the oldest connection of the machine that has the most unfinished handshakes. So programs
        on another machine cannot keep the nodes out.
        """
        if len(self._running) >= _MAX_HANDSHAKES:
            most, _ = Counter(self._running.values()).most_common(1)[0]
            oldest = next(other for other, machine in self._running.items() if machine == most)
            del self._running[oldest]
            oldest.close()
        self._running[writer] = _machine_of(writer.get_extra_info("peername")[0])
        try:
            yield
        finally:
            self._running.pop(writer, None)

    async def _check(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        challenge = secrets.token_bytes(_NONCE_BYTES)
        writer.write(_GREETING + challenge)
        proof, node, nonce, token, mac = _REQUEST.unpack(await reader.readexactly(_REQUEST.size))
        key = self._key_of(proof, node, token)
        if key is None or not hmac.compare_digest(mac, _mac(key, b"node", challenge, nonce, node)):
            writer.write(bytes(33))
            await writer.drain()
            raise RefusedError("the client does not know the job's secret")
        if proof == _Proof.TOKEN and node not in self._tokens:
            self._tokens[node] = token
            self._on_unproven(node)
        writer.write(b"\1" + _mac(key, b"store", nonce, challenge, node))

    def _key_of(self, proof: int, node: int, token: bytes) -> bytes | None:
        if not 0 < node < self._num_nodes:
            return None
        if proof == _Proof.SECRET:
            return self._secret
        known = self._tokens.get(node, token)
        is_admitted = self._is_open and proof == _Proof.TOKEN and hmac.compare_digest(known, token)
        return token if is_admitted else None


class Key:
    """Proves to node 0 that a node belongs to the job.

    Args:
        secret: the job's secret.
        node: the node's number.
        may_use_token: whether to use a token if node 0 does not accept the secret.
    """

    def __init__(self, secret: bytes, *, node: int, may_use_token: bool) -> None:
        self._secret = secret
        self._node = node
        self._token = secrets.token_bytes(_NONCE_BYTES)
        self._proofs = [_Proof.SECRET, _Proof.TOKEN] if may_use_token else [_Proof.SECRET]

    async def connect(
        self, host: str, port: int, patience_s: float = _HANDSHAKE_S
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the rendezvous store and prove that this node belongs to the job.

        Args:
            host: the address of node 0.
            port: the port of node 0.
            patience_s: how long to wait for the first message of the store.

        Raises:
            OSError: the store cannot be reached.
            NoAnswerError: the store does not answer in time, or closes the connection.
            RefusedError: the store refuses this node, or the program there is not a rendezvous store of Safepoint.
        """
        while True:
            writer: asyncio.StreamWriter | None = None
            try:
                async with asyncio.timeout(patience_s):
                    reader, writer = await asyncio.open_connection(host, port)
                    greeting = await _greeting_of(reader)
                async with asyncio.timeout(_HANDSHAKE_S):
                    is_admitted = await self._prove(greeting, reader, writer)
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
                if writer is None and not isinstance(error, TimeoutError):
                    raise  # no program listens at this address
                if writer is not None:
                    writer.close()
                raise NoAnswerError(f"{host}:{port} did not answer as a rendezvous of Safepoint does") from error
            except RefusedError:
                if writer is not None:
                    writer.close()
                raise
            if is_admitted:
                return reader, writer
            writer.close()
            if len(self._proofs) == 1:
                raise RefusedError(f"node 0 at {host}:{port} has another secret, or another node has this number")
            self._proofs.pop(0)

    async def _prove(self, challenge: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        is_token = self._proofs[0] == _Proof.TOKEN
        key, token = (self._token, self._token) if is_token else (self._secret, bytes(_NONCE_BYTES))
        mac = _mac(key, b"node", challenge, nonce, self._node)
        writer.write(_REQUEST.pack(self._proofs[0], self._node, nonce, token, mac))
        answer = await reader.readexactly(33)
        if answer[:1] != b"\1":
            return False
        if not hmac.compare_digest(answer[1:], _mac(key, b"store", nonce, challenge, self._node)):
            raise RefusedError("the program at the master's address does not know the job's secret")
        return True


def _machine_of(host: str) -> str:
    """The part of an address that the machine itself cannot choose: all of IPv4, or the first half of IPv6."""
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv4Address):
        return host
    return str(address.ipv4_mapped or int(address) >> 64)


async def _greeting_of(reader: asyncio.StreamReader) -> bytes:
    """Read the store's first message, and return the challenge in it.

    Raises:
        RefusedError: the program at the other end is not a rendezvous store of this release.
    """
    if await reader.readexactly(len(_GREETING)) != _GREETING:
        raise RefusedError("the program at the master's address is not a rendezvous store of this release")
    return await reader.readexactly(_NONCE_BYTES)


def _mac(key: bytes, side: bytes, first: bytes, second: bytes, node: int) -> bytes:
    return hmac.digest(key, side + first + second + node.to_bytes(4, "big"), "sha256")


class SameUser:
    """Connects a node to node 0 on the same machine, and checks that node 0 belongs to the same user.

    Node 0 makes the same check of this node (`is_same_user`).
    """

    async def connect(
        self, host: str, port: int, patience_s: float = _HANDSHAKE_S
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the store.

        Args:
            host: an address of this machine.
            port: the port of node 0.
            patience_s: how long to wait until the store accepts the connection.

        Raises:
            OSError: the store cannot be reached.
            NoAnswerError: no program listens at this address, and the kernel has connected the socket with itself.
            RefusedError: the program at this address belongs to another user, or does not accept the connection.
        """
        reader, writer = await asyncio.open_connection(host, port)
        theirs, ours = writer.get_extra_info("peername")[:2], writer.get_extra_info("sockname")[:2]
        if theirs == ours:  # no program listens, and the kernel has connected the socket with itself
            writer.close()
            raise NoAnswerError(f"no program listens at {host}:{port}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                # None: the program has not accepted the connection yet
                while (owner := user_at_other_end(writer.get_extra_info("socket"))) is None:
                    await asyncio.sleep(_ACCEPTED_S)
                if is_this_user(owner):
                    return reader, writer
        writer.close()
        raise RefusedError(f"the program at {host}:{port} belongs to another user, or does not answer")


def is_same_user(writer: asyncio.StreamWriter) -> bool:
    """Whether the client at the other end of a loopback connection is a process of this user."""
    owner = user_at_other_end(writer.get_extra_info("socket"))
    return owner is not None and is_this_user(owner)
