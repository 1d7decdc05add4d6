"""Frames arrive whole, with their descriptors, from processes of the same user."""

import os
import socket
import struct
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.snapshot.protocol.channel import Channel, check_same_user, connect, listen, names_of, new_keeper_key


def pair() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


@settings(max_examples=50, deadline=None)
@given(sent=st.lists(st.binary(max_size=100), max_size=5))
def test_frames_arrive_in_their_order(sent: list[bytes]) -> None:
    """Any bytes, and none."""
    one, other = pair()
    for frame in sent:
        one.send(frame)
    assert [other.receive() for _ in sent] == [(frame, []) for frame in sent]
    one.close()
    assert other.receive() is None
    other.close()


def test_large_frames_from_many_threads() -> None:
    """More than a socket holds at a time, and none within another."""
    one, other = pair()
    frames = [letter.encode() * 300_000 for letter in "abcdefgh"]
    threads = [threading.Thread(target=one.send, args=[frame]) for frame in frames]
    for thread in threads:
        thread.start()
    received = [other.receive() for _ in frames]
    for thread in threads:
        thread.join()
    assert sorted(frame for frame, _ in filter(None, received)) == frames
    one.close()
    other.close()


def test_descriptors_come_with_their_frame() -> None:
    """As copies of one's own."""
    one, other = pair()
    reading, writing = os.pipe()
    one.send(b"1")
    one.send(b"2", [writing])
    one.send(b"3")
    os.close(writing)
    received = [other.receive() for _ in range(3)]
    assert [len(item[1]) for item in received if item] == [0, 1, 0]
    assert received[1] is not None
    [copy] = received[1][1]
    os.write(copy, b"through")
    os.close(copy)
    assert os.read(reading, 100) == b"through"
    assert os.read(reading, 100) == b""
    os.close(reading)
    one.close()
    other.close()


HEADER = struct.Struct("<II")


@pytest.mark.parametrize(
    "sent",
    [b"", b"abc", HEADER.pack(5, 0) + b"abc", HEADER.pack(1 << 31, 0), b"\xff" * 20],
    ids=["nothing", "half a header", "half a body", "too much", "noise"],
)
def test_what_is_no_frame_ends_the_connection(sent: bytes) -> None:
    """The receiver does not wait, and closes what came with half a frame."""
    one, other = socket.socketpair()
    one.sendall(sent)
    one.close()
    channel = Channel(other)
    assert channel.receive() is None
    channel.close()


def test_a_closed_channel_wakes_its_receivers() -> None:
    """On this side, and on the other."""
    one, other = pair()
    received: list[tuple[bytes, list[int]] | None] = []
    threads = [threading.Thread(target=lambda c=c: received.append(c.receive())) for c in (one, other)]
    for thread in threads:
        thread.start()
    one.close()
    for thread in threads:
        thread.join()
    assert received == [None, None]
    with pytest.raises(OSError, match=r"."):
        one.send(b"")
    other.close()


def test_a_name_is_reached_while_a_process_listens() -> None:
    """It has no file, one owner at a time, and is gone with it."""
    key = new_keeper_key()
    name = names_of(key)[0]
    with pytest.raises(ConnectionRefusedError):
        connect(key)
    server = listen(key)
    assert f"@{name}" in Path("/proc/net/unix").read_text()
    with pytest.raises(OSError, match="in use"):
        listen(key)
    server.accept()[0].close()  # the second one asked whose the name is
    channel = connect(key)
    accepted, _ = server.accept()
    check_same_user(accepted)
    there = Channel(accepted)
    channel.send(b"hello")
    assert there.receive() == (b"hello", [])
    there.close()
    channel.close()
    server.close()
    assert name not in Path("/proc/net/unix").read_text()
    assert new_keeper_key() != key


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as keeper nor as rank."""
    key = new_keeper_key()
    with listen(key) as server:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(PermissionError, match=f"belongs to user {user}"):
            connect(key)
        accepted, _ = server.accept()
        with accepted, pytest.raises(PermissionError):
            check_same_user(accepted)


def test_a_frame_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender gets an error, and the connection goes on."""
    monkeypatch.setattr("safepoint.snapshot.protocol.channel.MAX_FRAME_BYTES", 10)
    one, other = pair()
    with pytest.raises(ValueError, match="a frame of 11 bytes is longer than 10"):
        one.send(b"12345678901")
    one.send(b"1234567890")
    assert other.receive() == (b"1234567890", [])
    one.close()
    other.close()


def test_descriptors_of_half_a_frame_are_closed() -> None:
    """A sender that dies in the middle leaves no open file behind."""
    one, other = socket.socketpair()
    before = set(os.listdir("/proc/self/fd"))
    with Path("/dev/null").open() as file:
        socket.send_fds(one, [HEADER.pack(5, 1)], [file.fileno()])
    one.send(b"abc")
    one.shutdown(socket.SHUT_WR)
    channel = Channel(other)
    assert channel.receive() is None
    assert set(os.listdir("/proc/self/fd")) == before
    channel.close()
    one.close()
