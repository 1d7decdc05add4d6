"""A rank's side of its connection: what it makes of the keeper's words, the other end played by the test."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.snapshot.keeper_client.client import KeeperClient
from safepoint.snapshot.protocol.channel import Channel
from safepoint.snapshot.protocol.recent import Recent


class Other:
    """The keeper's end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.hear("hello")
        self.hear("block")

    def hear(self, kind: str) -> dict[str, Any]:
        received = self._channel.receive()
        assert received is not None
        assert received[0]["type"] == kind
        return received[0]

    def tell(self, asked: int, **outcome: Any) -> None:
        self._channel.send({"type": "outcome", "outcome": outcome, "asked": asked})

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
    keeper.begin(step, [], trigger=Trigger.PERIODIC, is_wanted=True, facts=None, number=1)
    return other.hear("begin")["asked"]


def test_what_became_of_an_earlier_beginning_is_no_answer(ends: tuple[KeeperClient, Other]) -> None:
    """A step is given up, begun anew, and only then the word of the first time arrives."""
    keeper, other = ends
    first = _begin(keeper, other, 3)
    second = _begin(keeper, other, 3)
    other.tell(first, step=3, error="rank 1 could not stage its part")
    other.tell(second, step=3, error="", path="/there")
    outcome = keeper.wait(3, None)
    assert outcome.is_durable
    assert outcome.path == "/there"


def test_a_wish_is_another_request(ends: tuple[KeeperClient, Other]) -> None:
    """What is known of a snapshot that nobody wanted does not count once somebody does."""
    keeper, other = ends
    asked = _begin(keeper, other, 3)
    other.tell(asked, step=3, error="no")
    assert not keeper.wait(3, None).is_durable
    keeper.want(3, Trigger.JIT)
    assert keeper.outcome(3) is None
    other.tell(other.hear("want")["asked"], step=3, error="")
    assert keeper.wait(3, None).is_durable


def test_nobody_waits_for_what_was_not_asked(ends: tuple[KeeperClient, Other]) -> None:
    """A step that was never begun, or so long ago that it is forgotten."""
    keeper, other = ends
    assert "not asked for" in keeper.wait(3, None).error
    for step in range(300):
        _begin(keeper, other, step)
    assert "forgotten" in keeper.wait(0, None).error


def test_everybody_who_waits_hears_of_the_end(ends: tuple[KeeperClient, Other]) -> None:
    """A keeper that is gone answers nothing more."""
    keeper, other = ends
    _begin(keeper, other, 3)
    other.close()
    assert keeper.wait(3, None).error == "the keeper ended"


def test_the_longest_ago_is_forgotten() -> None:
    """By when it was set last, not first."""
    recent: Recent[int, int] = Recent()
    for number in range(256):
        recent[number] = number
    recent[0] = 1
    recent[256] = 256
    assert 1 not in recent
    assert recent[0] == 1
    assert len(recent) == 256
