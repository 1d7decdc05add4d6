"""Tests of safepoint.jobs.cluster.suspension.websocket and pod_program: frames as a server sends them, also hostile
ones."""

import contextlib
import json
import struct
from collections.abc import Generator, Iterator
from typing import Any, cast

import httpcore2
import pytest

from safepoint.errors import SafepointError, StorageError, TransientError, WaitTimeoutError
from safepoint.foundation import clock
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.suspension.pod_program import run_in_pod
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


class Slow(Server):
    """Each read takes a second. If it has nothing to send, it is silent for as long as the caller waits."""

    def __init__(self, data: bytes, monkeypatch: pytest.MonkeyPatch, step: int = 1) -> None:
        super().__init__(data, step)
        self.now_s = 0.0
        monkeypatch.setattr(clock, "monotonic_s", lambda: self.now_s)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if not self.data:
            assert timeout is not None
            self.now_s += timeout
            raise httpcore2.ReadTimeout
        self.now_s += 1
        return super().read(max_bytes)


@pytest.mark.parametrize("data", [frame(9, b"") * 20, frame(2, b"\x01x")], ids=["pings", "silence"])
def test_a_program_that_does_not_end_in_time(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the server is silent at the deadline. A program that is only silent is another failure."""
    server = Slow(data, monkeypatch, step=2)
    with pytest.raises(WaitTimeoutError, match="did not end within 9 s"):
        list(program(server, idle_s=30, limit_s=9))
    assert server.now_s <= 10
    if server.data == b"":
        with pytest.raises(TransientError, match="ReadTimeout"):
            list(program(Slow(frame(2, b"\x01x"), monkeypatch, step=9), idle_s=3, limit_s=9))


def program(server: Server, *, idle_s: float, limit_s: float) -> Iterator[str]:
    """The lines of a program whose connection is `server`."""

    class Api:
        @contextlib.contextmanager
        def upgraded(self, *_: object, **__: object) -> Generator[Any]:
            yield server

    return run_in_pod(cast("ClusterApi", Api()), "p", "node", ["x"], idle_s=idle_s, limit_s=limit_s)


@pytest.mark.parametrize("last", [b"", b"\n"])
def test_the_last_line_of_a_program(last: bytes) -> None:
    """Also without a line break at its end."""
    ended = frame(2, b"\x03" + json.dumps({"status": "Success"}).encode())
    server = Server(frame(2, b"\x01one\ntwo" + last) + ended + CLOSE)
    assert list(program(server, idle_s=1, limit_s=60)) == ["one", "two"]


def test_the_last_line_of_a_program_that_fails() -> None:
    """Such as the reason for its failure, as JSON."""
    failed = frame(2, b"\x03" + json.dumps({"status": "Failure", "message": "exit code 1"}).encode())
    lines = program(Server(frame(2, b"\x01why") + failed + CLOSE), idle_s=1, limit_s=60)
    assert next(lines) == "why"
    with pytest.raises(SafepointError, match="exit code 1"):
        next(lines)
