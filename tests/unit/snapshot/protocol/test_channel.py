"""A rank finds its keeper by a key, and talks to processes of the same user only."""

import os
from pathlib import Path

import pytest

from safepoint.foundation.channels.channel import Channel
from safepoint.snapshot.protocol.channel import check_same_user, connect, listen, names_of, new_keeper_key


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
