"""One call of `Trainer.train()` under Safepoint: where it begins, the vote at each step, where it leaves.

The Trainer's loop stays the Trainer's. For the time of the call a few methods of this one object are replaced
(`TrainerRun._override`) and one callback is added; they watch, lead and stop, and compute nothing.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import Trigger
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import Interrupted, UsageError
from safepoint.foundation import clock
from safepoint.foundation.events.run_events import DeadlineChoice, StepGivenUp
from safepoint.progress.record import State
from safepoint.training.collective.peers import join_peers
from safepoint.training.context.rank_context import RankContext
from safepoint.training.engine.agreement import Agreement
from safepoint.training.engine.boundary import Boundary
from safepoint.training.integrations.transformers.arguments import finish_settings, saved_once
from safepoint.training.integrations.transformers.best_model import BestModel
from safepoint.training.integrations.transformers.hub import HubPush
from safepoint.training.integrations.transformers.listeners import Listeners
from safepoint.training.integrations.transformers.resume.continuation import Continuation
from safepoint.training.integrations.transformers.resume.reference_model import ReferenceModel
from safepoint.training.integrations.transformers.resume.trainer_state import (
    DeferredWork,
    LossTotals,
    RankState,
    RollbackPoint,
)
from safepoint.training.integrations.transformers.resume.trl_counters import TrlCounters
from safepoint.training.integrations.transformers.sharding.repartition import Repartition
from safepoint.training.integrations.transformers.sharding.trainer_strategy import check_supported, splits_weights
from safepoint.training.integrations.transformers.trainer_loop import TrainerLoop
from safepoint.training.start.resume import lease
from safepoint.training.start.start import Start, agree_on_start, announce, begin_progress
from safepoint.training.state.base_model import base_as_saved, base_of, check_base
from safepoint.training.state.temporary_attributes import Overrides

_NO_METRICS = {"epoch", "step", "total_flos"}


class _GiveUp(BaseException):
    """Leaves a step or an evaluation unfinished; the state of `moment` is what counts."""

    def __init__(self, moment: RollbackPoint) -> None:
        super().__init__()
        self.moment = moment


class TrainerRun:
    """One `train()` call.

    Args:
        context: this rank.
        trainer: a `transformers.Trainer`, about to train.

    Raises:
        UsageError: the script asks for what cannot be resumed.
        PeerError: the ranks do not find each other.
    """

    def __init__(self, context: RankContext, trainer: Any) -> None:
        self._context = context
        self._trainer = trainer
        finish_settings(trainer.args, context)
        root = Path(trainer.args.output_dir)
        _check_supported(context, trainer)
        context.outputs.claim(
            root, hint="give each Trainer an output_dir of its own in the script, and leave --output-dir out"
        )
        self._output = OutputFolder(root)
        self._location = context.outputs.store_of(trainer.args.output_dir)
        self._peers = join_peers(context.place, timeout_s=context.settings.peer_timeout_s)
        self._agreement = Agreement(context.termination, self._peers)
        self._pending = DeferredWork()
        self._trigger = Trigger.PERIODIC
        self._moment: RollbackPoint | None = None
        self._evaluating: RollbackPoint | None = None
        self._gone_back_to: RollbackPoint | None = None
        self._settling = False
        self._loop_started_s = 0.0
        self._lease = contextlib.ExitStack()
        self._prepared: Boundary | None = None
        self._hub = HubPush(trainer)
        self._repartition: Repartition | None = None

    # ---- the call -------------------------------------------------------------------------------------------

    def train(self, original: Callable[[Any], Any], asked: Any) -> Any:
        """Run the Trainer's own `train` from where the run stands.

        Args:
            original: takes `resume_from_checkpoint`.
            asked: what the script passed for it.

        Raises:
            Interrupted: all ranks agreed to stop.
            SafepointError: the run cannot start, or a rank was lost.
        """
        from safepoint.training.integrations.transformers.callback import SafepointCallback

        trainer = self._trainer
        callback = SafepointCallback(self)
        start: Start | None = None
        is_orderly = False
        try:
            with (
                self._lease,
                saved_once(trainer.args),
                Overrides() as overrides,
            ):
                start = agree_on_start(self._context, self._peers, self._output, self._location)
                self._prepare(start)
                self._override(overrides)
                trainer.add_callback(callback)
                try:
                    result = original(self._resume_path(asked))
                except _GiveUp as given_up:
                    raise self._save_given_up(given_up.moment) from None
                is_orderly = True
                return result
        finally:
            self._context.termination.leave_training()
            if self._repartition is not None:
                self._repartition.close()
            is_orderly = is_orderly or self._context.outcome.interrupted is not None
            if self._prepared is not None:
                self._prepared.close(is_orderly=is_orderly)
            # The keeper may be saving what a lost rank has left: the next start cleans up after it.
            is_kept = not is_orderly and self._context.keeper.is_connected
            self._output.release(start.attempt.attempt_id if start and not is_kept else None)
            with contextlib.suppress(ValueError):
                trainer.remove_callback(callback)

    def _prepare(self, start: Start) -> None:
        context, trainer, place = self._context, self._trainer, self._context.place
        self._point = start.point
        self._continuation = Continuation(context, trainer, start.point)
        geometry = self._continuation.geometry
        if start.point is not None:
            self._lease.enter_context(lease(start.point))
            context.outcome.training_begins(start.point.manifest.step, is_saved=start.point.is_durable)
        else:
            context.outcome.training_begins(0, is_saved=False)
        begin_progress(context, start, self._output, self._location, global_batch=geometry.global_batch)
        base = self._peers.from_first(base_of(trainer.model, num_ranks=place.world_size) if place.is_first else None)
        if start.point is not None:
            manifest = start.point.manifest
            as_saved = base
            if trainer.is_deepspeed_enabled:
                as_saved = self._peers.from_first(
                    base_as_saved(
                        *(trainer.model, manifest.base, base),
                        ranks_before=manifest.world_size,
                        is_first=place.is_first,
                    )
                )
            check_base(manifest.base, as_saved, manifest.step)
        if trainer.is_deepspeed_enabled:
            self._repartition = Repartition(context, self._peers, trainer, self._output, start.folders)
            if start.point is not None:
                self._repartition.prepare(start.point)
        self._reference = ReferenceModel(trainer, is_sharded=splits_weights(trainer))
        self._framework = TrainerLoop(
            trainer,
            save=trainer._save_checkpoint,
            geometry=geometry,
            is_regular=self._continuation.is_regular,
            rank=place.rank,
            rank_state=self._rank_state,
            reference=self._reference,
            base=base,
            peers=self._peers,
        )
        self._best = BestModel(context, trainer, self._peers, self._output.root, start.bring)
        self._prepared = Boundary(context, self._peers, self._framework, self._agreement, self._output, start)
        self._prepared.prepare()
        self._listeners = Listeners(context, trainer, self._peers, self._prepared)
        announce(context, self._peers, start.attempt, global_batch=geometry.global_batch)

    def _resume_path(self, asked: Any) -> Any:
        if self._point is not None:
            return str(self._point.path)
        if isinstance(asked, str) and self._context.settings.resume == "auto":
            self._context.log.warning(
                "this run has no checkpoint yet: beginning from the script's own %s, which is not verified",
                asked,
            )
            return asked
        # True would make the Trainer take any folder with the right name, or fail because there is none.
        return None

    def _override(self, overrides: Overrides) -> None:
        trainer = self._trainer
        overrides.override(trainer, "_maybe_log_save_evaluate", self._wrap_boundary)
        overrides.override(trainer, "_save_checkpoint", lambda _: self._save_checkpoint)
        overrides.override(trainer, "_evaluate", self._wrap_evaluate)
        overrides.override(trainer, "_finalize_training", self._wrap_finalize)
        overrides.override(trainer.callback_handler, "on_save", self._listeners.wrap)
        if self._hub.is_possible:
            overrides.override(trainer, "_push_from_checkpoint", self._hub.wrap)
        if self._best.is_apart:
            overrides.override(trainer, "_load_best_model", self._best.wrap_load)
        if self._repartition is not None:
            self._repartition.override(overrides)
        self._continuation.override(overrides)

    # ---- the beginning --------------------------------------------------------------------------------------

    def begin_loop(self) -> None:
        """The model is loaded and the loop begins: give back what the Trainer did not save, do what was due."""
        trainer, context = self._trainer, self._context
        # What the script and the options say now counts; the checkpoint's would win otherwise.
        trainer.state.compute_steps(trainer.args, int(trainer.state.max_steps))
        self._listeners.loop_begins()
        self._boundary.loop_begins()
        self._loop_started_s = clock.monotonic_s()
        self._tell_progress()
        context.progress.loop_begins()
        if self._point is not None:
            self._reference.read(self._point.path)
        self._settling = True
        self._catch_up(self._continuation.restore())
        self._continuation.caught_up()

    def _catch_up(self, pending: DeferredWork) -> None:
        """Do what was due at the checkpoint's step and was left for now."""
        trainer = self._trainer
        if pending.evaluate:
            self._pending = dataclasses.replace(pending, evaluate=False, save=False)
            trainer.control.should_evaluate = True
            trainer.control.should_save = pending.save
            self._settle(pending)
        if pending.epoch_end:
            self._pending = DeferredWork()
            trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
            self._settle(pending)

    def _settle(self, pending: DeferredWork) -> None:
        trainer = self._trainer
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            pending.grad_norm,
            trainer.model_wrapped,
            None,
            trainer.state.epoch,
            None,
            clock.wall_s() - self._continuation.elapsed_s,
            learning_rate=pending.learning_rate,
        )

    # ---- the loop -------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """An epoch begins; its sampler has not been drawn yet."""
        self._continuation.begin_epoch()

    def begin_step(self) -> None:
        """The first micro-batch of a step is next."""
        self._settling = False
        self._agreement.step_begins(self._step)

    def end_micro_step(self) -> None:
        """Between two micro-batches: vote, and give the step up when all agree that it would come too late."""
        agreement, moment = self._agreement, self._moment
        agreement.micro_step_ends()
        left = agreement.micro_steps_left(self._trainer.current_gradient_accumulation_steps)
        agreement.exchange(self._step, micro_steps_left=left if moment is not None else 0)
        if agreement.decision.stop and agreement.decision.give_up and moment is not None:
            self._tell_choice(left)
            self._context.reporter.report(
                StepGivenUp(
                    step=self._step + 1,
                    micro_batches_left=left,
                    needed_s=round(agreement.needed_s(left), 3),
                    available_s=round(self._context.termination.available_s, 3),
                )
            )
            raise _GiveUp(moment)

    def _tell_choice(self, micro_steps_left: int) -> None:
        agreement = self._agreement
        event = DeadlineChoice(
            choice="give_up_step",
            step=self._step + 1,
            needed_s=round(agreement.needed_s(micro_steps_left), 3),
            available_s=round(max(0.0, self._context.termination.available_s), 3),
            snapshot_step=self._boundary.snapshots.taken_step,
            commit_s=agreement.save_s,
        )
        self._context.reporter.report(event)

    def before_optimizer(self) -> None:
        """Gradients are complete."""
        self._agreement.gradients_complete(self._step)

    def poll(self) -> None:
        """Inside an evaluation that can be repeated: leave it when all agree to stop."""
        if self._evaluating is None:
            return
        self._agreement.exchange(self._step)
        if self._agreement.decision.stop:
            raise _GiveUp(self._evaluating)

    def _wrap_boundary(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def boundary(*args: Any, **kwargs: Any) -> None:
            if not self._settling:
                given = signature.bind(*args, **kwargs).arguments
                self._end_step(given.get("grad_norm"), given.get("learning_rate"))
            original(*args, **kwargs)
            if not self._settling:
                self._boundary.snapshot_if_due()
            if self._trainer.args.gradient_accumulation_steps > 1:
                self._moment = RollbackPoint(
                    self._trainer, DeferredWork(), self._continuation.loader_state, with_buffers=True
                )
            self._tell_progress()
            self._boundary.ends()

        return boundary

    def end_epoch(self) -> None:
        """What follows until the next step belongs to the epoch's end, not to a step."""
        self._pending = DeferredWork()
        self._settling = True

    def _end_step(self, grad_norm: Any, learning_rate: Any) -> None:
        trainer, control, agreement = self._trainer, self._trainer.control, self._agreement
        self._lease.close()
        self._boundary.step_ends()
        self._pending = DeferredWork.after_step(trainer, grad_norm, learning_rate)
        if agreement.decision.save:
            control.should_save = True
            self._trigger = Trigger.ON_DEMAND
        if agreement.decision.is_due or self._boundary.saves.is_postponed:
            control.should_save = True
        if agreement.decision.stop:
            if control.should_evaluate:
                self._pending = dataclasses.replace(self._pending, evaluate=True, save=bool(control.should_save))
            control.should_evaluate = False
            control.should_save = True

    def _wrap_evaluate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            # An evaluation before the first step is no step's; it runs again on every start by itself.
            is_due = not kwargs.get("skip_scheduler", False)
            is_save_due = is_due and bool(self._trainer.control.should_save)
            pending = dataclasses.replace(self._pending, evaluate=is_due, save=is_save_due)
            self._evaluating = RollbackPoint(
                self._trainer, pending, self._continuation.loader_state, with_buffers=False
            )
            try:
                with self._context.progress.during(State.EVALUATING):
                    return original(*args, **kwargs)
            finally:
                self._evaluating = None

        return evaluate

    # ---- saving and leaving ---------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        agreement = self._agreement
        agreement.hear()
        stops = agreement.decision.stop
        trigger = Trigger.JIT if stops else self._trigger
        self._trigger = Trigger.PERIODIC
        waited = False
        if self._boundary.saves.step != self._step:
            self._hub.is_due = False
            waited = self._save(trigger, model, trial)
            if self._hub.is_possible and trigger == Trigger.PERIODIC and not self._pending.complete:
                self._push()
        agreement.save_done()
        if not stops and waited:
            # The save took long: a signal that came meanwhile must not wait for another step.
            agreement.settle(self._step)
        if agreement.decision.stop:
            raise self._leave()

    def _save(self, trigger: Trigger, model: Any, trial: Any) -> bool:
        """Save this boundary; whether training was held up."""
        if trigger == Trigger.JIT:
            self._boundary.announce_stop()
        is_last = trigger == Trigger.JIT or self._pending.complete
        return self._boundary.saves.save(trigger, self._framework.write(model, trial), is_last=is_last)

    def _push(self) -> None:
        """Push what was saved as soon as it is there."""
        if any(self._peers.gather(self._hub.is_due)):
            self._boundary.saves.finish()
            if self._boundary.saves.step == self._step:
                self._hub.push(self._output.root / checkpoint_name(self._step))

    def _rank_state(self) -> RankState:
        state = self._trainer.state
        ends = self._pending.complete or self._trainer.control.should_training_stop or self._continuation.is_complete
        # At the last step itself nothing needs to be remembered, and a run with more steps can go on from it.
        complete = bool(ends) and not self._step >= state.max_steps > 0
        place = self._continuation.loader_state if self._gone_back_to is None else self._gone_back_to.loader_state
        return RankState(
            loss=LossTotals.of(self._trainer),
            pending=dataclasses.replace(self._pending, complete=complete),
            epoch_rng=place.epoch_rng,
            loader=place.loader,
            generators=place.generators,
            counted=TrlCounters.of(self._trainer),
            asked_accumulation=self._continuation.asked_accumulation,
            is_irregular=not self._continuation.is_regular,
            elapsed_s=self._continuation.elapsed_s + clock.monotonic_s() - self._loop_started_s,
        )

    def _save_given_up(self, moment: RollbackPoint) -> Interrupted:
        self._agreement.hear()  # the poll that found out has begun another vote
        self._boundary.announce_stop()
        if 0 < moment.step != self._context.outcome.saved_step:
            moment.restore(self._trainer)
            self._gone_back_to = moment
            self._pending = moment.pending
            if not self._boundary.saves.want(moment.step):
                self._save(Trigger.JIT, self._trainer.model_wrapped, None)
        return self._leave()

    def _leave(self) -> Interrupted:
        def last_words() -> None:
            self._listeners.tell_last()
            self._tell_progress()

        return self._boundary.leave(last_words)

    def _wrap_finalize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def finalize(trial: Any, num_train_samples: Any, start_time: float) -> Any:
            trainer = self._trainer
            self._agreement.settle(self._step)
            self._boundary.saves.finish()
            if self._agreement.decision.stop or (0 < self._step != self._context.outcome.saved_step):
                # What follows is the script's: a signal in it must not cost a training that nobody else has saved.
                self._pending = DeferredWork(complete=True)
                self._save_checkpoint(trainer.model_wrapped, trial)
                self._boundary.saves.finish()
                trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
            self._best.agree()
            self._context.termination.leave_training()
            result = original(trial, num_train_samples, start_time - self._continuation.elapsed_s)
            self._tell_progress()
            self._context.outcome.training_ended(self._step)
            if self._location is not None:
                self._boundary.saver.save_final(self._location)
            return result

        return finalize

    # ---- figures --------------------------------------------------------------------------------------------

    @property
    def _boundary(self) -> Boundary:
        assert self._prepared is not None
        return self._prepared

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)

    def note_figures(self, logs: dict[str, Any]) -> None:
        """Figures that the Trainer has logged."""
        self._context.progress.measured({name: value for name, value in logs.items() if name not in _NO_METRICS})

    def _tell_progress(self) -> None:
        state = self._trainer.state
        self._context.progress.reached(
            step=self._step,
            max_steps=int(state.max_steps),
            epoch=float(state.epoch or 0.0),
            num_epochs=float(state.num_train_epochs or 0),
        )


def _check_supported(context: RankContext, trainer: Any) -> None:
    if trainer.args.world_size != context.place.world_size:
        raise UsageError(
            f"the Trainer sees {trainer.args.world_size} rank(s), the environment {context.place.world_size}",
            hint="start the ranks with `safepoint run` or torchrun",
        )
    check_supported(trainer)
