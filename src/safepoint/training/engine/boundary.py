"""What every framework's loop does between two optimizer steps, and at its last one: written once, in one order."""

import contextlib
import signal
from collections.abc import Callable

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import Interrupted, PeerError
from safepoint.estimates.cadence import Cadence
from safepoint.foundation.events.run_events import StopRequested
from safepoint.training.collective.peers import Peers
from safepoint.training.context.rank_context import RankContext
from safepoint.training.engine.agreement import Agreement
from safepoint.training.engine.deadline import Deadline
from safepoint.training.engine.loop import TrainingLoop
from safepoint.training.engine.run_facts import RunFacts
from safepoint.training.engine.saves import Saves
from safepoint.training.engine.snapshots import Snapshots
from safepoint.training.engine.synchronous_save import SynchronousSave
from safepoint.training.start.start import Start


class Boundary:
    """The ways to save of one training, and the moves between its steps; all ranks make them in the same order.

    Args:
        context: this rank.
        peers: all ranks.
        framework: whose state is saved; its `step` is the one that the training has reached.
        agreement: their votes.
        output: the folder for checkpoints.
        start: where the training begins.
    """

    def __init__(
        self,
        context: RankContext,
        peers: Peers,
        framework: TrainingLoop,
        agreement: Agreement,
        output: OutputFolder,
        start: Start,
    ) -> None:
        self._context = context
        self._peers = peers
        self._framework = framework
        self._agreement = agreement
        attempt = start.attempt
        facts = RunFacts(run_id=attempt.run_id, attempt=attempt.attempt, attempt_id=attempt.attempt_id)
        self.saver = SynchronousSave(context, peers, framework, output, start.folders, facts)
        """The way without the keeper."""
        self.snapshots = Snapshots(context, peers, framework, self.saver, output, start.folders, attempt.attempt_id)
        """The way over the keeper."""
        self.saves = Saves(context, framework, agreement, self.snapshots, self.saver, output.root)
        """Which way is taken."""
        if start.point is not None and not start.point.is_durable:
            self.saves.postpone(Trigger.PERIODIC)  # what is in memory only is saved again at once
        self._deadline = Deadline(context.termination, context.outcome, context.reporter, agreement, self.snapshots)
        self._cadence = Cadence(context.settings.snapshot_steps)

    def prepare(self) -> None:
        """Before the model is used: what the keeper needs, and the memory for snapshots.

        Raises:
            PeerError: a rank is gone.
        """
        self.snapshots.prepare()

    def close(self, *, is_orderly: bool) -> None:
        """Let go of the snapshots.

        Args:
            is_orderly: whether everything worth keeping is durable; otherwise the keeper sees to it.
        """
        self.snapshots.close(is_orderly=is_orderly)

    def loop_begins(self) -> None:
        """The model is loaded; from here on a signal is answered by a save."""
        self._context.outcome.reached(self._framework.step)
        self.snapshots.begin_loop()
        self._context.termination.enter_training(self._deadline.look)

    def step_ends(self) -> None:
        """The optimizer has stepped: hear the vote, and look after what is being saved and uploaded."""
        self._context.outcome.step_done(self._framework.step)
        self._agreement.step_ends()
        self._context.progress.step_ends()
        self._context.uploads.check()
        self.saves.watch()

    def snapshot_if_due(self) -> None:
        """Keep this boundary in memory; it becomes a checkpoint only when something happens."""
        snapshots = self.snapshots
        if self._cadence.is_due(
            step=self._framework.step,
            last=snapshots.taken_step,
            cost_s=snapshots.cost_s,
            step_s=self._agreement.decision.step_ms / 1000,
        ):
            snapshots.take(Trigger.PERIODIC, self._framework.write_again(), is_wanted=False)

    def ends(self) -> None:
        """All of it is done: the next step's pace counts from here."""
        self._agreement.boundary_ends()
        self._context.progress.boundary_ends()

    def announce_stop(self) -> None:
        """Say once that the ranks have agreed to stop."""
        if not self._deadline.is_met:
            self._deadline.is_met = True
            decision = self._agreement.decision
            name = signal.Signals(decision.stop_signal).name
            self._context.reporter.report(
                StopRequested(signal=name, rank=decision.stop_rank, step=self._framework.step)
            )

    def leave(self, last_words: Callable[[], None]) -> Interrupted:
        """End the training here, with what is saved.

        Args:
            last_words: called when the last save is over.

        Returns:
            What is to be raised.
        """
        context, step = self._context, self._framework.step
        self.announce_stop()
        self.saves.finish()
        last_words()
        is_saved = context.outcome.saved_step == step
        reason = "" if is_saved else "no step was finished" if step == 0 else "the save failed"
        uploads_failed = context.uploads.stop_reason is not None
        with contextlib.suppress(PeerError):  # one that leaves sooner takes nothing of what is saved with it
            uploads_failed = any(self._peers.gather(uploads_failed))
        interrupted = context.outcome.interrupt(is_saved=is_saved, reason=reason, uploads_failed=uploads_failed)
        context.uploads.finish(newest_only=True)
        return interrupted
