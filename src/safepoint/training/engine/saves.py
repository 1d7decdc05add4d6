"""The saves of one training: through the keeper if possible, and synchronous if not.

The keeper is the process of each node that writes snapshots to disk while the training continues. Saves begin at a
boundary: the point between two optimizer steps.
"""

import math
from typing import Any

import torch

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import Trigger
from safepoint.foundation import clock
from safepoint.progress.record import State
from safepoint.training.engine.agreement import Agreement
from safepoint.training.engine.loop import Write
from safepoint.training.engine.save_clock import SaveClock, read_losses
from safepoint.training.engine.setup import TrainingSetup
from safepoint.training.engine.snapshots import Snapshots, TakeResult
from safepoint.training.engine.synchronous_save import SynchronousSave


def _is_number_in_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu"


class Saves:
    """Chooses how to save, and tracks which step is saved or being saved. All ranks make the same choice.

    Args:
        setup: the facts of the training.
        agreement: receives how long a save takes, and has the clock for periodic saves.
        snapshots: saves through the keeper.
        saver: saves without the keeper.
    """

    def __init__(
        self, setup: TrainingSetup, agreement: Agreement, snapshots: Snapshots, saver: SynchronousSave
    ) -> None:
        self._context = setup.context
        self._loop = setup.loop
        self._root = setup.output.root
        self._agreement = agreement
        self._snapshots = snapshots
        self._saver = saver
        self.step: int | None = None
        """The newest step that was saved or passed to the keeper, except for steps whose save has failed."""
        self.pending_step: int | None = None
        """The step that was passed to the keeper and that `finish` has not waited for yet."""
        self.requested: Trigger | None = None
        """The trigger of a save that is due at the next boundary, for example because the keeper was busy."""
        self._has_warned = False
        if setup.context.place.is_first:
            events = setup.output.events
            agreement.save_clock = SaveClock(setup.context.settings.save_every, lambda: read_losses(events))

    def check(self) -> None:
        """Check, without waiting, whether the keeper's save has ended, and record its outcome."""
        outcome = self._snapshots.poll()
        if outcome is None:
            return
        self._loop.step_being_saved = None
        if not outcome.is_durable and self.step == outcome.step:
            self.step = self._context.outcome.saved_step
        self._agreement.save_s = self._snapshots.save_s or self._agreement.save_s

    def save(self, trigger: Trigger, write: Write, *, is_last: bool) -> bool:
        """Pass a snapshot of the state after this step to the keeper, or save this state synchronously.

        Args:
            trigger: why the state is saved.
            write: writes this rank's files.
            is_last: whether this is the last boundary. If so, the save cannot be postponed to the next boundary.

        Returns:
            Whether the save was synchronous.

        Raises:
            PeerError: a rank is gone.
        """
        if trigger == Trigger.PERIODIC and self.requested is not None:
            trigger = self.requested
        self._warn_of_rates()
        began_s = clock.monotonic_s()
        result = self._take_snapshot(trigger, write, is_last=is_last)
        self.requested = trigger if result == TakeResult.BUSY else None
        if self.requested is not None:
            self._context.log.info(
                "the save at step %s waits for the next step: the previous save is still being written",
                self._loop.step,
            )
        is_synchronous = result == TakeResult.IMPOSSIBLE
        if is_synchronous:
            self._save_and_wait(trigger, write)
        stall_s = max(clock.monotonic_s() - began_s, self._snapshots.cost_s or 0.0)
        is_postponed = result == TakeResult.BUSY
        self._agreement.save_clock.saved(stall_s=None if is_postponed else stall_s, writing_s=self._agreement.save_s)
        return is_synchronous

    def _warn_of_rates(self) -> None:
        """Warn once of a learning rate that a start refuses to load.

        A rate on another device is not read, because the save would wait for the device.
        """
        if self._has_warned or not self._context.place.is_first:
            return
        groups = (group for optimizer in self._loop.optimizers() for group in optimizer.param_groups)
        rates: list[Any] = [group.get("lr") for group in groups]
        numbers = [float(one) for one in rates if isinstance(one, float) or _is_number_in_memory(one)]
        wrong = [one for one in numbers if not math.isfinite(one)]
        if wrong:
            self._has_warned = True
            self._context.log.warning(
                "the learning rate is %s at step %s; a start refuses checkpoints with such a rate. Correct the "
                "scheduler, and delete the checkpoints since then to resume from an older one",
                wrong[0],
                self._loop.step,
            )

    def _take_snapshot(self, trigger: Trigger, write: Write, *, is_last: bool) -> TakeResult:
        result = self._snapshots.take(trigger, write, is_requested=True)
        if result == TakeResult.BUSY and is_last:
            self._snapshots.wait_until_free()
            result = self._snapshots.take(trigger, write, is_requested=True)
            if result == TakeResult.BUSY:
                result = TakeResult.IMPOSSIBLE
        if result == TakeResult.TAKEN:
            self.step = self.pending_step = self._loop.step_being_saved = self._loop.step
        return result

    def _save_and_wait(self, trigger: Trigger, write: Write) -> None:
        consequence = (
            "an older checkpoint remains" if self._context.outcome.saved_step is not None else "no checkpoint exists"
        )
        record = self._context.record
        was_expendable = record.is_expendable
        record.set_expendable(False)  # a kill in the middle of this save would lose it
        with self._context.progress.during(State.SAVING):
            took_s = self._saver.save(
                trigger,
                write,
                consequence=consequence if trigger == Trigger.JIT else f"training continues, {consequence}",
            )
        record.set_expendable(was_expendable and self._snapshots.are_in_keeper)
        if took_s is not None:
            self.step = self._loop.step
            self.pending_step = self._loop.step_being_saved = None  # `finish` need not wait for an older step's save
            self.requested = None
            self._agreement.save_s = took_s
            if not self._loop.has_callbacks:
                self._saver.prune()

    def commit_snapshot(self, step: int) -> bool:
        """Request that the keeper commits the snapshot of `step`.

        Return whether the commit is requested, by this call or an earlier call.
        """
        if self._snapshots.commit_taken(step, Trigger.JIT):
            self.step = self.pending_step = step
        return self.pending_step == step

    def finish(self) -> None:
        """Wait until the step that was passed to the keeper is saved.

        If the save fails, and the training has not gone on to a further step, save the step synchronously.
        """
        step, self.pending_step = self.pending_step, None
        # All ranks return here, or none of them: `pending_step` does not depend on when the keeper's reply arrives.
        if step is None:
            return
        with self._context.progress.during(State.SAVING):
            is_durable = self._snapshots.finish(step)
        self._loop.step_being_saved = None
        if is_durable:
            self._saver.set_newest(self._root / checkpoint_name(step))
        elif step == self._loop.step:
            self.step = None
            self._save_and_wait(Trigger.JIT, self._loop.write)
