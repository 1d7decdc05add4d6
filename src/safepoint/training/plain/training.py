"""A training that survives what happens to it.

Whoever drives it tells where a step ends; everything else follows from that: the vote of the ranks, snapshots, saves,
leaving.
"""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from safepoint.checkpoint.format.manifest import Trigger
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.errors import Interrupted, UsageError
from safepoint.settings.output_place import place_output
from safepoint.snapshot.staging.optimizer_hooks import before_changes
from safepoint.training.collective.collective_wait import on_all_ranks
from safepoint.training.collective.peers import join_peers
from safepoint.training.context.rank_context import RankContext
from safepoint.training.context.store_access import open_tried
from safepoint.training.engine.agreement import Agreement
from safepoint.training.engine.boundary import Boundary
from safepoint.training.outcome.program_error import exit_code_after, summarize
from safepoint.training.plain.data.position import DataSource
from safepoint.training.plain.data.rescale_position import rescale_position
from safepoint.training.plain.metric_reader import MetricReader
from safepoint.training.plain.periodic import Periodic
from safepoint.training.plain.plain_loop import PlainLoop
from safepoint.training.plain.state.parts import Parts
from safepoint.training.start.resume import lease
from safepoint.training.start.start import Start, agree_on_start, announce, begin_progress
from safepoint.training.state.rng import devices_left_out
from safepoint.training.state.strategy import check_partitions, check_strategy


