"""The protocol of torch's TCPStore, served from Python.

Safepoint serves the store itself, because torch's own server listens on every interface and answers every client. The
clients are torch's own: they run in torch elastic's agent and in the ranks. In their protocol, a query is one byte,
then integers in the machine's byte order, keys and values. Before each key and each value comes its length
(torch/csrc/distributed/c10d/TCPStoreBackend.hpp). The server unpickles no data.
"""

import asyncio
import struct
from collections import defaultdict, deque
from collections.abc import Iterable
from enum import IntEnum

_MAGIC = 0x3C85F7CE
_MAX_KEYS = 128 * 1024
_MAX_KEY_BYTES = 8 * 1024
_MAX_VALUE_BYTES = 64 << 20
_COUNT = struct.Struct("=Q")
_NUMBER = struct.Struct("=q")
_WORD = struct.Struct("=I")
_READY, _NOT_READY = b"\0", b"\1"
_STOP_WAITING, _WAIT_CANCELED = b"\0", b"\1"


class _Query(IntEnum):
    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18


class ProtocolError(Exception):
    """A client did not follow the protocol; its connection is closed."""


class KeyValues:
    """The store's content, and the clients that wait for keys. Only one thread may use an object of this class."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.queues: defaultdict[bytes, deque[bytes]] = defaultdict(deque)
        self._waiting: defaultdict[bytes, list[_Connection]] = defaultdict(list)

    def has_all(self, keys: Iterable[bytes]) -> bool:
        """Whether each of `keys` has a value, or a queue that is not empty."""
        return all(key in self.values or self.queues.get(key) for key in keys)

    def put(self, key: bytes, value: bytes) -> None:
        """Store a value, and reply to the clients that wait for its key."""
        self.values[key] = value
        self.wake(key)

    def add(self, key: bytes, amount: int) -> int:
        """Add `amount` to the number under `key`, which starts at 0. Returns the sum.

        Raises:
            ProtocolError: the value under `key` is not a number.
        """
        total = self._number(key) + amount
        self.put(key, str(total).encode())
        return total

    def arrive(self, connection: "_Connection", key: bytes, num_expected: int) -> bool:
        """Count `connection` as arrived at the barrier `key`. If it is not the last to arrive, it waits.

        Returns:
            Whether all `num_expected` connections have arrived.
        """
        count = self._number(key) + 1
        self.values[key] = str(count).encode()
        if count < num_expected:
            self.wait(connection, {key})
            return False
        self.wake(key)
        return True

    def push(self, key: bytes, value: bytes) -> None:
        """Append `value` to the queue `key`, and reply to one of the clients that wait for this queue."""
        self.queues[key].append(value)
        if waiting := self._waiting.get(key):
            waiting.pop(0).arrived(key)

    def _number(self, key: bytes) -> int:
        try:
            return int(self.values.get(key, b"0"))
        except ValueError as error:
            raise ProtocolError("the value is not a number") from error

    def wait(self, connection: "_Connection", keys: set[bytes]) -> None:
        """Make `connection` wait. Its client receives a reply when all `keys` are set."""
        connection.missing = keys
        for key in keys:
            self._waiting[key].append(connection)

    def wake(self, key: bytes) -> None:
        """Record that `key` is set, and reply to each client that waited only for this key."""
        for connection in self._waiting.pop(key, ()):
            connection.arrived(key)

    def forget(self, connection: "_Connection") -> None:
        """End the wait of `connection`."""
        for key in connection.missing:
            waiting = [other for other in self._waiting.pop(key, ()) if other is not connection]
            if waiting:
                self._waiting[key] = waiting
        connection.missing = set()


async def serve(store: KeyValues, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one client until it ends the connection.

    Raises:
        ProtocolError: the client did not follow the protocol.
        asyncio.IncompleteReadError: the client ended the connection in the middle of a query.
    """
    connection = _Connection(store, reader, writer)
    try:
        await connection.answer_all()
    finally:
        store.forget(connection)


