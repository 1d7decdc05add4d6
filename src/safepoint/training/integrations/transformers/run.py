"""One call of `Trainer.train()` under Safepoint: the start of the training, the vote in each step, and the end.

The vote is a small all-reduce, by which every rank receives the requests of all ranks to save or stop. The loop
itself is the Trainer's own loop. During the call, some methods of this Trainer object are overridden
(`TrainerRun._override`), and one callback is added. The overrides and the callback observe and stop the loop, and do
not change what the loop computes.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from safepoint.checkpoint.format.catalog import checkpoint_name
from safepoint.checkpoint.format.manifest import Manifest, Trigger
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.pickles.temporary_attributes import Overrides, temporarily
from safepoint.errors import Interrupted
from safepoint.foundation import clock
from safepoint.foundation.events.run_events import DeadlineChoice, StepGivenUp
from safepoint.foundation.events.start_events import Phase
from safepoint.foundation.files import delete_tree
from safepoint.progress.record import State
from safepoint.training.collective.collective_wait import long_on_all_ranks
from safepoint.training.collective.peers import join_peers
from safepoint.training.context.rank_context import RankContext
from safepoint.training.engine.boundary import Boundary, release
from safepoint.training.integrations.transformers.arguments import finish_settings, written_once
from safepoint.training.integrations.transformers.deferred_work import possible_work
from safepoint.training.integrations.transformers.only_rank import train_unreplicated
from safepoint.training.integrations.transformers.resume.counters import TrainerCounters
from safepoint.training.integrations.transformers.resume.data_position import may_dispatch
from safepoint.training.integrations.transformers.resume.generation_settings import generation_settings
from safepoint.training.integrations.transformers.resume.loaded_model import only_own_adapters
from safepoint.training.integrations.transformers.resume.trainer_resume import TrainerResume
from safepoint.training.integrations.transformers.resume.trainer_state import (
    DeferredWork,
    LossTotals,
    RankState,
    RollbackPoint,
    contradiction_in,
)
from safepoint.training.integrations.transformers.save_callbacks import SaveCallbacks
from safepoint.training.integrations.transformers.sharding.repartition import Repartition
from safepoint.training.integrations.transformers.sharding.trainer_strategy import check_supported
from safepoint.training.integrations.transformers.trainer_loop import TrainerLoop, best_step
from safepoint.training.start.copies import lease
from safepoint.training.start.foreign import check_best
from safepoint.training.start.start import Start, agree_on_start
from safepoint.training.state.base_model import base_as_saved, base_of, check_base
from safepoint.training.state.data_only import only_data

_NO_METRICS = {"epoch", "step", "total_flos"}


class _GiveUp(BaseException):
    """Leaves a step or an evaluation unfinished; the state at `rollback` is saved instead."""

    def __init__(self, rollback: RollbackPoint) -> None:
        super().__init__()
        self.rollback = rollback


class TrainerRun(TrainerCallback):
    """One `train()` call. While it runs, this object is one of the Trainer's callbacks.

    Args:
        context: the context of this rank.
        trainer: a `transformers.Trainer`, about to train.

    Raises:
        UsageError: the script has a setting with which Safepoint could not resume this run after an interruption.
        PeerError: the ranks cannot connect to each other.
    """

    def __init__(self, context: RankContext, trainer: Any) -> None:
        self._context = context
        self._trainer = trainer
        context.record.passed(Phase.TRAINER_REACHED)
        finish_settings(trainer.args, context)
        check_supported(trainer, world_size=context.place.world_size)
        root = Path(trainer.args.output_dir)
        context.outputs.claim(root, hint="give each Trainer its own output_dir in the script, and omit --output-dir")
        self._output = OutputFolder(root)
        self._location = context.outputs.store_of(trainer.args.output_dir)
        self._peers = join_peers(context.place, timeout_s=context.settings.peer_timeout_s)
        context.record.passed(Phase.GROUP_FORMED)
        self._pending = DeferredWork()
        self._last_step: RollbackPoint | None = None
        self._evaluating: RollbackPoint | None = None
        self._gone_back_to: RollbackPoint | None = None
        self._is_between_steps = False
        self._push: Callable[[str], None] | None = None
        self._lease = contextlib.ExitStack()

    # ---- the call -------------------------------------------------------------------------------------------

    def train(self, original: Callable[[Any], Any], resume_from: Any) -> Any:
        """Run the Trainer's own `train`, from the newest checkpoint.

        Args:
            original: the Trainer's own `train`; its argument is `resume_from_checkpoint`.
            resume_from: the `resume_from_checkpoint` that the script gave.

        Raises:
            Interrupted: all ranks agreed to stop.
            SafepointError: the run cannot start, or a rank was lost.
        """
        start: Start | None = None
        boundary: Boundary | None = None
        is_finished = False
        try:
            with self._lease, written_once(self._trainer.args), Overrides() as overrides:
                start = agree_on_start(
                    self._context,
                    self._peers,
                    self._output,
                    self._location,
                    examine=lambda point: contradiction_in(
                        point, self._peers, may_dispatch=may_dispatch(self._trainer)
                    ),
                    reads_foreign=True,
                )
                boundary = self._begin(start, overrides)
                boundary.prepare(global_batch=self._resume.geometry.global_batch)
                self._override(overrides)
                try:
                    result = original(self._resume_path(resume_from))
                except _GiveUp as given_up:
                    raise self._leave_unfinished(given_up.rollback) from None
                is_finished = True
                return result
        finally:
            release(self._context, self._output, start, boundary, is_finished=is_finished)

    def _begin(self, start: Start, overrides: Overrides) -> Boundary:
        context, trainer, place, point = self._context, self._trainer, self._context.place, start.point
        self._start = start
        self._resume = TrainerResume(context, trainer, point)
        self._lease.enter_context(lease(point))
        if point is not None and point.foreign is not None and start.folders.is_owner:
            self._lease.callback(delete_tree, point.path)  # when the lease ends, all ranks have loaded the checkpoint
        step = 0 if point is None else point.manifest.step
        context.outcome.training_begins(step, is_saved=point is not None and point.is_durable)
        base = base_of(trainer.model, num_ranks=place.world_size) if place.is_first else None
        base = self._peers.from_first(base)
        if point is not None:
            self._check_base(point.manifest, base)
        if trainer.is_deepspeed_enabled:
            repartition = Repartition(context, self._peers, trainer, self._output, start.folders)
            repartition.override(overrides)
            if point is not None:
                repartition.prepare(point)
        self._loop = TrainerLoop(trainer, self._peers, self._resume, self._rank_state, base=base)
        self._boundary = Boundary(
            context,
            self._peers,
            self._loop,
            self._output,
            self._location,
            start,
            before_leaving=self._before_leaving,
        )
        self._callbacks = SaveCallbacks(context, trainer, self._peers, self._boundary)
        return self._boundary

    def _check_base(self, manifest: Manifest, base: dict[str, str] | None) -> None:
        saved, first = manifest.base, self._context.place.is_first
        if self._trainer.is_deepspeed_enabled:
            model, ranks_before = self._trainer.model, manifest.world_size
            base = base_as_saved(model, saved, base, ranks_before=ranks_before, is_first=first)
            base = self._peers.from_first(base)
        check_base(saved, base, manifest.step)

    def _load_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with only_own_adapters(self._trainer.model):
            return _load_only_data(original, *args, **kwargs)

    def _load_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parts = (self._trainer.optimizer, self._trainer.lr_scheduler)
        return _load_only_data(original, *args, parts=parts, **kwargs)

    def _resume_path(self, resume_from: Any) -> Any:
        if self._start.point is not None:
            return str(self._start.point.path)
        if isinstance(resume_from, str) and self._context.settings.resume == "auto":
            self._context.log.warning(
                "this run has no checkpoint yet: starting from the script's own %s, which is not verified",
                resume_from,
            )
            return resume_from
        # If the script's value is True, do not pass it on: the Trainer would load any folder that is named like a
        # checkpoint, or fail if there is no such folder.
        return None

    def _override(self, overrides: Overrides) -> None:
        trainer = self._trainer
        overrides.override(trainer, "_maybe_log_save_evaluate", self._boundary_reached)
        overrides.override(trainer, "_save_checkpoint", self._save_checkpoint)
        overrides.override(trainer, "_evaluate", self._evaluate)
        overrides.override(trainer, "_finalize_training", self._finalize)
        overrides.override(trainer, "_push_from_checkpoint", self._push_later)
        overrides.override(trainer, "_load_best_model", self._load_best_model)
        overrides.override(trainer, "_load_from_checkpoint", self._load_model)
        overrides.override(trainer, "_load_optimizer_and_scheduler", self._load_optimizer)
        overrides.override(trainer, "_load_scaler", _load_only_data)
        overrides.override(trainer.callback_handler, "on_save", self._callbacks.on_save)
        if self._context.place.world_size == 1:
            train_unreplicated(trainer.accelerator, overrides)
        self._resume.override(overrides)
        trainer.add_callback(self)
        overrides.callback(trainer.remove_callback, self)

    # ---- the start of the loop ------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is loaded: restore the state that the Trainer does not save, and do the deferred work."""
        # The script's arguments and the options decide when to log, evaluate and save. The values in the checkpoint
        # are ignored.
        state.compute_steps(args, int(state.max_steps))
        self._callbacks.loop_begins()
        self._boundary.loop_begins()
        self._loop_started_s = clock.monotonic_s()
        self._report_progress()
        self._context.progress.loop_begins()
        self._is_between_steps = True
        pending = possible_work(self._trainer, self._resume.restore(), self._context.log)
        self._resume.is_complete = pending.complete
        self._do_deferred(pending)
        self._resume.deferred_work_done()

    def _do_deferred(self, pending: DeferredWork) -> None:
        """Do the work that was due at the checkpoint's step, and that was deferred."""
        trainer = self._trainer
        if pending.evaluate:
            self._pending = dataclasses.replace(pending, evaluate=False, save=False)
            trainer.control.should_evaluate = True
            trainer.control.should_save = pending.save
            self._log_save_evaluate(pending)
        if pending.epoch_end:
            self._pending = DeferredWork()
            trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
            self._log_save_evaluate(pending)

    def _log_save_evaluate(self, pending: DeferredWork) -> None:
        trainer = self._trainer
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            pending.grad_norm,
            trainer.model_wrapped,
            None,
            trainer.state.epoch,
            None,
            clock.wall_s() - self._resume.elapsed_s,
            learning_rate=pending.learning_rate,
        )

    # ---- the loop -------------------------------------------------------------------------------------------

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Copy or restore the random number states before the sampler draws; see `TrainerResume.begin_epoch`."""
        self._resume.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record that a step begins; its first micro-batch follows."""
        self._is_between_steps = False
        self._boundary.agreement.step_begins(self._step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Vote between two micro-batches. Give up the step if all ranks agree that it would end too late."""
        agreement, rollback = self._boundary.agreement, self._last_step
        agreement.micro_step_ends()
        left = agreement.micro_steps_left(self._trainer.current_gradient_accumulation_steps)
        agreement.exchange(self._step, micro_steps_left=left if rollback is not None else 0)
        if agreement.decision.stop and agreement.decision.give_up and rollback is not None:
            needed_s = round(agreement.needed_s(left), 3)
            available_s = round(self._context.termination.available_s, 3)
            self._context.reporter.report(
                DeadlineChoice(
                    choice="give_up_step",
                    step=self._step + 1,
                    needed_s=needed_s,
                    available_s=max(0.0, available_s),
                    snapshot_step=self._boundary.snapshots.taken_step,
                    commit_s=agreement.save_s,
                )
            )
            self._context.reporter.report(
                StepGivenUp(step=self._step + 1, micro_batches_left=left, needed_s=needed_s, available_s=available_s)
            )
            raise _GiveUp(rollback)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record that the gradients are complete; `optimizer.step` comes next."""
        self._boundary.agreement.gradients_complete(self._step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a batch of the training's own evaluation, vote. Leave the evaluation if all ranks agree to stop."""
        if self._evaluating is None:
            return
        self._boundary.agreement.exchange(self._step)
        if self._boundary.agreement.decision.stop:
            raise _GiveUp(self._evaluating)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record that the work until the next step belongs to the end of the epoch, not to a step."""
        self._pending = DeferredWork()
        self._is_between_steps = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Report the metrics of the Trainer's log as progress."""
        metrics: dict[str, Any] = logs or {}
        self._context.progress.measured({name: one for name, one in metrics.items() if name not in _NO_METRICS})

    def _boundary_reached(
        self,
        original: Callable[..., Any],
        tr_loss: Any,
        grad_norm: Any,
        *args: Any,
        learning_rate: Any = None,
        **kwargs: Any,
    ) -> None:
        if not self._is_between_steps:
            self._end_step(grad_norm, learning_rate)
        original(tr_loss, grad_norm, *args, learning_rate=learning_rate, **kwargs)
        if not self._is_between_steps:
            self._boundary.snapshot_if_due()
        if self._trainer.args.gradient_accumulation_steps > 1:
            self._last_step = self._rollback_point(DeferredWork(), with_buffers=True)
        self._report_progress()
        self._boundary.ends()

    def _end_step(self, grad_norm: Any, learning_rate: Any) -> None:
        trainer, control = self._trainer, self._trainer.control
        self._lease.close()
        self._boundary.step_ends()
        self._pending = DeferredWork.after_step(trainer, grad_norm, learning_rate)
        stops = self._boundary.agreement.decision.stop
        if stops and control.should_evaluate:
            self._pending = dataclasses.replace(self._pending, evaluate=True, save=bool(control.should_save))
        control.should_evaluate = control.should_evaluate and not stops
        control.should_save = control.should_save or self._boundary.is_save_due

    def _evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_due = not kwargs.get("skip_scheduler", False)
        if not is_due and self._start.point is not None:
            return {}  # an evaluation by `eval_on_start`: an earlier attempt of the run has logged it already
        is_save_due = is_due and bool(self._trainer.control.should_save)
        pending = dataclasses.replace(self._pending, evaluate=is_due, save=is_save_due)
        self._evaluating = self._rollback_point(pending, with_buffers=False)
        try:
            with self._context.progress.during(State.EVALUATING):
                return original(*args, **kwargs)
        finally:
            self._evaluating = None

    def _rollback_point(self, pending: DeferredWork, *, with_buffers: bool) -> RollbackPoint:
        return RollbackPoint(self._trainer, pending, self._resume.loader_state, with_buffers=with_buffers)

    # ---- saving and leaving ---------------------------------------------------------------------------------

    def _save_checkpoint(self, _: Callable[..., Any], model: Any, trial: Any) -> None:
        self._push = None
        self._boundary.save(self._loop.write, is_last=self._pending.complete, on_started=self._push_to_hub)

    def _push_later(self, original: Callable[[str], None], checkpoint_folder: str) -> None:
        """Postpone a push to the Hub: the Trainer pushes during its save, before the checkpoint is committed."""
        self._push = original

    def _push_to_hub(self, trigger: Trigger) -> None:
        """After a periodic save, wait for its end, and push the checkpoint to the Hub. Other saves are not pushed."""
        is_pushed = self._trainer.args.push_to_hub and trigger == Trigger.PERIODIC
        if is_pushed and any(self._peers.gather(self._push is not None)):
            self._boundary.saves.finish()
            if self._push is not None and self._boundary.saves.step == self._step:
                self._push(str(self._output.root / checkpoint_name(self._step)))

    def _rank_state(self) -> RankState:
        state = self._trainer.state
        ends = self._pending.complete or self._trainer.control.should_training_stop or self._resume.is_complete
        # At the last step, `complete` is False, so that a run with more steps can continue from this checkpoint.
        complete = bool(ends) and not self._step >= state.max_steps > 0
        loader = self._resume.loader_state if self._gone_back_to is None else self._gone_back_to.loader_state
        return RankState(
            loss=LossTotals.of(self._trainer),
            pending=dataclasses.replace(self._pending, complete=complete),
            epoch_rng=loader.epoch_rng,
            loader=loader.loader,
            generators=loader.generators,
            fetched=loader.fetched,
            generation=generation_settings(self._trainer.model),
            counted=TrainerCounters.of(self._trainer).since(self._resume.counted_at_begin),
            asked_accumulation=self._resume.requested_accumulation,
            is_irregular=not self._resume.is_regular,
            elapsed_s=self._resume.elapsed_s + clock.monotonic_s() - self._loop_started_s,
        )

    def _leave_unfinished(self, rollback: RollbackPoint) -> Interrupted:
        def go_back() -> None:
            rollback.restore(self._trainer)
            self._gone_back_to = rollback
            self._pending = rollback.pending

        return self._boundary.leave_unfinished(rollback.step, go_back)

    def _before_leaving(self) -> None:
        self._callbacks.notify_before_leaving()
        self._report_progress()

    def _finalize(
        self, original: Callable[..., Any], trial: Any, num_train_samples: Any, start_time: float, *rest: Any
    ) -> Any:
        # Save now. After this method, the script's own code runs. A signal in this code must not lose the training.
        self._pending = DeferredWork(complete=True)
        self._boundary.save_last_step()
        self._callbacks.notify()
        self._agree_on_best()
        # With `save_total_limit=1`, the Trainer itself would keep only the checkpoint that its state names as the
        # best. It would delete the newest one, those of other runs, and those that are being uploaded.
        with temporarily(self._trainer.args, save_total_limit=None):
            result = original(trial, num_train_samples, start_time - self._resume.elapsed_s, *rest)
        self._report_progress()
        self._boundary.report_end()
        return result

    def _agree_on_best(self) -> None:
        """Set the first rank's `best_model_checkpoint` on all ranks, so that all ranks load the same checkpoint.

        Do nothing if all ranks share one output folder.
        """
        if self._start.complete is not None:
            state = self._trainer.state
            state.best_model_checkpoint = self._peers.from_first(state.best_model_checkpoint)
            step = best_step(self._trainer)
            if step is not None:
                state.best_model_checkpoint = str(self._output.root / checkpoint_name(step))

    def _load_best_model(self, original: Callable[[], None]) -> None:
        """Verify the best checkpoint before the Trainer loads it.

        If each node has only a part of the files, first fetch the other files.

        Raises:
            CheckpointError: the checkpoint is damaged; raised on every rank.
        """
        best, step, complete = (
            self._trainer.state.best_model_checkpoint,
            best_step(self._trainer),
            self._start.complete,
        )
        if complete is not None and step is not None:
            complete(step)
        elif best and (self._start.point is not None or Path(best).parent == self._output.root):
            long_on_all_ranks(self._peers, lambda: check_best(Path(best)) if self._context.place.is_first else None)
        with only_own_adapters(self._trainer.model), only_data(best) if best else contextlib.nullcontext():
            original()

    # ---- progress -------------------------------------------------------------------------------------------

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)

    def _report_progress(self) -> None:
        state = self._trainer.state
        self._context.progress.reached(
            step=self._step,
            max_steps=int(state.max_steps),
            epoch=float(state.epoch or 0.0),
            num_epochs=float(state.num_train_epochs or 0),
        )


def _load_only_data(
    original: Callable[..., Any], checkpoint: Any = None, *args: Any, parts: tuple[Any, ...] = (), **kwargs: Any
) -> Any:
    """Call a loading method of the Trainer. The method loads only data: no code in a pickle file is executed."""
    with only_data(checkpoint, *parts) if checkpoint is not None else contextlib.nullcontext():
        return original(checkpoint, *args, **kwargs)
