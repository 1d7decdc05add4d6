"""Every outcome of a vote, by reducing the ballots of several ranks by hand."""

import itertools

import pytest

from safepoint.errors import PeerError
from safepoint.foundation.environment import Place
from safepoint.training.collective.peers import Peers
from safepoint.training.collective.vote import Ballot, Decision, Vote
from safepoint.training.context.termination import Termination
from safepoint.training.engine.agreement import Agreement


class Hall:
    """Collects the values of all ranks and reduces them when the first one asks."""

    def __init__(self) -> None:
        self.cast: list[list[int]] = []

    def wait(self) -> list[int]:
        return [max(column) for column in zip(*self.cast, strict=True)]


class Seat:
    """One rank's view of the hall."""

    def __init__(self, hall: Hall, rank: int, ranks: int) -> None:
        self.place = Place(rank=rank, world_size=ranks)
        self._hall = hall

    def start_maximum(self, values: list[int]) -> Hall:
        self._hall.cast.append(values)
        return self._hall


def decide(ballots: list[Ballot], steps: list[int] | None = None) -> list[Decision]:
    hall = Hall()
    votes = [Vote(Seat(hall, rank, len(ballots))) for rank in range(len(ballots))]  # type: ignore[arg-type]
    for vote, ballot, step in zip(votes, ballots, steps or [5] * len(ballots), strict=True):
        vote.start(ballot, step=step)
    return [vote.collect() for vote in votes]


REQUESTS = [
    *(Ballot(), Ballot(save=True), Ballot(save=True, hold=True)),
    *(Ballot(stop_signal=15), Ballot(stop_signal=2, give_up=True)),
]


@pytest.mark.parametrize("ballots", list(itertools.product(REQUESTS, repeat=3)))
def test_all_ranks_decide_the_same_and_one_request_is_enough(ballots: tuple[Ballot, ...]) -> None:
    """For every combination of requests on three ranks: one decision, and exactly what was requested."""
    decisions = decide(list(ballots))
    assert len(set(decisions)) == 1
    signalled = [rank for rank, ballot in enumerate(ballots) if ballot.stop_signal]
    assert decisions[0] == Decision(
        stop_signal=max(ballot.stop_signal for ballot in ballots),
        stop_rank=max(signalled, default=-1),
        save=any(ballot.save for ballot in ballots),
        give_up=any(ballot.give_up for ballot in ballots),
        hold=any(ballot.hold for ballot in ballots),
    )


@pytest.mark.parametrize("steps", [[5, 6], [6, 5], [0, 1], [5, 5, 4]])
def test_drifting_ranks_all_fail(steps: list[int]) -> None:
    """No rank, also not the one that is ahead, takes part in a decision over two steps."""
    with pytest.raises(PeerError, match=f"steps {min(steps)} and {max(steps)}"):
        decide([Ballot(save=True)] * len(steps), steps)


def test_taking_a_vote_keeps_what_an_earlier_one_decided() -> None:
    """A vote that was started and not yet collected counts, although another one follows at once."""
    termination = Termination(within_s=60)
    agreement = Agreement(termination, Peers(Place(), timeout_s=1))
    termination.stop_signal = 15
    agreement.exchange(3)
    termination.stop_signal = 0
    termination.request_save()
    agreement.vote_now(3)
    assert agreement.decision == Decision(stop_signal=15, stop_rank=0, save=True)
