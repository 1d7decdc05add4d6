"""The vote: the request of one rank is enough, and ranks at different points of the loop fail."""

import pytest

from safepoint.errors import PeerError
from safepoint.foundation.environment import Place
from safepoint.training.collective.peers import Peers, Reduction
from safepoint.training.collective.vote import Ballot, Decision, Vote


class TwoRanks(Peers):
    """This rank's values, and another rank's beside them."""

    def __init__(self, other: list[int]) -> None:
        super().__init__(Place(), timeout_s=1)
        self.other = other

    def start_maximum(self, values: list[int]) -> Reduction:
        return super().start_maximum([max(pair) for pair in zip(values, self.other, strict=True)])


def decide(vote: Vote, ballot: Ballot) -> Decision:
    vote.start(ballot, step=7)
    return vote.collect()


def test_another_ranks_signal_stops_all_ranks() -> None:
    """The decision names the signal and the rank that received it."""
    vote = Vote(TwoRanks([15, 1, 0, 0, 120, 7, -7, 1, -1]))
    decision = decide(vote, Ballot(step_ms=90))
    assert decision == Decision(stop_signal=15, stop_rank=1, step_ms=120)
    assert decision.stop


@pytest.mark.parametrize("other", [[0, -1, 0, 0, 0, 8, -8, 1, -1], [0, -1, 0, 0, 0, 7, -7, 2, -2]])
def test_ranks_at_different_points_fail(other: list[int]) -> None:
    """Another step, or another number of votes: an error, and nothing is saved."""
    with pytest.raises(PeerError, match="different points"):
        decide(Vote(TwoRanks(other)), Ballot())


def test_nothing_decided_is_taken_back() -> None:
    """A decision to stop stays, with its first cause."""
    both = Decision(stop_signal=15, stop_rank=0) | Decision(stop_signal=2, stop_rank=1, save=True)
    assert both == Decision(stop_signal=15, stop_rank=0, save=True)


def test_without_a_vote_nothing_is_requested() -> None:
    """Collecting twice is harmless."""
    vote = Vote(Peers(Place(), timeout_s=1))
    vote.start(Ballot(save=True), step=1)
    assert vote.collect().save
    assert vote.collect() == Decision()


def test_another_reduction_does_not_change_a_vote_under_way() -> None:
    """A vote that an evaluation has started is collected at the boundary, and a snapshot is agreed on in between."""
    peers = Peers(Place(), timeout_s=1)
    vote = Vote(peers)
    vote.start(Ballot(save=True, step_ms=120), step=7)
    values = [2, 40, 0, 0, 0, 0, 0, 0, 0]
    assert peers.start_maximum(values).wait() == values
    assert vote.collect() == Decision(save=True, step_ms=120)


@pytest.mark.parametrize(
    ("mine", "theirs", "outcome"),
    [
        (Ballot(is_due=True), 0, Decision(is_due=True)),
        (Ballot(), 1, Decision(is_due=True)),
        (Ballot(is_due=True), 2, Decision(save=True)),
        (Ballot(save=True), 1, Decision(save=True)),
    ],
)
def test_one_ranks_clock_is_enough(mine: Ballot, theirs: int, outcome: Decision) -> None:
    """A checkpoint that is due by one rank's clock is due for all, and one that was requested takes precedence."""
    assert decide(Vote(TwoRanks([0, -1, theirs, 0, 0, 7, -7, 1, -1])), mine) == outcome