class _Connection:
    def __init__(self, store: KeyValues, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.missing: set[bytes] = set()
        self._store = store
        self._reader = reader
        self._writer = writer
        self._answers = {
            _Query.SET: self._set,
            _Query.COMPARE_SET: self._compare_set,
            _Query.GET: self._get,
            _Query.ADD: self._add,
            _Query.CHECK: self._check,
            _Query.WAIT: self._wait,
            _Query.GETNUMKEYS: self._count_keys,
            _Query.DELETE_KEY: self._delete,
            _Query.APPEND: self._append,
            _Query.MULTI_GET: self._get_several,
            _Query.MULTI_SET: self._set_several,
            _Query.CANCEL_WAIT: self._cancel_wait,
            _Query.PING: self._ping,
            _Query.QUEUE_PUSH: self._push,
            _Query.QUEUE_POP: self._pop,
            _Query.QUEUE_LEN: self._count_queued,
            _Query.LIST_KEYS: self._list_keys,
            _Query.BARRIER: self._barrier,
        }

    def arrived(self, key: bytes) -> None:
        """Record that one of the missing keys is set; reply to the client if no key is missing any more."""
        self.missing.discard(key)
        if not self.missing:
            self._writer.write(_STOP_WAITING)

    async def answer_all(self) -> None:
        first = await self._reader.read(1)
        if not first:
            return
        if first[0] != _Query.VALIDATE or (await self._unpack(_WORD)) != _MAGIC:
            raise ProtocolError("the client does not speak the protocol of a TCPStore")
        while query := await self._reader.read(1):
            answer = self._answers.get(query[0])  # pyright: ignore[reportArgumentType]
            if answer is None:
                raise ProtocolError(f"unknown query {query[0]}")
            await answer()
            await self._writer.drain()

    async def _unpack(self, layout: struct.Struct) -> int:
        return layout.unpack(await self._reader.readexactly(layout.size))[0]

    async def _bytes(self, limit: int) -> bytes:
        length = await self._unpack(_COUNT)
        if length > limit:
            raise ProtocolError(f"a key or value of {length} bytes; the limit is {limit}")
        return await self._reader.readexactly(length)

    async def _key(self) -> bytes:
        return await self._bytes(_MAX_KEY_BYTES)

    async def _value(self) -> bytes:
        return await self._bytes(_MAX_VALUE_BYTES)

    async def _keys(self) -> list[bytes]:
        count = await self._unpack(_COUNT)
        if count > _MAX_KEYS:
            raise ProtocolError(f"a query with {count} keys; the limit is {_MAX_KEYS}")
        return [await self._key() for _ in range(count)]

    def _send_bytes(self, value: bytes) -> None:
        self._writer.write(_COUNT.pack(len(value)) + value)

    async def _set(self) -> None:
        key = await self._key()
        self._store.put(key, await self._value())

    async def _compare_set(self) -> None:
        key, expected, desired = await self._key(), await self._value(), await self._value()
        value = self._store.values.get(key)
        if value == expected or (value is None and not expected):
            self._store.put(key, desired)
            value = desired
        self._send_bytes(expected if value is None else value)

    async def _get(self) -> None:
        self._send_bytes(self._store.values.get(await self._key(), b""))

    async def _add(self) -> None:
        key = await self._key()
        self._writer.write(_NUMBER.pack(self._store.add(key, await self._unpack(_NUMBER))))

    async def _check(self) -> None:
        self._writer.write(_READY if self._store.has_all(await self._keys()) else _NOT_READY)

    async def _wait(self) -> None:
        missing = {key for key in await self._keys() if not self._store.has_all([key])}
        if missing:
            self._store.wait(self, missing)
        else:
            self._writer.write(_STOP_WAITING)

    async def _count_keys(self) -> None:
        self._writer.write(_NUMBER.pack(len(self._store.values)))

    async def _delete(self) -> None:
        self._writer.write(_NUMBER.pack(self._store.values.pop(await self._key(), None) is not None))

    async def _append(self) -> None:
        key = await self._key()
        self._store.put(key, self._store.values.get(key, b"") + await self._value())

    async def _get_several(self) -> None:
        for key in await self._keys():
            self._send_bytes(self._store.values.get(key, b""))

    async def _set_several(self) -> None:
        for _ in range(await self._unpack(_COUNT)):
            await self._set()

    async def _cancel_wait(self) -> None:
        self._store.forget(self)
        self._writer.write(_WAIT_CANCELED)

    async def _ping(self) -> None:
        self._writer.write(await self._reader.readexactly(_WORD.size))

    async def _push(self) -> None:
        key = await self._key()
        self._store.push(key, await self._value())

    async def _pop(self) -> None:
        queue = self._store.queues[await self._key()]
        self._writer.write(_NUMBER.pack(len(queue)))
        if queue:
            self._send_bytes(queue.popleft())

    async def _count_queued(self) -> None:
        self._writer.write(_NUMBER.pack(len(self._store.queues[await self._key()])))

    async def _list_keys(self) -> None:
        self._writer.write(_COUNT.pack(len(self._store.values)))
        for key in self._store.values:
            self._send_bytes(key)

    async def _barrier(self) -> None:
        key, num_expected = await self._key(), await self._unpack(_NUMBER)
        if self._store.arrive(self, key, num_expected):
            self._writer.write(_STOP_WAITING)
