"""A rank's side of its connection, the keeper's side played by the test."""

import socket
from collections.abc import Iterator
from typing import TypeVar

import pytest

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.foundation.channels.channel import Channel
from safepoint.foundation.channels.codec import encode
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.protocol import messages
from safepoint.snapshot.protocol.bounded_dict import BoundedDict
from safepoint.snapshot.protocol.messages import Outcome

_Message = TypeVar("_Message", bound=messages.RankMessage)


class Other:
    """The keeper's end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.receive(messages.Hello)
        self.receive(messages.LendBlock)

    def receive(self, kind: type[_Message]) -> _Message:
        message = messages.decode_rank_message(self._channel.receive()[0])
        assert isinstance(message, kind)
        return message

    def send(self, message: messages.KeeperMessage) -> None:
        self._channel.send(encode(message))

    def send_bytes(self, body: bytes) -> None:
        self._channel.send(body)

    def send_outcome(self, request: int, outcome: Outcome) -> None:
        self.send(messages.SaveEnded(request=request, outcome=outcome))

    def close(self) -> None:
        self._channel.close()


@pytest.fixture(name="ends")
def _ends() -> Iterator[tuple[KeeperClient, Other]]:
    mine, others = socket.socketpair()
    keeper = KeeperClient(Channel(mine), rank=0, num_ranks=1)
    other = Other(Channel(others))
    yield keeper, other
    keeper.close()
    other.close()


def _begin(keeper: KeeperClient, other: Other, step: int) -> int:
    keeper.begin_snapshot(step, (), trigger=Trigger.PERIODIC, is_requested=True, facts=None, number=1)
    return other.receive(messages.BeginSnapshot).request


def test_the_outcome_of_an_earlier_beginning_is_ignored(ends: tuple[KeeperClient, Other]) -> None:
    """A step is cancelled, begun again, and only then the outcome of the first beginning arrives."""
    keeper, other = ends
    first = _begin(keeper, other, 3)
    second = _begin(keeper, other, 3)
    other.send_outcome(first, Outcome(step=3, error="rank 1 could not stage its part"))
    other.send_outcome(second, Outcome(step=3, error="", path="/there"))
    outcome = keeper.wait(3, None)
    assert outcome.is_durable
    assert outcome.path == "/there"


def test_a_later_request_is_another_one(ends: tuple[KeeperClient, Other]) -> None:
    """The outcome of a snapshot that was not requested does not count once it is requested."""
    keeper, other = ends
    request = _begin(keeper, other, 3)
    other.send_outcome(request, Outcome(step=3, error="no"))
    assert not keeper.wait(3, None).is_durable
    keeper.request_save(3, Trigger.JIT)
    assert keeper.outcome(3) is None
    other.send_outcome(other.receive(messages.RequestSave).request, Outcome(step=3, error=""))
    assert keeper.wait(3, None).is_durable


def test_no_one_waits_for_what_was_not_requested(ends: tuple[KeeperClient, Other]) -> None:
    """A step that was never begun, or so long ago that it is forgotten."""
    keeper, other = ends
    assert "not requested" in keeper.wait(3, None).error
    for step in range(300):
        _begin(keeper, other, step)
    assert "too long ago" in keeper.wait(0, None).error


def test_waiting_ends_when_the_keeper_is_gone(ends: tuple[KeeperClient, Other]) -> None:
    """A keeper that is gone answers nothing more."""
    keeper, other = ends
    _begin(keeper, other, 3)
    other.close()
    assert keeper.wait(3, None).error == "the keeper ended"


@pytest.mark.parametrize("body", [b"", b"\xff", b"{}", b'{"type":"Hello"}', b'{"type":"Welcome","pid":-1}'])
def test_an_invalid_message_of_the_keeper_ends_its_use(
    ends: tuple[KeeperClient, Other], body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves are synchronous then; the training goes on."""
    keeper, other = ends
    _begin(keeper, other, 3)
    other.send_bytes(body)
    assert keeper.wait(3, None).error == "the keeper ended"
    assert not keeper.is_alive
    assert "the keeper sent an invalid message" in caplog.text


def test_a_refusal_is_logged(ends: tuple[KeeperClient, Other], caplog: pytest.LogCaptureFixture) -> None:
    """The keeper says why, and closes the connection."""
    keeper, other = ends
    _begin(keeper, other, 3)
    other.send(messages.Refused(reason="another version"))
    other.close()
    assert keeper.wait(3, None).error == "the keeper ended"
    assert "the keeper refused this rank: another version" in caplog.text


def test_the_oldest_entries_are_forgotten() -> None:
    """By the time when they were set last, not first."""
    recent: BoundedDict[int, int] = BoundedDict()
    for number in range(256):
        recent[number] = number
    recent[0] = 1
    recent[256] = 256
    assert 1 not in recent
    assert recent[0] == 1
    assert len(recent) == 256
