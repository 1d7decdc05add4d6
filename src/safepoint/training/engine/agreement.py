"""What the ranks have agreed on in one training, and whether a step can still be finished.

A decision is never withdrawn. For example, a stop request that arrives in an evaluation is still in effect at the
next boundary (the point between two optimizer steps).

The ranks vote by one small all-reduce in each step. If steps are long, the vote starts just before `optimizer.step`,
and a signal takes effect in the step in which it arrives. With a small model, `optimizer.step` is faster than the
vote, so the training would have to wait. If steps are short, the vote therefore starts at the beginning of the step,
and a signal may take effect one step later (docs/adr/0002).
"""

from safepoint.foundation import clock
from safepoint.training.collective.peers import Peers
from safepoint.training.collective.vote import Ballot, Decision, Vote
from safepoint.training.context.termination import Termination
from safepoint.training.engine.save_clock import SaveClock
from safepoint.training.outcome.hold import Hold

_SAVE_GUESS_S = 1.0
"""The assumed time of a save, in seconds, before the first save was measured."""
_SHORT_STEP_MS = 250
"""If steps are shorter than this, the vote starts with the step. If they are longer, the vote starts just before
`optimizer.step`. Such a late vote costs 1.3 ms on two ranks of one machine (docs/benchmarks.md): half a percent of
250 ms."""


class Agreement:
    """The votes of one training.

    Args:
        termination: the signals of this rank.
        peers: all ranks.
        hold: says whether the ranks wait after a requested save. They wait if a suspension of the job may follow,
            because the suspension would lose the steps after the save. Only the `hold` of the first rank is used.
    """

    def __init__(self, termination: Termination, peers: Peers, hold: Hold | None = None) -> None:
        self._termination = termination
        self._hold = Hold(None) if hold is None else hold
        self._vote = Vote(peers)
        self._micro_step_s: float | None = None
        self._micro_started_s = clock.monotonic_s()
        self._step_started_s = self._micro_started_s
        self._step_ms = 0
        self._num_micro_steps = 0
        self.decision = Decision()
        """All decisions so far, combined. `save_done` resets `save`, `is_due` and `hold`."""
        self.save_s: float | None = None
        """Seconds that the last save took."""
        self.save_clock = SaveClock(None)
        """Says when a periodic checkpoint is due. Only the first rank's clock decides; the vote carries the
        decision."""

    def exchange(self, step: int, *, micro_steps_left: int = 0) -> None:
        """Receive the result of the last vote and start the next vote.

        Every rank calls this method at the same point of the loop.

        Args:
            step: optimizer steps done.
            micro_steps_left: micro-batches that remain in the running step; 0 if the step cannot be given up.
        """
        self.receive()
        self._vote.start(self._ballot(micro_steps_left), step=step)

    def receive(self) -> None:
        """Receive the result of the last vote, without starting another."""
        self._add(self._vote.collect())

    def vote_now(self, step: int) -> None:
        """Vote, and wait for the result."""
        self.exchange(step)
        self.receive()

    def holds_on(self, step: int) -> bool:
        """Vote on whether the ranks keep waiting for a suspension after a requested save.

        Return whether they keep waiting. If the ranks have agreed to stop, the result is False.

        Args:
            step: optimizer steps done.
        """
        self.receive()
        self._vote.start(self._ballot(0, is_holding=True), step=step)
        latest = self._vote.collect()
        self._add(latest)
        return latest.hold and not self.decision.stop

    def save_done(self) -> None:
        """Record that the requested or due save has been handled."""
        self.decision = self.decision._replace(save=False, is_due=False, hold=False)

    def step_begins(self, step: int) -> None:
        """Record that the first micro-batch of a step starts. Start a vote, if steps are short.

        Args:
            step: optimizer steps done.
        """
        self._num_micro_steps = 0
        self._micro_started_s = clock.monotonic_s()
        if self._votes_with_step:
            self.exchange(step)

    def gradients_complete(self, step: int) -> None:
        """Record that `optimizer.step` comes next. Start a vote, if steps are long.

        Args:
            step: optimizer steps done.
        """
        self.micro_step_ends()
        if not self._votes_with_step:
            self.exchange(step)

    def step_ends(self) -> None:
        """Record that `optimizer.step` has ended. Receive the result of the step's last vote."""
        self._step_ms = max(1, round(1000 * (clock.monotonic_s() - self._step_started_s)))
        self.receive()

    def step_left_s(self) -> float:
        """Estimated seconds until the running step is done.

        The result is 0 in the first step of an attempt, and if the running step has already taken longer than the
        last step.
        """
        return max(0.0, self._step_ms / 1000 - (clock.monotonic_s() - self._step_started_s))

    def boundary_ends(self) -> None:
        """Record that log line, evaluation and save of this step are done. The time of the next step begins now."""
        self._step_started_s = clock.monotonic_s()

    def micro_step_ends(self) -> None:
        """Record that a micro-batch is done, and measure how long it took."""
        now_s = clock.monotonic_s()
        took_s = now_s - self._micro_started_s
        self._micro_started_s = now_s
        self._num_micro_steps += 1
        # The new estimate is the mean of the old estimate and the new time. It follows a change of speed within a few
        # micro-batches.
        self._micro_step_s = took_s if self._micro_step_s is None else 0.5 * (self._micro_step_s + took_s)

    def micro_steps_left(self, in_step: int) -> int:
        """How many of the `in_step` micro-batches of the step remain."""
        return max(0, in_step - self._num_micro_steps)

    def needed_s(self, micro_steps_left: int) -> float:
        """Estimated seconds to finish the step and save it, from the times measured so far."""
        return micro_steps_left * (self._micro_step_s or 0.0) + (self.save_s or _SAVE_GUESS_S)

    @property
    def _votes_with_step(self) -> bool:
        # All ranks have received the same decisions, so this value is the same on all ranks.
        return 0 < self.decision.step_ms < _SHORT_STEP_MS

    def _ballot(self, micro_steps_left: int, *, is_holding: bool = False) -> Ballot:
        termination = self._termination
        is_requested = termination.take_save_request()
        if termination.stop_signal:
            termination.begin_stop()
        give_up = micro_steps_left > 0 and self.needed_s(micro_steps_left) > termination.available_s
        return Ballot(
            stop_signal=termination.stop_signal,
            save=is_requested,
            give_up=give_up,
            step_ms=self._step_ms,
            is_due=self.save_clock.is_due(),
            hold=(is_requested or is_holding) and self._hold.is_requested,
        )

    def _add(self, decision: Decision) -> None:
        if decision.stop and not self.decision.stop:
            self._termination.begin_stop()
        self.decision |= decision
