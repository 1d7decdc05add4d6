"""Tests of safepoint.jobs.cluster.suspension.websocket: frames as a server sends them, also hostile ones."""

import struct

import httpcore2
import pytest

from safepoint.errors import StorageError, TransientError
from safepoint.jobs.cluster.suspension.websocket import messages


class Server:
    """A connection that delivers these bytes, at most `step` at once, and remembers what it receives."""

    def __init__(self, data: bytes, step: int = 1) -> None:
        self.data, self.step = data, step
        self.received = b""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        taken, self.data = self.data[: self.step], self.data[self.step :]
        return taken

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.received += buffer


def frame(kind: int, data: bytes, *, is_last: bool = True) -> bytes:
    head = bytes((kind | (0x80 if is_last else 0),))
    if len(data) < 126:
        return head + bytes((len(data),)) + data
    if len(data) < 1 << 16:
        return head + bytes((126,)) + struct.pack("!H", len(data)) + data
    return head + bytes((127,)) + struct.pack("!Q", len(data)) + data


CLOSE = frame(8, b"")


@pytest.mark.parametrize("step", [1, 3, 1 << 20])
@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536])
def test_messages_of_every_length(step: int, size: int) -> None:
    data = bytes(size)
    server = Server(frame(2, data) + frame(1, b"text") + CLOSE, max(step, size // 100))
    assert list(messages(server, idle_s=1)) == [data, b"text"]


def test_parts_are_joined_and_pings_are_answered_between_them() -> None:
    server = Server(frame(2, b"one ", is_last=False) + frame(9, b"are you there") + frame(0, b"two") + CLOSE)
    assert list(messages(server, idle_s=1)) == [b"one two"]
    head, size, mask, body = server.received[0], server.received[1], server.received[2:6], server.received[6:]
    assert (head, size) == (0x8A, 0x80 | 13)
    assert bytes(byte ^ mask[index % 4] for index, byte in enumerate(body)) == b"are you there"


@pytest.mark.parametrize(
    "data",
    [
        frame(2, b"")[:1] + bytes((127,)) + b"\xff" * 8,
        frame(2, bytes(1 << 20), is_last=False) + frame(0, b"x"),
        bytes((0x82, 0x81)) + b"maskx",
    ],
)
def test_what_no_server_may_send_is_refused(data: bytes) -> None:
    with pytest.raises(StorageError):
        list(messages(Server(data, 1 << 16), idle_s=1))


@pytest.mark.parametrize("data", [b"", b"\x82", frame(2, b"abc")[:-1]])
def test_a_connection_that_ends_early(data: bytes) -> None:
    with pytest.raises(TransientError, match="ended too early"):
        list(messages(Server(data), idle_s=1))


def test_a_server_that_is_silent() -> None:
    class Silent(Server):
        def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
            raise httpcore2.ReadTimeout

    with pytest.raises(TransientError, match="ReadTimeout"):
        list(messages(Silent(b""), idle_s=1))
