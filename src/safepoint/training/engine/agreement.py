"""What the ranks have agreed on so far within one `train()` call, and whether a step can still be finished.

Nothing that was decided is taken back: a stop that was heard in an evaluation still holds at the next boundary.

A vote begun before the optimizer is heard in the step in which a signal came; it also makes a short step wait,
because the optimizer of a small model leaves no time to hide it. So the ranks agree: while steps are short, the vote
begins with the step, and a signal may be heard one such step later (docs/adr/0002).
"""

from safepoint.foundation import clock
from safepoint.training.collective.peers import Peers
from safepoint.training.collective.vote import Ballot, Decision, Vote
from safepoint.training.context.termination import Termination
from safepoint.training.engine.save_clock import SaveClock

_SAVE_GUESS_S = 1.0
"""How long a save may take, before one was measured."""
_SHORT_STEP_MS = 250
"""Steps shorter than this on every rank begin with the vote: what it costs beside the optimizer, 1.3 ms on two
ranks of one machine (docs/benchmarks.md), is more than the half percent of them that it may cost."""


class Agreement:
    """The votes of one `train()` call.

    Args:
        termination: the signals of this rank.
        peers: all ranks.
    """

    def __init__(self, termination: Termination, peers: Peers) -> None:
        self._termination = termination
        self._vote = Vote(peers)
        self._micro_step_s: float | None = None
        self._micro_started_s = clock.monotonic_s()
        self._step_started_s = self._micro_started_s
        self._step_ms = 0
        self._num_micro_steps = 0
        self.decision = Decision()
        """Everything decided so far; `save` and `is_due` are reset by `save_done`."""
        self.save_s: float | None = None
        """Seconds that the last save took."""
        self.save_clock = SaveClock(None)
        """Says when a periodic checkpoint is due; on the first rank only, and the others hear of it."""

    def exchange(self, step: int, *, micro_steps_left: int = 0) -> None:
        """Hear the last vote and begin the next; every rank does so at the same point of the loop.

        Args:
            step: optimizer steps done.
            micro_steps_left: micro-batches until the running step is done, when it may be given up.
        """
        self.hear()
        self._vote.start(self._ballot(micro_steps_left), step=step)

    def hear(self) -> None:
        """Hear the last vote, where no next one begins."""
        self._add(self._vote.collect())

    def settle(self, step: int) -> None:
        """Vote and wait for the outcome, where nothing is left to overlap with."""
        self._add(self._vote.take(self._ballot(0), step=step))

    def save_done(self) -> None:
        """The checkpoint that was asked for, or due, exists."""
        self.decision = self.decision._replace(save=False, is_due=False)

    def step_begins(self, step: int) -> None:
        """The first micro-batch of a step begins: vote, if steps are short.

        Args:
            step: optimizer steps done.
        """
        self._num_micro_steps = 0
        self._micro_started_s = clock.monotonic_s()
        if self._votes_with_step:
            self.exchange(step)

    def gradients_complete(self, step: int) -> None:
        """The optimizer works next: vote, if steps are long.

        Args:
            step: optimizer steps done.
        """
        self.micro_step_ends()
        if not self._votes_with_step:
            self.exchange(step)

    def step_ends(self) -> None:
        """The optimizer is done: hear the vote, which is the step's last."""
        self._step_ms = max(1, round(1000 * (clock.monotonic_s() - self._step_started_s)))
        self.hear()

    def step_left_s(self) -> float:
        """Seconds until the running step is probably done; 0 when it takes longer than the last one did."""
        return max(0.0, self._step_ms / 1000 - (clock.monotonic_s() - self._step_started_s))

    def boundary_ends(self) -> None:
        """Log line, evaluation and save of a step are done: the next step's pace counts from here, data included."""
        self._step_started_s = clock.monotonic_s()

    def micro_step_ends(self) -> None:
        """A micro-batch is done: measure it."""
        now_s = clock.monotonic_s()
        took_s = now_s - self._micro_started_s
        self._micro_started_s = now_s
        self._num_micro_steps += 1
        # Half new, half old: follows a change of pace within a few micro-batches, ignores a single hiccup.
        self._micro_step_s = took_s if self._micro_step_s is None else 0.5 * (self._micro_step_s + took_s)

    def micro_steps_left(self, in_step: int) -> int:
        """How many of the step's `in_step` micro-batches are still to come."""
        return max(0, in_step - self._num_micro_steps)

    def needed_s(self, micro_steps_left: int) -> float:
        """Seconds to finish the step and save it, from what was measured so far."""
        return micro_steps_left * (self._micro_step_s or 0.0) + (self.save_s or _SAVE_GUESS_S)

    @property
    def _votes_with_step(self) -> bool:
        # From what all ranks heard, at a point that all ranks reach: they never disagree.
        return 0 < self.decision.step_ms < _SHORT_STEP_MS

    def _ballot(self, micro_steps_left: int) -> Ballot:
        termination = self._termination
        if termination.stop_signal:
            termination.begin_stop()
        give_up = micro_steps_left > 0 and self.needed_s(micro_steps_left) > termination.available_s
        return Ballot(
            stop_signal=termination.stop_signal,
            save=termination.take_save_request(),
            give_up=give_up,
            step_ms=self._step_ms,
            is_due=self.save_clock.is_due(),
        )

    def _add(self, decision: Decision) -> None:
        if decision.stop and not self.decision.stop:
            self._termination.begin_stop()
        self.decision |= decision
