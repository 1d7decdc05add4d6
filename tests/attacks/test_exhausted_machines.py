"""Another user uses up the file descriptors or the processes of the machine for a moment, and connects to the keeper.

The keeper must serve the ranks that connect later. Otherwise each restarted rank would wait for an answer for ever.
"""

import errno
import os
import socket
import threading
from typing import Any

import pytest

from safepoint.foundation.channels.channel import Channel
from safepoint.foundation.channels.codec import encode
from safepoint.snapshot.keeper import __main__ as keeper_process
from safepoint.snapshot.keeper.keeper_state import KeeperState, RankGroup
from safepoint.snapshot.keeper.rescue import rescue
from safepoint.snapshot.protocol.channel import listen, new_keeper_key
from safepoint.snapshot.protocol.messages import Hello, KeeperPlan, Welcome, decode_keeper_message


class Listener:
    """A listening socket.

    Args:
        results: what the calls of `accept` return or raise; after them, the calls wait without end.
    """

    def __init__(self, *results: socket.socket | OSError) -> None:
        self._results = list(results)

    def accept(self) -> tuple[socket.socket, str]:
        if not self._results:
            threading.Event().wait()
        result = self._results.pop(0)
        if isinstance(result, OSError):
            raise result
        return result, ""


def start_keeper(*results: socket.socket | OSError) -> None:
    key = new_keeper_key()
    with listen(key) as server:
        plan = KeeperPlan(key=key, listening=os.dup(server.fileno()), verbosity=0, scratch=None, events=None)
        keeper: Any = keeper_process._Keeper(plan)
    keeper._server.close()
    keeper._server = Listener(*results)
    threading.Thread(target=keeper._accept, daemon=True).start()


def check_welcome(own: socket.socket) -> None:
    """Check that the keeper answers the rank at this end of a connection."""
    channel = Channel(own)
    channel.send(encode(Hello(rank=0, num_ranks=1, restart=0)))
    body, _ = channel.receive(20.0)
    assert isinstance(decode_keeper_message(body), Welcome)
    channel.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ECONNABORTED])
def test_no_descriptor_is_free_when_a_stranger_connects(number: int) -> None:
    own, other = socket.socketpair()
    start_keeper(OSError(number, os.strerror(number)), OSError(number, os.strerror(number)), other)
    check_welcome(own)


def test_no_thread_is_possible_when_a_rank_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """This connection is closed, and the next one is served."""
    refused, first = socket.socketpair()
    own, second = socket.socketpair()
    real, has_failed = threading.Thread.start, threading.Event()

    def start(thread: threading.Thread) -> None:
        if getattr(getattr(thread, "_target", None), "__name__", "") == "_serve" and not has_failed.is_set():
            has_failed.set()
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    start_keeper(first, second)
    check_welcome(own)
    refused.settimeout(20.0)
    assert refused.recv(1) == b""
    refused.close()


def test_no_thread_is_possible_when_ranks_of_several_nodes_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper must not wait for a thread that was never started."""

    class Facts:
        num_nodes = 2

    class Snapshot:
        facts = Facts()

    class Registry:
        snapshots = (Snapshot(),)

    class Reporter:
        log: Any = None

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    warnings: list[str] = []
    state: Any = KeeperState.__new__(KeeperState)
    group: Any = RankGroup.__new__(RankGroup)
    group.registry, group.is_rescuing, group.is_rescued = Registry(), False, False
    state.reporter = Reporter()
    state.reporter.log = type("Log", (), {"warning": lambda _, text, *values: warnings.append(text % values)})()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert rescue(state, group) is None
    assert not group.is_rescuing
    assert group.is_rescued
    assert "can't start new thread" in warnings[0]
