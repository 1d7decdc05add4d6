"""Resumes a `train()` call: restores the state in the checkpoint that the Trainer itself does not restore.

The Trainer loads model, optimizer, scheduler, its own state and random number states. This module restores:

- the random number states from which the running epoch's order was drawn;
- the loss since the last log line;
- the counters of stateful callbacks (such as the patience of early stopping) and of the trainer;
- the position in the data, if ranks or batches have changed, or if the data has no length;
- adapters, models and tensors beside the trained model, and the settings with which the model generates text;
- whether the run had already decided to end.
"""

import contextlib
import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safepoint.checkpoint.format.manifest import MAX_MANIFEST_BYTES
from safepoint.checkpoint.pickles.loading import states_of
from safepoint.checkpoint.pickles.temporary_attributes import Overrides
from safepoint.errors import ConflictError, printable
from safepoint.foundation.bounded_json import read_object
from safepoint.foundation.units import plural
from safepoint.training.context.rank_context import RankContext
from safepoint.training.integrations.transformers.own_save import has_own_model_save
from safepoint.training.integrations.transformers.resume.accumulators import without_settings
from safepoint.training.integrations.transformers.resume.batch_geometry import BatchGeometry, adapt
from safepoint.training.integrations.transformers.resume.counters import (
    TrainerCounters,
    limit_callbacks,
    restore_callbacks,
    uses_completions,
)
from safepoint.training.integrations.transformers.resume.data_position import DataPosition
from safepoint.training.integrations.transformers.resume.generation_settings import load_generation_settings
from safepoint.training.integrations.transformers.resume.kept_models import KeptModels
from safepoint.training.integrations.transformers.resume.loaded_model import (
    check_adapter_settings,
    complete_load,
    load_later_adapters,
)
from safepoint.training.integrations.transformers.resume.state_fields import check_trainer_state
from safepoint.training.integrations.transformers.resume.trainer_log import trusted_history
from safepoint.training.integrations.transformers.resume.trainer_state import DeferredWork, LoaderState, RankState
from safepoint.training.integrations.transformers.sharding.repartition import follow_accumulation
from safepoint.training.integrations.transformers.sharding.trainer_strategy import check_checkpoint_strategy
from safepoint.training.start.copies import ResumePoint
from safepoint.training.state.data_only import only_data
from safepoint.training.state.rng import capture_rng, restore_rng

_STATE = "trainer_state.json"
_MOST_SHOWN = 10


