"""Where in the step the ranks vote: all at the same place, which follows the slowest rank's pace."""

import os
from pathlib import Path

import pytest

from safepoint.foundation import clock
from safepoint.foundation.environment import Place
from safepoint.training.collective.peers import Peers, Reduction
from safepoint.training.context.termination import Termination
from safepoint.training.engine.agreement import Agreement
from safepoint.training.outcome.hold import HOLD_S, Hold

STEP_MS_AT = 4  # of the values of a ballot


class OtherRank(Peers):
    """Another rank that votes at the same points and says that its steps take `step_ms`."""

    def __init__(self, step_ms: int) -> None:
        super().__init__(Place(), timeout_s=1)
        self.step_ms = step_ms
        self.num_votes = 0

    def start_maximum(self, values: list[int]) -> Reduction:
        self.num_votes += 1
        theirs = [*values]
        theirs[STEP_MS_AT] = self.step_ms
        return super().start_maximum([max(pair) for pair in zip(values, theirs, strict=True)])


@pytest.mark.parametrize(
    ("other_ms", "own_s", "place"),
    [(50, 0.05, (1, 0)), (400, 0.05, (0, 1)), (50, 0.4, (0, 1)), (249, 0.249, (1, 0)), (250, 0.1, (0, 1))],
)
def test_the_slowest_rank_sets_the_place(
    other_ms: int, own_s: float, place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One vote per step: with the step when steps are short on every rank, otherwise before the optimizer."""
    now_s = 0.0
    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s)
    termination = Termination(within_s=30)
    peers = OtherRank(other_ms)
    agreement = Agreement(termination, peers)
    places = []
    for number in range(6):
        begun = peers.num_votes
        agreement.step_begins(number)
        with_step = peers.num_votes - begun
        now_s += own_s
        agreement.gradients_complete(number)
        agreement.step_ends()
        now_s += 10  # an evaluation
        agreement.boundary_ends()
        places.append((with_step, peers.num_votes - begun - with_step))
    assert all(sum(votes) == 1 for votes in places)
    assert places[0] == (0, 1), "nothing was measured yet"
    assert places[3:] == [place] * 3


def test_waiting_for_data_counts_as_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that is slower than the model hides a vote as well as the model does."""
    now_s = 0.0
    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s)
    termination = Termination(within_s=30)
    peers = OtherRank(50)
    agreement = Agreement(termination, peers)
    for number in range(6):
        now_s += 1  # the loader
        begun = peers.num_votes
        agreement.step_begins(number)
        assert peers.num_votes == begun or number < 2, "a pace was measured by then"
        now_s += 0.05
        agreement.gradients_complete(number)
        agreement.step_ends()
        agreement.boundary_ends()


def test_a_wish_that_comes_late_in_a_short_step_is_heard_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vote of a short step is cast at its beginning; what comes after it is not lost."""
    now_s = 0.0
    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s)
    termination = Termination(within_s=30)
    agreement = Agreement(termination, OtherRank(50))
    for number in range(3):
        agreement.step_begins(number)
        now_s += 0.05
        agreement.gradients_complete(number)
        agreement.step_ends()
        agreement.boundary_ends()
    agreement.step_begins(3)
    termination.request_save()
    agreement.gradients_complete(3)
    agreement.step_ends()
    assert not agreement.decision.save
    agreement.step_begins(4)
    agreement.gradients_complete(4)
    agreement.step_ends()
    assert agreement.decision.save


def test_the_ranks_wait_only_while_a_hold_is_requested(tmp_path: Path) -> None:
    """Without a file, a requested save is one; a file that nothing touches any more ends the hold."""
    termination, hold = Termination(within_s=30), Hold(tmp_path)
    agreement = Agreement(termination, Peers(Place(), timeout_s=1), hold)
    termination.request_save()
    agreement.vote_now(1)
    assert (agreement.decision.save, agreement.decision.hold) == (True, False)
    agreement.save_done()
    hold.request()
    agreement.vote_now(2)
    assert not agreement.decision.hold, "nothing was saved for it"
    termination.request_save()
    agreement.vote_now(3)
    assert (agreement.decision.save, agreement.decision.hold) == (True, True)
    agreement.save_done()
    assert agreement.holds_on(3)
    assert agreement.holds_on(3)
    long_ago_s = clock.wall_s() - HOLD_S - 1
    os.utime(tmp_path / "hold", (long_ago_s, long_ago_s))
    assert not agreement.holds_on(3)
    hold.request()
    assert agreement.holds_on(3)
    termination.stop_signal = 15
    assert not agreement.holds_on(3)
    assert agreement.decision.stop
