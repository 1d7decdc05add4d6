"""The callback that a script passes to Lightning's Trainer.

A step ends when Lightning has done all work that follows a batch, including validation. The last step of an epoch
ends with the epoch. At these points, Lightning's loops can be left and entered again, and no work is repeated or
left out.
"""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.callbacks import Checkpoint

from safepoint.checkpoint.local.output_folder import OutputFolder
from safepoint.checkpoint.pickles.loading import states_of
from safepoint.checkpoint.pickles.temporary_attributes import Overrides, temporarily
from safepoint.errors import UsageError, printable
from safepoint.foundation.environment import Place
from safepoint.foundation.units import plural
from safepoint.progress.record import State
from safepoint.training.context.rank_context import RankContext, current_context
from safepoint.training.integrations.lightning.averaged_weights import continue_averaging, take_over_averages
from safepoint.training.integrations.lightning.callback_states import SCORE, watch_later_loads
from safepoint.training.integrations.lightning.checkpoint_files import is_local, is_of_run
from safepoint.training.integrations.lightning.checkpoint_links import CheckpointLinks, remember_folders
from safepoint.training.integrations.lightning.lightning_data import LightningData
from safepoint.training.integrations.lightning.lightning_parts import STATE, LightningParts
from safepoint.training.plain.training import Training
from safepoint.training.start.copies import verify_best

_MOST_METRICS = 10_000
"""The most metrics in a checkpoint. Each one takes time in each save."""
_MOST_CHARACTERS = 80
"""How much of a metric's name a message shows."""
_STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}
remember_folders()  # scripts import this module before they make their callbacks


