"""Frames arrive whole, with their descriptors, and in time."""

import os
import socket
import struct
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.foundation.channels.channel import Channel, ChannelError


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
    with pytest.raises(ChannelError, match="it has ended"):
        other.receive()
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
    assert sorted(frame for frame, _ in received) == frames
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
    assert [len(item[1]) for item in received] == [0, 1, 0]
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
    with pytest.raises(ChannelError, match="it "):
        channel.receive()
    channel.close()


def test_a_closed_channel_wakes_its_receivers() -> None:
    """On this side, and on the other."""
    one, other = pair()
    errors: list[str] = []

    def receive(channel: Channel) -> None:
        with pytest.raises(ChannelError) as caught:
            channel.receive()
        errors.append(str(caught.value))

    threads = [threading.Thread(target=receive, args=[channel]) for channel in (one, other)]
    for thread in threads:
        thread.start()
    one.close()
    for thread in threads:
        thread.join()
    assert errors == ["it has ended", "it has ended"]
    with pytest.raises(ChannelError, match=r"."):
        one.send(b"")
    for limit_s in (None, 1.0):
        with pytest.raises(ChannelError, match=r"^it has ended$"):  # also a receiver that comes after the end
            one.receive(limit_s)
    other.close()


def test_a_frame_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender gets an error, and the connection goes on."""
    monkeypatch.setattr("safepoint.foundation.channels.channel.MAX_FRAME_BYTES", 10)
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
    with pytest.raises(ChannelError, match="it "):
        channel.receive()
    assert set(os.listdir("/proc/self/fd")) == before
    channel.close()
    one.close()


def test_half_a_frame_ends_with_its_time() -> None:
    """The receiver never waits for longer than it was given."""
    one, other = pair()
    one._socket.send(HEADER.pack(5, 0) + b"abc")
    with pytest.raises(ChannelError, match="it does not answer"):
        other.receive(0.05)
    assert not one.has_data(0)
    other.send(b"")
    assert one.has_data(60)
    one.close()
    other.close()