class Training:
    """One training, used in a `with` statement: entering it resumes, and `step` ends each step.

    Args:
        context: this rank.
        parts: the state.
        feed: what the loop trains on.
        output_dir: where checkpoints go, a folder or an object store, unless the settings name another place.
        save_steps: optimizer steps between checkpoints, unless the settings say so; None saves when it is asked to,
            and at the end.

    Raises:
        UsageError: there is no place to save to, or `save_steps` is none.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        parts: Parts,
        feed: DataSource,
        output_dir: str | Path | None,
        save_steps: int | None,
    ) -> None:
        settings = context.settings
        folder = settings.output_dir or output_dir
        if folder is None:
            raise UsageError("there is no place for checkpoints", hint="give an output_dir, or --output-dir")
        self._context = context
        self._periodic = Periodic(settings, save_steps)
        place = place_output(str(folder), local_dir=settings.local_dir)
        self._output, self._location = OutputFolder(place.folder), place.remote
        self._output.check_usable()
        self._feed = feed
        self._framework = PlainLoop(parts, self._feed, context.place, keep_newest=settings.save_total_limit)
        self._batches_before = 0
        self.epochs_to_do = 0
        """Epochs of the whole run, for whoever looks how far it is; 0 when nobody knows."""
        self.steps_to_do = 0
        """At how many optimizer steps it ends in any case; 0 for no such limit."""
        self.steps_at_epoch_end = False
        """Whether the last batches of an epoch make a step, also when they are fewer than other steps have."""
        self.more_metrics: Callable[[], Mapping[str, Any]] = dict[str, Any]
        """Asked for further figures when somebody is going to see them."""
        self._has_voted = False
        self._was_told = False
        self._is_inside = False
        self._numbers = MetricReader()
        self._most_batches = 1
        self._hook: Any = None
        self._reading = contextlib.ExitStack()

    @property
    def root(self) -> Path:
        """Where checkpoints are on this machine."""
        return self._output.root

    # ---- the call -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.meet()
        self.begin()
        return self

    def meet(self) -> Path | None:
        """Agree with the other ranks on where to go on.

        Returns:
            The folder of a verified checkpoint, which nobody takes away before `begin`; None to begin anew.
        """
        context = self._context
        context.outputs.claim(self._output.root, hint="give each its own output_dir")
        self._peers = join_peers(context.place, timeout_s=context.settings.peer_timeout_s)
        self._agreement = Agreement(context.termination, self._peers)
        self._start: Start | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._release, is_orderly=False)
            if self._location is not None and context.place.restart == 0:
                on_all_ranks(self._peers, self._try_store)
            self._start = agree_on_start(context, self._peers, self._output, self._location)
            self._reading.enter_context(lease(self._start.point))
            undo.pop_all()
        return self._start.point.path if self._start.point is not None else None

    def _try_store(self) -> None:
        """Before minutes are spent on a store that cannot be used."""
        if self._location is not None and self._context.place.is_first:
            open_tried(self._location, verify_access=self._context.settings.verify_access)

    def begin(self) -> None:
        """Load what `meet` has found; the first step begins."""
        assert self._start is not None
        with contextlib.ExitStack() as undo:
            undo.callback(self._release, is_orderly=False)
            try:
                self._prepare(self._start)
            except Exception as error:
                self._say_why(error)
                raise
            undo.pop_all()
        self._is_inside = True

    def _prepare(self, start: Start) -> None:
        context, place, framework = self._context, self._context.place, self._framework
        framework.find_base(self._peers)
        context.outcome.training_begins(0, is_saved=False)
        if start.point is not None:
            self._load(start)
        samples = self._feed.batch_size * place.world_size
        begin_progress(context, start, self._output, self._location, global_batch=samples)
        self._boundary = Boundary(context, self._peers, framework, self._agreement, self._output, start)
        self._boundary.prepare()
        announce(context, self._peers, start.attempt, global_batch=samples)
        ineffective = self._periodic.begin(self._feed)
        if ineffective and place.is_first:
            context.log.warning("%s", ineffective)
        self._optimizers = {id(optimizer) for optimizer in framework.optimizers()}
        left_out = devices_left_out(framework.parameters())
        if left_out:
            context.log.warning(
                "random numbers of %s will be others after a resume: only those of the current device are saved; "
                "call torch.cuda.set_device(…) before the model is made",
                ", ".join(left_out),
            )
        self._hook = before_changes(self._before_optimizer)
        self._boundary.loop_begins()
        context.progress.loop_begins()
        self._agreement.boundary_ends()
        self._agreement.step_begins(framework.step)

    def _load(self, start: Start) -> None:
        assert start.point is not None
        manifest, context = start.point.manifest, self._context
        check_strategy(manifest, self._framework.strategy)
        check_partitions(manifest, self._framework.zero_stage, context.place.world_size)
        with self._reading:
            position, rng = self._framework.position_in(start.point.path, ranks_before=manifest.world_size)
            # Before anything is loaded: it may be refused.
            position = rescale_position(
                position,
                manifest,
                self._feed,
                context.place.world_size,
                allow_change=context.settings.allow_batch_change,
            )
            self._framework.load(start.point.path, manifest)
        self._framework.step = manifest.step
        self._framework.batches_per_step = manifest.gradient_accumulation
        self._feed.resume(position, rng)
        self._batches_before = position.batches
        context.outcome.training_begins(manifest.step, is_saved=start.point.is_durable)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        was_inside, self._is_inside = self._is_inside, False
        is_orderly = error is None
        try:
            if error is None and was_inside:
                self._finish()
        except Interrupted:
            is_orderly = True
            raise
        except Exception as raised:
            error = raised
            raise
        finally:
            self._release(is_orderly=is_orderly or self._context.outcome.interrupted is not None)
            if error is not None:
                self._say_why(error)
        if error is None:
            self._context.outcome.check_not_interrupted()

    def _finish(self) -> None:
        """The loop has come to its end: what is not saved yet is."""
        context, step = self._context, self._framework.step
        saves = self._boundary.saves
        self._agreement.settle(step)
        saves.finish()
        if 0 < step != context.outcome.saved_step:
            stops = self._agreement.decision.stop
            saves.save(Trigger.JIT if stops else Trigger.PERIODIC, self._framework.write_again(), is_last=True)
            saves.finish()
        if self._agreement.decision.stop:
            raise self._leave()
        context.termination.leave_training()
        self._tell_progress(is_last=True)
        context.outcome.training_ended(step)
        if self._location is not None:
            self._boundary.saver.save_final(self._location)
        if context.settings.record_folder is None:
            context.outcome.require_saved_end()

    def _say_why(self, error: BaseException) -> None:
        """The program ends by an error of its own."""
        if self._context.outcome.interrupted is None and not isinstance(error, GeneratorExit):
            self._context.outcome.program_ended(exit_code_after(error), summarize(error))

    def _release(self, *, is_orderly: bool) -> None:
        context = self._context
        context.termination.leave_training()
        self._reading.close()
        if self._hook is not None:
            self._hook.remove()
        if hasattr(self, "_boundary"):
            self._boundary.close(is_orderly=is_orderly)
        is_kept = not is_orderly and context.keeper.is_connected
        self._output.release(self._start.attempt.attempt_id if self._start and not is_kept else None)

    # ---- a step -----------------------------------------------------------------------------------------------

    def step(self, *, loss: Any = None, metrics: Mapping[str, Any] | None = None, is_saved: bool = False) -> None:
        """Tell that the optimizer has stepped. This may save, and when somebody asked the job to stop, it leaves.

        Args:
            loss: of the step, for whoever looks how far the run is; a number or a tensor of one.
            metrics: further figures, likewise, by name; those of evaluations begin with `eval_`, `val_` or `test_`.
            is_saved: whether to make a checkpoint of it in any case.

        Raises:
            Interrupted: all ranks agreed to stop; a `SystemExit`, which ends the program with the right code.
            PeerError: a rank is gone.
        """
        if not self._is_inside:
            raise UsageError("step() was called outside the session's `with` statement")
        self._context.outcome.check_not_interrupted()
        framework = self._framework
        self._was_told = True
        self._gradients_complete()
        framework.step += 1
        if self._feed.batches > self._batches_before:
            framework.batches_per_step = self._feed.batches - self._batches_before
        self._batches_before = self._feed.batches
        self._numbers.offer({"loss": loss, **(metrics or {})})
        self._boundary.step_ends()
        self._save_if_due(is_wanted=is_saved)
        self._tell_progress()
        self._boundary.ends()
        # Not sooner: DCP steps an optimizer that has no state yet, in the midst of a save.
        self._has_voted = False
        self._agreement.step_begins(framework.step)

    @property
    def _nobody_told(self) -> bool:
        """Whether the optimizer has stepped in vain: `step` was never called."""
        return self._has_voted and not self._was_told

    def _before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._optimizers:
            self._gradients_complete()

    def _gradients_complete(self) -> None:
        """Once in each step, however many optimizers there are."""
        if not self._has_voted:
            self._has_voted = True
            self._agreement.gradients_complete(self._framework.step)

    def _save_if_due(self, *, is_wanted: bool) -> None:
        agreement, boundary, step = self._agreement, self._boundary, self._framework.step
        stops = agreement.decision.stop
        is_periodic = self._periodic.is_due(step, self._feed) or is_wanted or agreement.decision.is_due
        if stops or agreement.decision.save or is_periodic or boundary.saves.is_postponed:
            trigger = Trigger.JIT if stops else Trigger.ON_DEMAND if agreement.decision.save else Trigger.PERIODIC
            if stops:
                boundary.announce_stop()
            waited = boundary.saves.save(trigger, self._framework.write_again(), is_last=stops)
            agreement.save_done()
            if waited and not stops:
                agreement.settle(step)
            if agreement.decision.stop:
                raise self._leave()
        else:
            boundary.snapshot_if_due()

    def _leave(self) -> Interrupted:
        return self._boundary.leave(lambda: self._tell_progress(is_last=True))

    # ---- figures ------------------------------------------------------------------------------------------------

    def _tell_progress(self, *, is_last: bool = False) -> None:
        figures, feed, in_epoch = self._context.progress, self._feed, self._feed.num_batches
        figures.reached(
            step=self._framework.step,
            max_steps=self._steps_in_all(in_epoch),
            epoch=feed.epoch + (feed.batches / in_epoch if in_epoch else 0.0),
            num_epochs=float(self.epochs_to_do),
            samples_per_step=feed.batch_size * self._context.place.world_size * self._most_batches,
        )
        if figures.is_due() or is_last:
            self._numbers.add(self.more_metrics())
            figures.measured(self._numbers.read(is_last=is_last))

    def _steps_in_all(self, in_epoch: int | None) -> int:
        """0 when nobody knows."""
        # The last step of an epoch may have fewer batches than the others.
        self._most_batches = most = max(self._most_batches, self._framework.batches_per_step)
        batches = self.epochs_to_do * (in_epoch or 0)
        steps = self.epochs_to_do * -(-(in_epoch or 0) // most) if self.steps_at_epoch_end else batches // most
        known = [limit for limit in (steps, self.steps_to_do) if limit]
        return max(min(known), self._framework.step) if known else 0