class SafepointCallback(Checkpoint):
    """Makes a Lightning training survive preemption, crashes and lost nodes.

    This callback replaces the `ModelCheckpoint` that Lightning adds by itself. A `ModelCheckpoint` that the script
    adds stays.

    Args:
        output_dir: a folder or an object store for checkpoints; `--output-dir` overrides this value.
        save_steps: optimizer steps between checkpoints; `--save-steps` overrides this value. None saves only on
            request and at the end.
    """

    def __init__(self, output_dir: str | Path | None = None, save_steps: int | None = None) -> None:
        self._output_dir = output_dir
        self._save_steps = save_steps
        self._overrides = Overrides()
        self._links = Overrides()
        """What keeps Lightning from following links. Callbacks also delete files after the training has ended."""
        self._context: RankContext | None = None
        self._training: Training | None = None
        self._trainer: Any = None
        self._saved: dict[str, Any] = {}
        self._steps: int = 0
        self._root: Path | None = None
        self._run_id = ""
        self._loss: Any = None
        self._is_last_batch = False
        self._has_warned = False

    @property
    def best_model_path(self) -> str:
        """The path of Lightning's file in the newest checkpoint of the run; empty if there is no checkpoint.

        `Trainer.test` loads this file when the script has no ModelCheckpoint.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        found = OutputFolder(self._root).manifests() if self._root is not None else iter(())
        # A person who may write to the folder may have put a checkpoint with a higher step there.
        own = (path for path, one in found if one.run_id == self._run_id and one.step <= self._steps)
        path = next(own, None)
        if path is None:
            return ""
        verify_best(path)
        return str(path / STATE)

    # ---- what Lightning saves and restores -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What Lightning does not save: a stop request, and the metrics that schedulers use."""
        if self._trainer is None:
            return {}
        found = self._trainer.callback_metrics
        self._warn_of_metrics_left_out(found)
        kept = itertools.islice(found.items(), _MOST_METRICS)
        metrics = {name: torch.as_tensor(value).clone() for name, value in kept}
        return {"should_stop": bool(self._trainer.should_stop), "metrics": metrics}

    def _warn_of_metrics_left_out(self, found: Mapping[str, Any]) -> None:
        """Warn once if the training has more metrics than a checkpoint may contain."""
        context = self._context
        if len(found) <= _MOST_METRICS or self._has_warned or context is None or not context.place.is_first:
            return
        self._has_warned = True
        context.log.warning(
            "the training has logged %s metrics, and a checkpoint contains at most %s: %s left out, the first one is "
            "%s. The training continues. After a resume, a scheduler or a callback that monitors one of them has no "
            "value until the training logs the metric again. To save all metrics, log fewer metrics with self.log",
            f"{len(found):,}",
            f"{_MOST_METRICS:,}",
            f"{plural(len(found) - _MOST_METRICS, 'metric')} {'is' if len(found) == _MOST_METRICS + 1 else 'are'}",
            printable(str(next(itertools.islice(found, _MOST_METRICS, None)))[:_MOST_CHARACTERS]),
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Record what `state_dict` returned at a save. It takes effect when the loop starts."""
        self._saved = state_dict

    # ---- Lightning's hooks, in their order -----------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """See `lightning.pytorch.Callback`."""
        if stage != "fit":
            self._check_restored(trainer)
        if stage != "fit" or trainer.fast_dev_run:
            return
        context = current_context()
        context.outcome.check_not_interrupted()
        _check(trainer, context)
        # `trainer.checkpoint_callback` is the first checkpoint callback in the list. Put this callback last, so that
        # the script's own `ModelCheckpoint` comes first.
        trainer.callbacks = [*(one for one in trainer.callbacks if one is not self), self]
        data, parts = LightningData(trainer, context.log.info), LightningParts(trainer, context.place)
        training = Training(context, parts=parts, data=data, output_dir=self._output_dir, save_steps=self._save_steps)
        training.epochs_to_do = max(0, trainer.max_epochs or 0)
        training.steps_to_do = max(0, trainer.max_steps)
        training.steps_at_epoch_end = True
        training.more_metrics = self._metrics
        folder = training.agree()
        self._context, self._trainer, self._training, self._root = context, trainer, training, training.root
        self._run_id = training.run_id
        self._override(data, parts, folder)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """See `lightning.pytorch.Callback`."""
        # Lightning has installed its own SIGTERM handler. It makes a collective call, and stops the rank within a
        # step. Replace this handler.
        if self._training is not None and self._context is not None:
            self._context.termination.reinstall_handlers()

    on_sanity_check_start = on_train_start

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """See `lightning.pytorch.Callback`."""
        self._loss = outputs["loss"] if isinstance(outputs, dict) and "loss" in outputs else None

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """See `lightning.pytorch.Callback`."""
        if self._context is not None:
            self._context.progress.change(State.TRAINING, State.EVALUATING)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """See `lightning.pytorch.Callback`."""
        if self._context is not None:
            self._context.progress.change(State.EVALUATING, State.TRAINING)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """See `lightning.pytorch.Callback`."""
        self._close(None)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """See `lightning.pytorch.Callback`."""
        if self._training is not None:  # no step was left to train, so Lightning has not called `on_train_end`
            take_over_averages(trainer)
        self._close(None)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """See `lightning.pytorch.Callback`."""
        if stage != "fit":
            self._overrides.close()
        self._links.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """See `lightning.pytorch.Callback`."""
        with self._links:
            self._close(exception)

    # ---- where hooks are not enough -------------------------------------------------------------------------------

    def _override(self, data: LightningData, parts: LightningParts, folder: Path | None) -> None:
        """Override the methods with which Lightning restores states, makes loaders, and begins and ends loops."""
        strategy = self._trainer.strategy
        fit, epoch = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop

        def set_up_data(original: Callable[[], None]) -> None:
            process: Callable[[Any], Any] = strategy.process_dataloader

            def track(loader: Any) -> Any:
                return data.track(process(loader))

            with temporarily(strategy, process_dataloader=track):
                original()

        def begin_run(original: Callable[[], None]) -> None:
            original()
            data.begin_loop()

        def begin_epoch(original: Callable[[], None]) -> None:
            data.begin_epoch()
            original()

        def begin_batches(original: Callable[[], None]) -> None:
            original()
            # The checkpoint was saved after all work that follows its last batch. So Lightning must not repeat this
            # work, and must end this epoch like any other epoch.
            fit._restarting = epoch._restarting = False

        def end_batch(original: Callable[[Any], None], fetcher: Any) -> None:
            original(fetcher)
            self._end_batch()

        def end_epoch(original: Callable[[], None]) -> None:
            original()
            data.is_between_epochs = True
            if self._is_last_batch:
                self._end_step()

        self._override_restore(data, parts, folder)
        self._overrides.callback(data.untrack)
        for place, name, instead in (
            (fit, "setup_data", set_up_data),
            (fit, "on_run_start", begin_run),
            (fit, "on_advance_start", begin_epoch),
            (fit, "on_advance_end", end_epoch),
            (epoch, "reset", begin_batches),
            (epoch, "on_advance_end", end_batch),
        ):
            self._overrides.override(place, name, instead)

    def _override_restore(self, data: LightningData, parts: LightningParts, folder: Path | None) -> None:
        """Override the methods with which Lightning restores states.

        Args:
            data: the data of the training.
            parts: the state of the training.
            folder: the checkpoint to resume from; None for a start from the beginning. Then `ckpt_path` can name a
                file that another user has written.
        """
        source = None if folder is None else folder / STATE
        links = CheckpointLinks(self._trainer, self._root)

        def restore(original: Callable[..., None], path: Any = None, weights_only: bool | None = None) -> None:
            nonlocal source
            links.check_folders()  # each ModelCheckpoint knows its folder by now
            self._links.enter_context(links.refused())
            if source is None:
                source = self._file_of_run(path, self._trainer)
            elif path is not None and self._context is not None:
                self._context.log.info("the run resumes from %s, not from ckpt_path", folder)
            if source is None:
                original(path, weights_only)
                return
            parts.restore(source.parent, weights_only, original, name=source.name)
            links.forget_links()
            self._overrides.enter_context(watch_later_loads(source, self._trainer.callbacks, parts.optimizers))

        def restore_states(original: Callable[[], None]) -> None:
            if source is None:
                original()
            else:
                parts.restore_states(source.parent, original, name=source.name)

        def restored(original: Callable[[], None]) -> None:
            original()
            continue_averaging(self._trainer, source)
            # If `begin` raises an error, `_close` must find no training, because none has started.
            training, self._training = self._training, None
            assert training is not None
            training.begin()
            self._training = training
            self._steps = int(self._trainer.global_step)
            if folder is not None:
                with states_of(folder / STATE):
                    parts.check_restored(folder, training.manifest, data.resumed)
                    self._resume(data)

        connector = self._trainer._checkpoint_connector
        for name, instead in (
            ("_restore_modules_and_callbacks", restore),
            ("restore_training_state", restore_states),
            ("resume_end", restored),
        ):
            self._overrides.override(connector, name, instead)

    def _check_restored(self, trainer: Any) -> None:
        """Check each checkpoint of this run that Lightning restores for a test, such as `test(ckpt_path="best")`.

        Lightning reads the checkpoint after the training. By then, another user may have replaced it.
        """
        place = Place.from_environment() if self._context is None else self._context.place
        parts = LightningParts(trainer, place)

        def restore(original: Callable[..., None], path: Any = None, weights_only: bool | None = None) -> None:
            file = self._file_of_run(path, trainer)
            if file is not None:
                parts.restore(file.parent, weights_only, original, name=file.name)
            else:
                # Lightning itself would load objects from the web if `weights_only` is None.
                is_safe = weights_only is None and is_of_run(path, self._root, trainer.callbacks)
                original(path, True if is_safe else weights_only)

        self._overrides.override(trainer._checkpoint_connector, "_restore_modules_and_callbacks", restore)

    def _file_of_run(self, path: Any, trainer: Any) -> Path | None:
        """The file `path`, if other users may have written it, see `is_of_run`; None for files of other places."""
        if path is None or not is_local(path) or not is_of_run(path, self._root, trainer.callbacks):
            return None
        return Path(path)

    def _resume(self, data: LightningData) -> None:
        """Restore what Lightning has not loaded: a stop request, metrics, and the positions of its loops."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        trainer.should_stop = bool(self._saved.get("should_stop"))
        trainer._logger_connector._callback_metrics.update(_checked_metrics(self._saved.get("metrics", {})))
        if data.is_between_epochs:
            # The epoch has ended, so Lightning does not restart in the middle of an epoch.
            fit._restarting = fit.epoch_loop._restarting = fit._resuming_from_checkpoint = False
        fit.epoch_loop.val_loop._restarting = True  # Lightning then skips the sanity check

    def _end_batch(self) -> None:
        trainer = self._trainer
        if trainer.global_step == self._steps:
            return
        self._steps = int(trainer.global_step)
        loop = trainer.fit_loop.epoch_loop
        self._is_last_batch = bool(loop._num_ready_batches_reached())
        if not self._is_last_batch:
            self._end_step(must_save=loop.done)

    def _end_step(self, *, must_save: bool = False) -> None:
        assert self._training is not None
        self._is_last_batch = False
        self._training.step(loss=self._loss, must_save=must_save)

    def _metrics(self) -> dict[str, Any]:
        """The logged metrics. They are not computed here, because their computation is a collective call."""
        return dict(getattr(self._trainer._logger_connector, "_callback_metrics", {}))

    def _close(self, error: BaseException | None) -> None:
        training, self._training = self._training, None
        with self._overrides:
            if training is not None:
                training.__exit__(type(error) if error is not None else None, error, None)


def _checked_metrics(saved: Any) -> dict[str, torch.Tensor]:
    """Return the metrics of a checkpoint. Later saves read them, so each must be a tensor with one real number.

    Raises:
        ValueError: a metric is not such a tensor, or there are too many metrics.
    """
    metrics: dict[Any, Any] = cast("dict[Any, Any]", saved) if isinstance(saved, dict) else {None: saved}
    if len(metrics) > _MOST_METRICS:
        raise ValueError(f"there are {len(metrics)} metrics, and {_MOST_METRICS} is the limit")
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ValueError(f"the metric {name!r:.80} has no name")  # noqa: TRY004  one kind of error for all metrics
        SCORE.check(f"the metric {name!r:.80}", value)
    return metrics


def _check(trainer: Any, context: RankContext) -> None:
    """Refuse what cannot be saved or resumed.

    Raises:
        UsageError: the strategy is not supported, or Lightning does not train on exactly the ranks that were started.
    """
    name = type(trainer.strategy).__name__
    if name not in _STRATEGIES:
        raise UsageError(
            f"checkpoints of Lightning's {name} are not supported; training was not started",
            hint="use strategy='ddp', or Hugging Face's Trainer for FSDP and DeepSpeed",
        )
    by_lightning = type(getattr(trainer.strategy, "cluster_environment", None)).__name__ == "LightningEnvironment"
    if trainer.world_size > 1 and by_lightning:
        raise UsageError(
            f"Lightning would start {trainer.world_size} ranks by itself, which is not supported; training was not "
            "started",
            hint="start all ranks with `safepoint run --nproc-per-node N SCRIPT`, and give the Trainer devices=N",
        )
    if trainer.world_size != context.place.world_size:
        raise UsageError(
            f"Lightning trains on {plural(trainer.world_size, 'rank')}, but {context.place.world_size} were started; "
            "training was not started",
            hint="give the Trainer devices, num_nodes and strategy='ddp' for as many ranks as `safepoint run` starts",
        )
