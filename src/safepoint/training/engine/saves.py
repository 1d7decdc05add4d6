"""The saves of one training: handed to the keeper where that can be, waited for where it cannot."""

from pathlib import Path

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import Trigger
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.foundation import clock
from safepoint.progress.record import State
from safepoint.training.context.rank_context import RankContext
from safepoint.training.engine.agreement import Agreement
from safepoint.training.engine.loop import TrainingLoop, Write
from safepoint.training.engine.save_clock import SaveClock, read_losses
from safepoint.training.engine.snapshots import Handover, Snapshots
from safepoint.training.engine.synchronous_save import SynchronousSave


class Saves:
    """Knows which step is saved, or about to be; what it answers is the same on every rank.

    Args:
        context: this rank.
        framework: whose state is saved.
        agreement: is told what a save costs.
        snapshots: the way over the keeper.
        saver: the way without it.
        root: where checkpoints go.
    """

    def __init__(
        self,
        context: RankContext,
        framework: TrainingLoop,
        agreement: Agreement,
        snapshots: Snapshots,
        saver: SynchronousSave,
        root: Path,
    ) -> None:
        self._context = context
        self._framework = framework
        self._agreement = agreement
        self._snapshots = snapshots
        self._saver = saver
        self._root = root
        self.step: int | None = None
        """The newest step that was saved or handed over in this call, unless that has failed since."""
        self.handed_step: int | None = None
        """The step that was handed over and has not been waited for."""
        self._postponed: Trigger | None = None
        if context.place.is_first:
            events = OutputFolder(root).events
            agreement.save_clock = SaveClock(context.settings.save_every, lambda: read_losses(events))

    @property
    def is_postponed(self) -> bool:
        """Whether a save is due that could not begin."""
        return self._postponed is not None

    def postpone(self, trigger: Trigger) -> None:
        """A save is due at the next boundary."""
        self._postponed = trigger

    def watch(self) -> None:
        """Look whether the keeper has finished the last save, and how."""
        outcome = self._snapshots.poll()
        if outcome is None:
            return
        self._framework.handed_step = None
        if not outcome.is_durable and self.step == outcome.step:
            self.step = self._context.outcome.saved_step
        self._agreement.save_s = self._snapshots.save_s or self._agreement.save_s

    def save(self, trigger: Trigger, write: Write, *, is_last: bool) -> bool:
        """Hand a snapshot of this boundary over to the keeper, or save it and wait.

        Args:
            trigger: why.
            write: writes this rank's files.
            is_last: whether there is no next step to which it could be postponed.

        Returns:
            Whether training was held up by a save that was waited for.

        Raises:
            PeerError: a rank is gone.
        """
        if trigger == Trigger.PERIODIC and self._postponed is not None:
            trigger = self._postponed
        began_s = clock.monotonic_s()
        handover = self._hand_over(trigger, write, is_last=is_last)
        self._postponed = trigger if handover == Handover.BUSY else None
        if self.is_postponed:
            self._context.log.info(
                "the save at step %s waits: the one before is still being written", self._framework.step
            )
        waited = handover == Handover.IMPOSSIBLE
        if waited:
            self._save_and_wait(trigger, write)
        stall_s = max(clock.monotonic_s() - began_s, self._snapshots.cost_s or 0.0)
        self._agreement.save_clock.saved(stall_s=stall_s, writing_s=self._agreement.save_s)
        return waited

    def _hand_over(self, trigger: Trigger, write: Write, *, is_last: bool) -> Handover:
        handover = self._snapshots.take(trigger, write, is_wanted=True)
        if handover == Handover.BUSY and is_last:
            self._snapshots.wait_until_free()
            handover = self._snapshots.take(trigger, write, is_wanted=True)
            if handover == Handover.BUSY:
                handover = Handover.IMPOSSIBLE
        if handover == Handover.TAKEN:
            self.step = self.handed_step = self._framework.handed_step = self._framework.step
        return handover

    def _save_and_wait(self, trigger: Trigger, write: Write) -> None:
        consequence = "an older checkpoint stands" if self._context.outcome.saved_step is not None else "none exists"
        with self._context.progress.during(State.SAVING):
            committed = self._saver.save(
                trigger,
                write,
                consequence=consequence if trigger == Trigger.JIT else f"training goes on, {consequence}",
            )
        if committed:
            self.step = self._framework.step
            self.handed_step = self._framework.handed_step = None  # an older one: nobody is going to wait for it
            self._postponed = None
            self._agreement.save_s = self._saver.last_duration_s

    def want(self, step: int) -> bool:
        """Make the snapshot that was taken of `step` a checkpoint; whether there is one, or it is about to be one."""
        if self._snapshots.want(step, Trigger.JIT):
            self.step = self.handed_step = step
        return self.handed_step == step

    def finish(self) -> None:
        """Wait until what was handed over is durable; should this step's save fail, save without the keeper."""
        step, self.handed_step = self.handed_step, None
        if step is None:  # the same on every rank, unlike what each of them has heard from the keeper
            return
        with self._context.progress.during(State.SAVING):
            is_durable = self._snapshots.finish(step)
        self._framework.handed_step = None
        if is_durable:
            self._saver.take_over(self._root / checkpoint_name(step))
        elif step == self._framework.step:
            self.step = None
            self._save_and_wait(Trigger.JIT, self._framework.write_again())
