"""What keeper and ranks say to each other arrives whole, with its descriptors, from the same user."""

import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.snapshot.protocol.channel import Channel, check_same_user, connect, listen, new_name

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


def pair() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


@settings(max_examples=50, deadline=None)
@given(sent=st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=3), max_size=5))
def test_messages_arrive_in_their_order(sent: list[dict[str, Any]]) -> None:
    """Whatever JSON can say."""
    one, other = pair()
    for message in sent:
        one.send(message)
    assert [other.receive() for _ in sent] == [(message, []) for message in sent]
    one.close()
    assert other.receive() is None
    other.close()


def test_large_messages_from_many_threads() -> None:
    """More than a socket holds at a time, and none within another."""
    one, other = pair()
    texts = [letter * 300_000 for letter in "abcdefgh"]
    threads = [threading.Thread(target=one.send, args=[{"text": text}]) for text in texts]
    for thread in threads:
        thread.start()
    received = [other.receive() for _ in texts]
    for thread in threads:
        thread.join()
    assert sorted(message[0]["text"] for message in received if message) == texts
    one.close()
    other.close()


def test_descriptors_come_with_their_message() -> None:
    """As copies of one's own."""
    one, other = pair()
    reading, writing = os.pipe()
    one.send({"n": 1})
    one.send({"n": 2}, [writing])
    one.send({"n": 3})
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
    [b"", b"abc", HEADER.pack(5, 0) + b"abc", HEADER.pack(3, 0) + b"{x}", HEADER.pack(1 << 31, 0), b"\xff" * 20],
    ids=["nothing", "half a header", "half a body", "no JSON", "too much", "noise"],
)
def test_what_is_no_message_ends_the_connection(sent: bytes) -> None:
    """Nobody waits, and nothing is taken for a message."""
    one, other = socket.socketpair()
    one.sendall(sent)
    one.close()
    channel = Channel(other)
    assert channel.receive() is None
    channel.close()


def test_a_closed_channel_wakes_who_listens() -> None:
    """On this side, and on the other."""
    one, other = pair()
    heard: list[Any] = []
    threads = [threading.Thread(target=lambda c=c: heard.append(c.receive())) for c in (one, other)]
    for thread in threads:
        thread.start()
    one.close()
    for thread in threads:
        thread.join()
    assert heard == [None, None]
    with pytest.raises(OSError, match=r"."):
        one.send({})
    other.close()


def test_a_name_is_reached_while_somebody_listens() -> None:
    """It has no file, one owner at a time, and is gone with it."""
    name = new_name()
    with pytest.raises(ConnectionRefusedError):
        connect(name)
    server = listen(name)
    assert f"@{name}" in Path("/proc/net/unix").read_text()
    with pytest.raises(OSError, match="in use"):
        listen(name)
    channel = connect(name)
    accepted, _ = server.accept()
    check_same_user(accepted)
    there = Channel(accepted)
    channel.send({"hello": 1})
    assert there.receive() == ({"hello": 1}, [])
    there.close()
    channel.close()
    server.close()
    assert name not in Path("/proc/net/unix").read_text()
    assert new_name() != name


def test_another_user_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as keeper nor as rank."""
    name = new_name()
    with listen(name) as server:
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        with pytest.raises(PermissionError, match=f"belongs to user {user}"):
            connect(name)
        accepted, _ = server.accept()
        with accepted, pytest.raises(PermissionError):
            check_same_user(accepted)
