"""A training whose loop reports the end of each step: `safepoint.session`, and Lightning's Trainer.

From these reports, Safepoint derives when the ranks vote, take snapshots, save, and end the training early. In a
vote, the ranks agree by a small all-reduce whether to save or stop.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from safepoint.checkpoint.format.manifest import Manifest
from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.pickles.loading import states_of
from safepoint.errors import UsageError
from safepoint.foundation.events.start_events import Phase
from safepoint.settings.run_settings import place_output
from safepoint.snapshot.staging.guard import before_changes
from safepoint.training.collective.collective_wait import on_all_ranks
from safepoint.training.collective.peers import join_peers
from safepoint.training.context.outputs import open_checked
from safepoint.training.context.rank_context import RankContext
from safepoint.training.engine.boundary import Boundary, release
from safepoint.training.outcome.program_error import exit_code_after, summarize
from safepoint.training.plain.data.position import DataSource, rescale_position
from safepoint.training.plain.metric_reader import MetricReader, without_graph
from safepoint.training.plain.periodic import Periodic
from safepoint.training.plain.plain_loop import PlainLoop
from safepoint.training.plain.state.parts import Parts
from safepoint.training.start.copies import ResumePoint, lease
from safepoint.training.start.start import Start, agree_on_start
from safepoint.training.state.rng import devices_left_out
from safepoint.training.state.strategy import check_partitions, check_strategy


class Training:
    """One training, for a `with` statement. When the statement begins, the training resumes from a checkpoint.

    The loop calls `step` after each step.

    Args:
        context: the context of this rank.
        parts: the parts of the state.
        data: the data that the loop trains on.
        output_dir: the folder or object store for checkpoints. A value in the settings overrides this value.
        save_steps: optimizer steps between checkpoints. A value in the settings overrides this value. None saves only
            on request and at the end.

    Raises:
        UsageError: there is no output folder, or `save_steps` is less than 1.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        parts: Parts,
        data: DataSource,
        output_dir: str | Path | None,
        save_steps: int | None,
    ) -> None:
        settings = context.settings
        folder = settings.output_dir or output_dir
        if folder is None:
            raise UsageError("no folder is given for checkpoints", hint="give an output_dir, or --output-dir")
        self._context = context
        self._periodic = Periodic(settings, save_steps)
        place = place_output(str(folder), local_dir=settings.local_dir)
        self._output, self._location = OutputFolder(place.folder), place.remote
        self._output.check_usable()
        self._data = data
        self._loop = PlainLoop(parts, self._data, context.place, keep_newest=settings.save_total_limit)
        self._batches_before = 0
        self.epochs_to_do = 0
        """Epochs of the whole run, for the progress report; 0 if their number is not known."""
        self.steps_to_do = 0
        """The limit of optimizer steps, for the progress report; 0 for no limit."""
        self.steps_at_epoch_end = False
        """Whether an epoch ends with a step, even if fewer batches are left than other steps have."""
        self.more_metrics: Callable[[], Mapping[str, Any]] = dict[str, Any]
        """Returns further metrics; called when metrics are published."""
        self._has_voted = False
        self._step_was_called = False
        self._is_inside = False
        self._metrics: dict[str, Any] = {}
        self._metric_reader = MetricReader()
        self._most_batches = 1
        self._hook: Any = None
        self._start: Start | None = None
        self._boundary_or_none: Boundary | None = None
        self._reading = contextlib.ExitStack()

    @property
    def root(self) -> Path:
        """The local folder for checkpoints."""
        return self._output.root

    @property
    def run_id(self) -> str:
        """The identifier of the run; known after `agree`."""
        assert self._start is not None
        return self._start.attempt.run_id

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of the checkpoint that the training resumes from; known after `agree`."""
        assert self._start is not None
        return self._start.point.manifest if self._start.point is not None else None

    # ---- the call -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.agree()
        self.begin()
        return self

    def agree(self) -> Path | None:
        """Agree with the other ranks on the checkpoint to resume from.

        Returns:
            The folder of a verified checkpoint; None to start from the beginning. The checkpoint is not pruned before
            `begin` has loaded it.
        """
        context = self._context
        context.record.passed(Phase.TRAINER_REACHED)
        context.outputs.claim(self._output.root, hint="give each training its own output_dir")
        self._peers = join_peers(context.place, timeout_s=context.settings.peer_timeout_s)
        context.record.passed(Phase.GROUP_FORMED)
        with self._released_on_error():
            if self._location is not None and context.place.restart == 0:
                on_all_ranks(self._peers, self._try_store)
            self._start = agree_on_start(
                context,
                self._peers,
                self._output,
                self._location,
                examine=lambda point: self._loop.contradiction_in(point, self._peers),
            )
            self._reading.enter_context(lease(self._start.point))
        return self._start.point.path if self._start.point is not None else None

    def _try_store(self) -> None:
        """Check that the store can be used, so that an error is raised at the start, and not at the first upload."""
        if self._location is not None and self._context.place.is_first:
            open_checked(self._location, verify_access=self._context.settings.verify_access)

    def begin(self) -> None:
        """Load the checkpoint that `agree` has found; called immediately before the first step."""
        with self._released_on_error():
            try:
                self._prepare()
            except Exception as error:
                self._report_failure(error)
                raise
        self._is_inside = True

    @contextlib.contextmanager
    def _released_on_error(self) -> Generator[None]:
        with contextlib.ExitStack() as undo:
            undo.callback(self._release, is_finished=False)
            yield
            undo.pop_all()

    def _prepare(self) -> None:
        context, place, loop, start = self._context, self._context.place, self._loop, self._start
        assert start is not None
        loop.find_base_model(self._peers)
        context.outcome.training_begins(0, is_saved=False)
        if start.point is not None:
            self._load(start.point)
        self._boundary_or_none = Boundary(
            context,
            self._peers,
            loop,
            self._output,
            self._location,
            start,
            before_leaving=lambda: self._report_progress(is_last=True),
        )
        self._boundary.prepare(global_batch=self._data.progress().batch_size * place.world_size)
        ineffective = self._periodic.begin(self._data.progress())
        if ineffective and place.is_first:
            context.log.warning("%s", ineffective)
        self._optimizers = {id(optimizer) for optimizer in loop.optimizers()}
        left_out = devices_left_out(loop.parameters())
        if left_out:
            context.log.warning(
                "random numbers of %s will differ after a resume, because only the current device's random number "
                "state is saved; call torch.cuda.set_device(…) before the model is made",
                ", ".join(left_out),
            )
        self._hook = before_changes(self._before_optimizer)
        self._boundary.loop_begins()
        context.progress.loop_begins()
        self._boundary.agreement.boundary_ends()
        self._boundary.agreement.step_begins(loop.step)

    def _load(self, point: ResumePoint) -> None:
        manifest, context, loop = point.manifest, self._context, self._loop
        check_strategy(manifest, loop.strategy)
        check_partitions(manifest, loop.zero_stage, context.place.world_size)
        with self._reading, states_of(point.path):
            position, rng = loop.position_in(point.path, ranks_before=manifest.world_size)
            # Compute the position before anything is loaded, because the computation may raise an error.
            position = rescale_position(
                position,
                manifest,
                self._data.progress(),
                context.place.world_size,
                allow_change=context.settings.allow_batch_change,
            )
            loop.load(point.path, manifest)
        loop.step = manifest.step
        loop.batches_per_step = manifest.gradient_accumulation
        with states_of(point.path):
            self._data.resume(position, rng)
        self._batches_before = position.batches
        context.outcome.training_begins(manifest.step, is_saved=point.is_durable)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        was_inside, self._is_inside = self._is_inside, False
        try:
            if error is None and was_inside:
                self._finish()
        except Exception as raised:
            error = raised
            raise
        finally:
            self._release(is_finished=error is None)
            if error is not None:
                self._report_failure(error)
        if error is None:
            self._context.outcome.check_not_interrupted()

    def _finish(self) -> None:
        """Save the last step, if it is not saved yet. If there is an object store, write the final model to it.

        Called when the loop has ended.
        """
        self._boundary.save_last_step()
        self._report_progress(is_last=True)
        self._boundary.report_end()
        if self._context.settings.record_folder is None:
            self._context.outcome.require_saved_end()

    def _report_failure(self, error: BaseException) -> None:
        """Report the error with which the program ends."""
        if self._context.outcome.interrupted is None and not isinstance(error, GeneratorExit):
            self._context.outcome.program_ended(exit_code_after(error), summarize(error))

    def _release(self, *, is_finished: bool) -> None:
        self._reading.close()
        if self._hook is not None:
            self._hook.remove()
        release(self._context, self._output, self._start, self._boundary_or_none, is_finished=is_finished)

    @property
    def _boundary(self) -> Boundary:
        """The work between two optimizer steps: the vote, a save, the end."""
        assert self._boundary_or_none is not None
        return self._boundary_or_none

    # ---- a step -----------------------------------------------------------------------------------------------

    def step(self, *, loss: Any = None, metrics: Mapping[str, Any] | None = None, must_save: bool = False) -> None:
        """Report that the optimizer has stepped.

        The call may save the state. It ends the program when a stop was requested.

        Args:
            loss: the loss of the step, for the progress report; a number or a tensor of one element.
            metrics: further metrics by name. Metrics of an evaluation have names with `eval_`, `val_` or `test_` at
                the start.
            must_save: whether to save this step in any case.

        Raises:
            Interrupted: all ranks agreed to stop; a `SystemExit` with the right exit code.
            PeerError: a rank is gone.
            UsageError: the call is outside the session's `with` statement.
        """
        if not self._is_inside:
            raise UsageError("step() was called outside the session's `with` statement")
        self._context.outcome.check_not_interrupted()
        loop = self._loop
        self._step_was_called = True
        self._gradients_complete()
        loop.step += 1
        data = self._data.progress()
        if data.batches > self._batches_before:
            loop.batches_per_step = data.batches - self._batches_before
        self._batches_before = data.batches
        self._metrics = without_graph({"loss": loss, **(metrics or {})})
        self._boundary.step_ends()
        self._boundary.save_if_due(is_periodic=self._periodic.is_due(loop.step, data) or must_save)
        self._report_progress()
        self._boundary.ends()
        # Reset `_has_voted` only after the save. During a save, DCP (torch.distributed.checkpoint) steps an optimizer
        # that has no state yet, and the hook before that step must not start a vote.
        self._has_voted = False
        self._boundary.agreement.step_begins(loop.step)

    @property
    def _misses_steps(self) -> bool:
        """Whether the optimizer has stepped, but `step` was never called."""
        return self._has_voted and not self._step_was_called

    def _before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._optimizers:
            self._gradients_complete()

    def _gradients_complete(self) -> None:
        """Vote once in each step, also if several optimizers step."""
        if not self._has_voted:
            self._has_voted = True
            self._boundary.agreement.gradients_complete(self._loop.step)

    # ---- progress -----------------------------------------------------------------------------------------------

    def _report_progress(self, *, is_last: bool = False) -> None:
        progress, data = self._context.progress, self._data.progress()
        progress.reached(
            step=self._loop.step,
            max_steps=self._steps_in_all(data.num_batches or 0),
            epoch=data.epochs_done,
            num_epochs=float(self.epochs_to_do),
            samples_per_step=data.batch_size * self._context.place.world_size * self._most_batches,
        )
        if progress.is_due() or is_last:
            metrics = {**self.more_metrics(), **self._metrics}
            progress.measured(self._metric_reader.read(metrics, is_last=is_last))

    def _steps_in_all(self, in_epoch: int) -> int:
        """Optimizer steps of the whole run; 0 if their number is not known."""
        # The last step of an epoch may have fewer batches than the other steps.
        self._most_batches = most = max(self._most_batches, self._loop.batches_per_step)
        batches = self.epochs_to_do * in_epoch
        steps = self.epochs_to_do * -(-in_epoch // most) if self.steps_at_epoch_end else batches // most
        known = [limit for limit in (steps, self.steps_to_do) if limit]
        return max(min(known), self._loop.step) if known else 0
