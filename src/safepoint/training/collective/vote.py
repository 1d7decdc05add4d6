"""The vote: all ranks stop, save or give up a step at the same point of the loop, or no rank does.

Each optimizer step has one small all-reduce (MAX). The all-reduce starts while work is left in the step, and the
ranks read its result when the step ends, so training does not wait for the exchange. If one rank requests something,
all ranks do it.

In the all-reduce, each rank also sends its point of the loop. If the ranks are at different points, they would save
different steps. So all of them raise an error, and nothing is saved. Each rank also sends how long a step takes.
From the longest of these times, all ranks derive where in a step the vote starts: at the beginning, or just before
`optimizer.step` (`engine/agreement.py`).
"""

from typing import NamedTuple

from safepoint.errors import PeerError
from safepoint.training.collective.peers import Peers, Reduction

_DUE, _REQUESTED, _HELD = 1, 2, 3
"""The reasons to save: the schedule, a request, or a request after which the ranks wait. If the ranks have several
reasons, the largest value applies."""


# `Ballot` and `Decision` are named tuples, because every step creates some of them. To create a frozen dataclass
# takes four times as long.
class Ballot(NamedTuple):
    """What one rank requests.

    Args:
        stop_signal: the signal that this rank received, or 0.
        save: save a checkpoint and continue.
        give_up: leave the running step unfinished, because it would end after the deadline.
        step_ms: milliseconds that a step takes on this rank, or 0 if no step was measured.
        is_due: save a checkpoint, because a periodic checkpoint is due by the clock.
        hold: save a checkpoint, and wait after it (see `safepoint.training.outcome.hold`).
    """

    stop_signal: int = 0
    save: bool = False
    give_up: bool = False
    step_ms: int = 0
    is_due: bool = False
    hold: bool = False


class Decision(NamedTuple):
    """What all ranks do.

    Args:
        stop_signal: the signal that a rank received, or 0 to continue.
        stop_rank: the highest rank that received a stop signal, or -1.
        save: save a checkpoint, because a rank requested it.
        give_up: leave the running step unfinished.
        step_ms: milliseconds that a step takes on the slowest rank, or 0 if no step was measured.
        is_due: save a checkpoint, because a periodic checkpoint is due.
        hold: save a checkpoint, and wait after it.
    """

    stop_signal: int = 0
    stop_rank: int = -1
    save: bool = False
    give_up: bool = False
    step_ms: int = 0
    is_due: bool = False
    hold: bool = False

    @property
    def stop(self) -> bool:
        """Whether the run stops, because a rank received a stop signal."""
        return self.stop_signal > 0

    def __or__(self, later: "Decision") -> "Decision":
        """This decision combined with a later one: the requests of both, the first stop, the later `step_ms`."""
        return Decision(
            stop_signal=self.stop_signal or later.stop_signal,
            stop_rank=self.stop_rank if self.stop else later.stop_rank,
            save=self.save or later.save,
            give_up=self.give_up or later.give_up,
            step_ms=later.step_ms or self.step_ms,
            is_due=self.is_due or later.is_due,
            hold=self.hold or later.hold,
        )


class Vote:
    """Runs the votes of `peers`, one at a time.

    Args:
        peers: the ranks that vote.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._num_votes = 0
        self._running: Reduction | None = None

    def start(self, ballot: Ballot, *, step: int) -> None:
        """Start a vote. Every rank calls this method at the same point of the loop, when no vote is in progress.

        Args:
            ballot: what this rank requests.
            step: optimizer steps done.
        """
        self._num_votes += 1
        rank = self._peers.place.rank
        save = _HELD if ballot.hold else _REQUESTED if ballot.save else _DUE if ballot.is_due else 0
        self._running = self._peers.start_maximum(
            [
                ballot.stop_signal,
                rank if ballot.stop_signal else -1,
                save,
                int(ballot.give_up),
                ballot.step_ms,
                step,
                -step,
                self._num_votes,
                -self._num_votes,
            ]
        )

    def collect(self) -> Decision:
        """Wait for the vote in progress and return its outcome, or an empty decision if no vote is in progress.

        Raises:
            PeerError: a rank has ended, does not answer, or is at another point of the loop.
        """
        if self._running is None:
            return Decision()
        values = self._running.wait()
        self._running = None
        signal, rank, save, give_up, step_ms, most_steps, least_steps, most_votes, least_votes = values
        if most_steps != -least_steps or most_votes != -least_votes:
            raise PeerError(
                f"the ranks are at different points of the training loop (steps {-least_steps} and {most_steps}, "
                f"after {-least_votes} and {most_votes} exchanges between the ranks); rank {self._peers.place.rank} "
                "ends and nothing is saved",
                hint="every rank must run the same number of steps and evaluations",
            )
        return Decision(
            stop_signal=signal,
            stop_rank=rank,
            save=save in {_REQUESTED, _HELD},
            give_up=bool(give_up),
            step_ms=step_ms,
            is_due=save == _DUE,
            hold=save == _HELD,
        )
