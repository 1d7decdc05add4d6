"""What every training loop does between two optimizer steps, and after the last step: vote, save, end.

The point between two steps is called a boundary. The vote is a small all-reduce, by which every rank receives the
requests of all ranks. The keeper is the process of each node that writes snapshots to disk.

A loop only reports its position. This module decides when to save, how to save, and what to do on a stop request.
"""

import contextlib
import os
import signal
from collections.abc import Callable

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import Interrupted, PeerError
from safepoint.estimates.cadence import Cadence
from safepoint.foundation import clock
from safepoint.foundation.environment import host_name
from safepoint.foundation.events.run_events import AttemptStarted, RankStarted, StopRequested
from safepoint.foundation.events.start_events import Phase
from safepoint.progress.record import OUTPUT_FOLDER, State
from safepoint.storage.location import Location
from safepoint.training.collective.peers import Peers
from safepoint.training.context.rank_context import RankContext
from safepoint.training.engine.agreement import Agreement
from safepoint.training.engine.deadline import Deadline
from safepoint.training.engine.final_model_save import FinalModelSave
from safepoint.training.engine.loop import TrainingLoop, Write
from safepoint.training.engine.saves import Saves
from safepoint.training.engine.setup import TrainingSetup
from safepoint.training.engine.snapshots import Snapshots
from safepoint.training.engine.synchronous_save import SynchronousSave
from safepoint.training.outcome.hold import Held, Hold
from safepoint.training.outcome.watched_folder import WatchedFolder, share_watched_folder
from safepoint.training.start.start import Start

_HOLD_LOOK_S = 0.1
"""Seconds between two votes of ranks that wait after a requested save. A stop request is noticed within this time."""