class TrainerResume:
    """How one `train()` call starts: from a checkpoint, or at step 0.

    Args:
        context: the context of this rank.
        trainer: the Trainer, which is about to train.
        point: the checkpoint to resume from, or None to start at step 0.

    Raises:
        CheckpointError: the checkpoint's state is invalid.
        ConflictError: this run cannot keep the checkpoint's batch geometry (ranks, micro-batches and samples per
            step); or another kind of loop wrote the checkpoint, or a run with another strategy or other adapters.
        UsageError: the checkpoints of this run could not contain a model that a callback uses.
    """

    def __init__(self, context: RankContext, trainer: Any, point: ResumePoint | None) -> None:
        self._context = context
        self._trainer = trainer
        self._state: RankState | None = None
        self._epoch_rng: dict[str, Any] = {}
        self._rng_to_restore: dict[str, Any] | None = None
        self._begins_in_epoch = False
        self._has_begun = False
        self._completions: Any = None
        """The completions of the checkpoint that a trainer of TRL still has to train on; see `counters`."""
        self._is_deferred_work_done = False
        self.is_regular = True
        """Whether every step of the run had the batch geometry `geometry`."""
        self.kept = KeptModels(trainer)
        """The models and tensors beside the trained model."""
        self._adapters = set(getattr(trainer.model, "peft_config", None) or ())
        self.geometry = BatchGeometry.of(trainer, context.place.world_size)
        """The batch geometry of this run: ranks, micro-batches per step, samples per step, samples per epoch."""
        self.counted_at_begin = TrainerCounters.of(trainer)
        """The numbers that the trainer had before it trained."""
        self.requested_accumulation = self.geometry.accumulation
        """Micro-batches per step that the script requests."""
        self.is_complete = False
        """Whether the run had decided to take no further step. The caller sets this from the deferred work."""
        self.elapsed_s = 0.0
        """Seconds of training in earlier attempts."""
        self._point = point if point is None or point.foreign is None else self._with_geometry(point)
        point = self._point
        if point is not None:
            self._adapt_to(point)
        self.data = DataPosition(
            context,
            self._state.loader if self._state is not None else None,
            self._state.generators if self._state is not None else [],
            self._state.fetched if self._state is not None else {},
            self._continue_rng,
        )
        """The position in the data."""

    def _with_geometry(self, point: ResumePoint) -> ResumePoint:
        """Complete a checkpoint of another program: if its files lack the batch geometry, take this run's values."""
        manifest = point.manifest
        if point.foreign is not None and not point.foreign.is_batch_known:
            manifest = replace(
                manifest, global_batch=self.geometry.global_batch, gradient_accumulation=self.geometry.accumulation
            )
        saved = self.geometry.as_saved(manifest)
        seen = saved.samples_seen(step=manifest.step, epoch=manifest.epoch, regular=True)
        return replace(point, manifest=replace(manifest, samples_seen=seen))

    def _adapt_to(self, point: ResumePoint) -> None:
        context, manifest = self._context, point.manifest
        if not (point.path / _STATE).is_file():
            raise ConflictError(
                f"{point.path.name} was not written by a Trainer: it has no trainer_state.json; training was not "
                "started",
                hint="give the Trainer its own output folder, or start from the beginning with --from-scratch",
            )
        check_trainer_state(point.path / _STATE, step=manifest.step)
        check_checkpoint_strategy(self._trainer, manifest)
        check_adapter_settings(self._trainer.model, point.path, step=manifest.step)
        self._state = RankState.read(
            point.path,
            rank=context.place.rank,
            ranks_before=manifest.world_size,
            world_size=context.place.world_size,
        )
        self.geometry, kept = adapt(
            self._trainer,
            manifest,
            self.geometry,
            requested_before=0 if self._state is None else self._state.asked_accumulation,
            allow_change=context.settings.allow_batch_change,
        )
        if self.geometry.accumulation != self.requested_accumulation:
            follow_accumulation(self._trainer)
        if kept is not None:
            context.reporter.report(kept)
        elif self.geometry.accumulation != self.requested_accumulation and context.place.is_first:
            context.log.info(
                "gradient accumulation is %s, as in the checkpoint: the script requests %s, and an earlier resume "
                "with another number of ranks has adapted this number",
                self.geometry.accumulation,
                self.requested_accumulation,
            )
        saved = self.geometry.as_saved(manifest)
        # If a run has had steps of two sizes, the number of steps no longer determines the position in the data.
        self.is_regular = self.geometry.has_same_steps(saved) and not (self._state and self._state.is_irregular)
        if self._state is not None and self.geometry != saved:
            self._state = self._state.without_batches()

    def override(self, overrides: Overrides) -> None:
        """Override the methods that the Trainer calls when it starts, and at the start of an epoch."""
        trainer = self._trainer
        overrides.override(trainer, "_load_rng_state", self._load_rng)
        overrides.override(trainer, "_run_epoch", self._run_epoch)
        module = importlib.import_module("transformers.trainer")
        overrides.override(module, "skip_first_batches", self.data.skip_first_batches)
        if self._point is not None:
            overrides.override(trainer, "_issue_warnings_after_load", self._weights_loaded)
            overrides.override(trainer, "_load_callback_state", self._load_callbacks)
        if self._state is not None and self._state.counted.has_completions:
            overrides.override(trainer, "training_step", self._training_step)
        if not self.is_regular or (self._point is not None and self.geometry.num_samples is None):
            overrides.override(trainer, "_init_training_state", self._initial_position)

    # ---- when the loop starts -------------------------------------------------------------------------------

    def restore(self) -> DeferredWork:
        """Restore what the Trainer has not loaded; called immediately before the loop starts.

        Returns:
            The work that was still due after the checkpoint's step, such as an evaluation. The caller does this work,
            and calls `deferred_work_done` afterwards.
        """
        self._has_begun = True
        self.kept.loop_begins(None if self._point is None else self._point.path)
        if self._point is None:
            return DeferredWork()
        self._warn_of_repeated_data()
        path, step = self._point.path, self._point.manifest.step
        load_later_adapters(self._trainer.model, self._adapters, path, step=step)
        self._drop_other_best(self._point.path.parent)
        self._trainer.state.log_history = self._own_history(self._trainer.state.log_history or [])
        with states_of(path):
            restore_callbacks(self._trainer)
            if self._state is None:
                return DeferredWork()
            self._state.loss.restore(self._trainer)
            self._counted_in(self._state).restore(self._trainer)
            self._completions = getattr(self._trainer, "_buffered_inputs", None)
            load_generation_settings(self._trainer.model, self._state.generation)
        self.elapsed_s = self._state.elapsed_s
        self._epoch_rng = self._state.epoch_rng
        self._begins_in_epoch = bool(self._epoch_rng)
        self._trainer._load_rng_state(str(self._point.path))
        return self._state.pending

    def _counted_in(self, state: RankState) -> TrainerCounters:
        """The numbers that the trainer had counted, without numbers that can only be settings of the script."""
        numbers, others = without_settings(self._trainer, state.counted.numbers)
        if others:
            names = sorted(others)
            more = f", and {plural(len(names) - _MOST_SHOWN, 'other')}" if len(names) > _MOST_SHOWN else ""
            shown = ", ".join(map(printable, names[:_MOST_SHOWN])) + more
            self._context.log.warning(
                "the checkpoint has another value for %s of the trainer. No code of the script sets this attribute "
                "after the trainer is made, so it is a setting of the script, and keeps the script's value"
                if len(names) == 1
                else "the checkpoint has other values for %s of the trainer. No code of the script sets these "
                "attributes after the trainer is made, so they are settings of the script, and keep the script's "
                "values",
                shown,
            )
        return replace(state.counted, numbers=numbers)

    def _warn_of_repeated_data(self) -> None:
        epoch = float(self._trainer.state.epoch or 0.0)
        if self._trainer.args.ignore_data_skip and not epoch.is_integer():
            self._context.log.warning(
                "ignore_data_skip=True: the run resumes at epoch %.2f, and reads the data of epoch %s from its "
                "beginning; samples that were trained on are trained on again",
                epoch,
                int(epoch),
            )

    def _drop_other_best(self, folder: Path) -> None:
        """Drop a best checkpoint that is outside this run's folders, or of a later step.

        If it were kept, the training could end with the weights of another run, or treat a checkpoint of a later step
        as the best checkpoint. If its step cannot be part of a folder's name, each save would fail.

        Args:
            folder: the folder of the checkpoint that the run resumes from.
        """
        state = self._trainer.state
        best: Any = state.best_model_checkpoint
        own = {os.path.realpath(place) for place in (folder, self._trainer.args.output_dir)}
        if best and os.path.dirname(os.path.realpath(best)) not in own:
            self._context.log.warning(
                "the checkpoint names %s as the best checkpoint so far. This path is outside the output folder: the "
                "best checkpoint will be chosen among the new checkpoints; the resume is not affected",
                printable(str(best)),
            )
            state.best_model_checkpoint = state.best_metric = state.best_global_step = None
        assert self._point is not None
        if (state.best_global_step or 0) > self._point.manifest.step:
            self._context.log.warning(
                "the checkpoint names a checkpoint of a later step as the best checkpoint so far: the best "
                "checkpoint will be chosen among the new checkpoints; the resume is not affected"
            )
            state.best_model_checkpoint = state.best_metric = state.best_global_step = None

    def _own_history(self, history: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The log in the checkpoint, without the records that `trusted_history` leaves out."""
        assert self._point is not None
        kept = trusted_history(history, step=self._point.manifest.step)
        if len(kept) < len(history):
            self._context.log.warning(
                "the log in the checkpoint has %s of later steps, or is too large: these records are left out; the "
                "resume is not affected",
                plural(len(history) - len(kept), "record"),
            )
        return kept

    def deferred_work_done(self) -> None:
        """Copy the random number states after the deferred work. The first step starts with this copy."""
        if self._state is not None:
            self._is_deferred_work_done = True
            self._rng_to_restore = capture_rng()

    def begin_epoch(self) -> None:
        """Copy the random number states when an epoch starts. If the run resumes in this epoch, restore them."""
        if self._begins_in_epoch:
            self._begins_in_epoch = False
            restore_rng(self._epoch_rng)
        else:
            self._epoch_rng = self._rng_to_restore or capture_rng()

    @property
    def loader_state(self) -> LoaderState:
        """The position in the data, for a checkpoint."""
        within_epoch = not float(self._trainer.state.epoch or 0.0).is_integer()
        return LoaderState(
            epoch_rng=self._epoch_rng if within_epoch else {},
            loader=self.data.state,
            generators=self.data.generators(within_epoch=within_epoch),
            fetched=self.data.fetched(within_epoch=within_epoch),
        )

    # ---- the Trainer's methods ------------------------------------------------------------------------------

    def _weights_loaded(self, original: Callable[..., Any], result: Any) -> None:
        point, trainer = self._point, self._trainer
        # The Trainer also calls this method at the end of training, when it loads the best model.
        if self._has_begun or point is None or has_own_model_save(trainer):
            original(result)
        else:
            complete_load(trainer.model, result.missing_keys, point.path, step=point.manifest.step)

    def _load_callbacks(self, original: Callable[[], None]) -> None:
        """Called when the Trainer has read its state, before a callback reads it."""
        state, trial = self._trainer.state, getattr(self._trainer, "_trial", None)
        # The script decides whether a hyperparameter search runs. The checkpoint must not decide this, because some
        # callbacks, such as TensorBoardCallback, derive their folder from the two fields that are set here. In a
        # search, the Trainer itself sets the name of the trial.
        state.is_hyper_param_search, state.trial_name = trial is not None, None
        if self._point is not None and self._trainer.args.restore_callback_states_from_checkpoint:
            with states_of(self._point.path):
                limit_callbacks(self._trainer)
                original()

    def _load_rng(self, original: Callable[..., Any], checkpoint: Any) -> None:
        if self._is_deferred_work_done:
            self._continue_rng()
        elif self._state is not None and self._state.rng:
            restore_rng(self._state.rng)
        else:
            with only_data(checkpoint) if checkpoint is not None else contextlib.nullcontext():
                original(checkpoint)

    def _continue_rng(self) -> None:
        """Set the random number states with which the first step starts, if they were not set before."""
        rng, self._rng_to_restore = self._rng_to_restore, None
        if rng is not None:
            restore_rng(rng)

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Train on a micro-batch. If its completions come from the checkpoint, an error names the checkpoint."""
        if self._point is None or not uses_completions(self._trainer, self._completions):
            return original(*args, **kwargs)
        with states_of(self._point.path):
            return original(*args, **kwargs)

    def _initial_position(self, original: Callable[..., Any], *args: Any) -> tuple[int, int]:
        original(*args)
        assert self._point is not None
        manifest = self._point.manifest
        if self.geometry.num_samples is None:
            path = self._point.path / _STATE
            with states_of(path):
                saved = read_object(path, max_bytes=MAX_MANIFEST_BYTES, constant=float)
                # Use the epoch of the manifest, and not the epoch in the Trainer's state. Only the manifest's epoch
                # has a limit. If the epoch were very large, the training would end at once, as if it were complete.
                passes, micro_batches = self.geometry.position_in_stream(
                    manifest.epoch,
                    max_steps=saved["max_steps"],
                    step=manifest.step,
                    global_batch=manifest.global_batch,
                )
        else:
            passes, micro_batches = self.geometry.position(
                manifest.samples_seen, epoch=manifest.epoch, before=self.geometry.as_saved(manifest)
            )
        return passes, 0 if self._trainer.args.ignore_data_skip else micro_batches

    def _run_epoch(self, original: Callable[..., Any], *, train_dataloader: Any, **kwargs: Any) -> Any:
        control, state = self._trainer.control, self._trainer.state
        if self.is_complete or control.should_training_stop or state.global_step >= state.max_steps > 0:
            # The run was complete before it resumed: the Trainer itself would train one step too many.
            control.should_training_stop = True
            return None
        self.data.begin_epoch(train_dataloader, int(kwargs.get("epoch") or 0))
        return original(train_dataloader=train_dataloader, **kwargs)