class Boundary:
    """The boundaries of one training; all ranks call the methods in the same order.

    A loop calls `prepare`, loads the model, and calls `loop_begins`. In each step it calls `agreement.step_begins`,
    `agreement.gradients_complete` before the optimizer, `step_ends` after the optimizer, `save_if_due`, and `ends`.
    A framework such as Hugging Face's Trainer decides itself when it saves. Its loop calls `save` or
    `snapshot_if_due` in place of `save_if_due`. After the last step a loop calls `save_last_step` and `report_end`.
    At the very end, even after an error, it calls the function `release`.

    Args:
        context: the context of this rank.
        peers: all ranks.
        loop: the training loop. Its state is saved. Its `step` counts the optimizer steps done.
        output: the folder for checkpoints.
        location: the object store to which the checkpoints are uploaded, or None.
        start: what the ranks agreed on at the start: the checkpoint to resume from, the attempt and the folders.
        before_leaving: called after the last save, when the ranks have agreed to stop.
    """

    def __init__(
        self,
        context: RankContext,
        peers: Peers,
        loop: TrainingLoop,
        output: OutputFolder,
        location: Location | None,
        start: Start,
        *,
        before_leaving: Callable[[], None],
    ) -> None:
        self._setup = setup = TrainingSetup(
            context=context, peers=peers, loop=loop, output=output, location=location, start=start
        )
        self._context = context
        self._loop = loop
        self._before_leaving = before_leaving
        self._hold = Hold(context.settings.record_folder if context.place.is_first else None)
        self.agreement = Agreement(context.termination, peers, self._hold)
        """The votes of the ranks."""
        self.saver = SynchronousSave(setup)
        """Saves without the keeper (the process on each node that writes snapshots to disk): the ranks write the
        files themselves."""
        self.snapshots = Snapshots(setup)
        """Saves through the keeper."""
        self.saves = Saves(setup, self.agreement, self.snapshots, self.saver)
        """Chooses between `saver` and `snapshots`."""
        if start.point is not None and not start.point.is_durable:
            self.saves.requested = Trigger.PERIODIC  # the state is only in memory: save it at the next boundary
        self._deadline = Deadline(context, self.agreement, self.snapshots)
        self._cadence = Cadence(context.settings.snapshot_steps)

    # ---- the start ----------------------------------------------------------------------------------------------

    def prepare(self, *, global_batch: int) -> None:
        """Prepare the keeper and the memory for snapshots, and report the start.

        The model's weights need not be loaded: only the sizes of the parameters are read.

        Args:
            global_batch: samples of all ranks in a step.

        Raises:
            PeerError: a rank is gone.
        """
        setup, place = self._setup, self._context.place
        attempt, point = setup.start.attempt, setup.start.point
        self._context.progress.begin(
            setup.output.progress,
            location=str(setup.location or ""),
            run_id=attempt.run_id,
            attempt=attempt.attempt,
            samples_per_step=global_batch,
            resumed_step=point.manifest.step if point is not None else None,
            resumed_time=point.manifest.created if point is not None and point.is_durable else None,
            resumed_bytes=point.manifest.size_bytes if point is not None else None,
        )
        self.snapshots.prepare()
        ranks = setup.peers.gather(RankStarted(rank=place.rank, pid=os.getpid(), host=host_name()))
        self._context.reporter.report(
            AttemptStarted(
                attempt=attempt.attempt,
                run_id=attempt.run_id,
                world_size=place.world_size,
                global_batch=global_batch,
                ranks=tuple(ranks),
                hash_seed=os.environ.get("PYTHONHASHSEED", ""),
            )
        )

    def loop_begins(self) -> None:
        """Record that the model is loaded and the loop begins. From now on, a signal leads to a save."""
        self._context.outcome.reached(self._loop.step)
        self._context.record.passed(Phase.STATE_LOADED)
        self._hold.ends()  # deletes the report (`Held`) of earlier ranks that were killed while they waited
        self.snapshots.begin_loop()
        if self._context.place.local_rank == 0:
            share_watched_folder(self._context.settings.record_folder, self._watched_folder())
        self._context.termination.enter_training(self._deadline.check)
        self._context.record.set_expendable(self.snapshots.are_in_keeper)

    def _watched_folder(self) -> WatchedFolder:
        setup = self._setup
        limit, _ = self._loop.retention()
        return WatchedFolder(
            folder=str(setup.output.root.absolute()),
            place=OUTPUT_FOLDER if setup.location is None else "local folder",
            run_id=setup.start.attempt.run_id,
            keep=self._context.settings.keep,
            limit=limit,
            expected_bytes=self.snapshots.expected_bytes,
            is_owned=setup.start.folders.is_owner,
        )

    # ---- between two steps --------------------------------------------------------------------------------------

    def step_ends(self) -> None:
        """Record that the optimizer has stepped. Receive the result of the vote, and check saves and uploads."""
        self._context.outcome.step_done(self._loop.step)
        self.snapshots.step_ends()
        self.agreement.step_ends()
        self._context.progress.step_ends()
        self._context.uploads.check()
        self.saves.check()

    @property
    def is_save_due(self) -> bool:
        """Whether this boundary needs a save even if no save is scheduled at its step.

        A save is needed in these cases:

        - the vote requires it, because of a request, a stop signal, or the time since the last save;
        - an earlier save could not start;
        - the training has resumed from a snapshot that is only in memory.
        """
        decision = self.agreement.decision
        return decision.stop or decision.save or decision.is_due or self.saves.requested is not None

    def save_if_due(self, *, is_periodic: bool) -> None:
        """If a save is due, save the state at this boundary. If only a snapshot is due, take a snapshot.

        Args:
            is_periodic: whether the script or the settings schedule a save at this step.

        Raises:
            Interrupted: the ranks have agreed to stop.
            PeerError: a rank is gone.
        """
        if is_periodic or self.is_save_due:
            self.save(self._loop.write)
        else:
            self.snapshot_if_due()

    def save(
        self, write: Write, *, is_last: bool = False, on_started: Callable[[Trigger], None] | None = None
    ) -> None:
        """Save the state at this boundary, unless it is saved already.

        Args:
            write: writes this rank's files.
            is_last: whether this is the last boundary.
            on_started: called with the trigger (the reason for the save) when a save has started or was postponed,
                before the ranks vote again.

        Raises:
            Interrupted: the ranks have agreed to stop.
            PeerError: a rank is gone.
        """
        agreement, step = self.agreement, self._loop.step
        agreement.receive()
        stops, holds = agreement.decision.stop, agreement.decision.hold
        has_waited = False
        if self.saves.step != step:
            trigger = Trigger.JIT if stops else Trigger.ON_DEMAND if agreement.decision.save else Trigger.PERIODIC
            if stops:
                self._report_stop()
            has_waited = self.saves.save(trigger, write, is_last=is_last or stops or holds)
            if on_started is not None:
                on_started(trigger)
        agreement.save_done()
        if holds and not stops:
            self._wait_for_stop(step)
        elif has_waited and not stops:
            # The save took long: a signal that arrived in the meantime must not wait for another step.
            agreement.vote_now(step)
        if agreement.decision.stop:
            raise self._leave()

    def _wait_for_stop(self, step: int) -> None:
        """Wait until the checkpoint of `step` is durable. Then wait for a stop request or the end of the hold.

        A hold is a wait of the ranks after a requested save; see `safepoint.training.outcome.hold`.
        """
        context, output = self._context, self._setup.output
        self.saves.finish()
        # The process that requested the hold waits for the upload, and the trainer's callbacks run only after the
        # hold. So upload now, without waiting for files that callbacks add.
        self.saver.close_parts(step)
        location = str(self._setup.location or "")
        is_saved = context.outcome.saved_step == step
        self._hold.begins(Held(step=step, is_saved=is_saved, folder=str(output.root.absolute()), location=location))
        with context.progress.during(State.SAVING):
            while self.agreement.holds_on(step):
                clock.sleep(_HOLD_LOOK_S)
        self.agreement.save_done()
        self._hold.ends()

    def snapshot_if_due(self) -> None:
        """Take a snapshot of this boundary, if a snapshot is due.

        The snapshot stays in memory. If the training stops or fails, and no newer state is saved, the snapshot
        becomes a checkpoint.
        """
        snapshots = self.snapshots
        if self._cadence.is_due(
            step=self._loop.step,
            last=snapshots.taken_step,
            cost_s=snapshots.cost_s,
            step_s=self.agreement.decision.step_ms / 1000,
        ):
            snapshots.take(Trigger.PERIODIC, self._loop.write, is_requested=False)

    def ends(self) -> None:
        """Record that the boundary is done. The time of the next step begins now."""
        self.agreement.boundary_ends()
        self._context.progress.boundary_ends()

    # ---- the end ------------------------------------------------------------------------------------------------

    def save_last_step(self) -> None:
        """Save the last step, wait until it is durable, and end if the ranks agree to stop.

        After this call, signals no longer lead to a save.

        Raises:
            Interrupted: the ranks have agreed to stop.
            PeerError: a rank is gone.
        """
        step = self._loop.step
        # After the last step, the script may write files of its own. A kill of this rank could lose these files.
        self._context.record.set_expendable(False)
        self.agreement.vote_now(step)
        self.saves.finish()
        if 0 < step != self._context.outcome.saved_step:
            self.save(self._loop.write, is_last=True)
            self.saves.finish()
        if self.agreement.decision.stop:
            raise self._leave()
        self._context.termination.leave_training()

    def report_end(self) -> None:
        """Report the end of the training, and publish the finished model if there is an object store.

        Raises:
            PeerError: a rank is gone.
        """
        self._context.outcome.training_ended(self._loop.step)
        if self._setup.location is not None:
            FinalModelSave(self._setup, self._setup.location).save()

    def leave_unfinished(self, step: int, go_back: Callable[[], None]) -> Interrupted:
        """Leave a step or an evaluation unfinished, and save the state at the boundary before it.

        Args:
            step: the step of that boundary.
            go_back: restores the state of that boundary.

        Returns:
            The exception for the caller to raise.
        """
        # `Agreement.exchange` received the vote that decided to abandon the step, and started one more vote. Receive
        # the result of this second vote too.
        self.agreement.receive()
        self._report_stop()
        if 0 < step != self._context.outcome.saved_step:
            go_back()
            if not self.saves.commit_snapshot(step):
                self.saves.save(Trigger.JIT, self._loop.write, is_last=True)
        return self._leave()

    def _report_stop(self) -> None:
        """Report once that the ranks have agreed to stop."""
        if not self._deadline.is_last_boundary_reached:
            self._deadline.is_last_boundary_reached = True
            decision = self.agreement.decision
            name = signal.Signals(decision.stop_signal).name
            self._context.reporter.report(StopRequested(signal=name, rank=decision.stop_rank, step=self._loop.step))

    def _leave(self) -> Interrupted:
        """Finish the running save and end the training; returns the exception for the caller to raise."""
        context, step = self._context, self._loop.step
        self._report_stop()
        self.saves.finish()
        self._before_leaving()
        is_saved = context.outcome.saved_step == step
        reason = "" if is_saved else "no step was finished" if step == 0 else "the save failed"
        uploads_failed = context.uploads.stop_reason is not None
        with contextlib.suppress(PeerError):  # a rank has ended already; the checkpoint is not affected
            uploads_failed = any(self._setup.peers.gather(uploads_failed))
        interrupted = context.outcome.interrupt(is_saved=is_saved, reason=reason, uploads_failed=uploads_failed)
        context.uploads.finish(newest_only=True)
        return interrupted


def release(
    context: RankContext, output: OutputFolder, start: Start | None, boundary: Boundary | None, *, is_finished: bool
) -> None:
    """Release the snapshots and the output folder of a training that is over, or could not start.

    Args:
        context: the context of this rank.
        output: the folder.
        start: where the training started; None if the ranks did not agree on a start.
        boundary: the training's `Boundary`; None if the training ended before this object was created.
        is_finished: whether the training has reached its end. A training that was neither finished nor interrupted
            has failed: the keeper then commits the newest snapshot when this process ends.
    """
    context.termination.leave_training()
    is_orderly = is_finished or context.outcome.interrupted is not None
    if boundary is not None:
        boundary.snapshots.close(is_orderly=is_orderly)
    # After a failure, the keeper may still save the newest snapshot in the attempt's working folder. This folder is
    # therefore kept, and the next start deletes it.
    is_kept = not is_orderly and context.keeper.is_connected
    output.release(start.attempt.attempt_id if start is not None and not is_kept else None)
