"""What a script gives Lightning's Trainer, and all it has to.

A step ends when everything that Lightning does after a batch is done, the validation that follows it too; the last
one of an epoch when the epoch is. There Lightning's loops can be left and entered with nothing twice or left out.
"""

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.callbacks import Checkpoint

from safepoint.checkpoint.format.catalog import list_checkpoints
from safepoint.errors import UsageError
from safepoint.progress.record import State
from safepoint.training.context.rank_context import RankContext, current_context
from safepoint.training.integrations.lightning.lightning_data import LightningData
from safepoint.training.integrations.lightning.parts import STATE, LightningParts
from safepoint.training.plain.training import Training

_STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}


class SafepointCallback(Checkpoint):
    """A Lightning training that survives preemption, crashes and lost nodes.

    It stands in the place of the `ModelCheckpoint` that Lightning adds by itself; others stay as they are.

    Args:
        output_dir: where checkpoints go, a folder or an object store; `--output-dir` counts more.
        save_steps: optimizer steps between checkpoints; `--save-steps` counts more. None saves when the training is
            asked to stop, and at its end.
    """

    def __init__(self, output_dir: str | Path | None = None, save_steps: int | None = None) -> None:
        self._output_dir = output_dir
        self._save_steps = save_steps
        self._undo = contextlib.ExitStack()
        self._context: RankContext | None = None
        self._training: Training | None = None
        self._trainer: Any = None
        self._saved: dict[str, Any] = {}
        self._steps: int = 0
        self._root: Path | None = None
        self._loss: Any = None
        self._is_last_batch = False

    @property
    def best_model_path(self) -> str:
        """The newest checkpoint's file, for `Trainer.test` where there is no ModelCheckpoint; empty without one."""
        found = list_checkpoints(self._root) if self._root is not None else []
        return str(found[0] / STATE) if found else ""

    # ---- what Lightning saves and restores -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What Lightning forgets: whether it was told to stop, and the metrics that schedulers follow."""
        if self._trainer is None:
            return {}
        metrics = {name: torch.as_tensor(value).clone() for name, value in self._trainer.callback_metrics.items()}
        return {"should_stop": bool(self._trainer.should_stop), "metrics": metrics}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `state_dict`; counts when the loop begins."""
        self._saved = state_dict

    # ---- Lightning's hooks, in their order -----------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """See `lightning.pytorch.Callback`."""
        if stage != "fit" or trainer.fast_dev_run:
            return
        context = current_context()
        context.outcome.check_not_interrupted()
        _check(trainer, context)
        # The last one: others have done their part before, and `trainer.checkpoint_callback` is the script's own.
        trainer.callbacks = [*(one for one in trainer.callbacks if one is not self), self]
        feed, parts = LightningData(trainer, context.log.info), LightningParts(trainer, context.place)
        training = Training(context, parts=parts, feed=feed, output_dir=self._output_dir, save_steps=self._save_steps)
        training.epochs_to_do = max(0, trainer.max_epochs or 0)
        training.steps_to_do = max(0, trainer.max_steps)
        training.steps_at_epoch_end = True
        training.more_metrics = self._metrics
        folder = training.meet()
        self._context, self._trainer, self._training, self._root = context, trainer, training, training.root
        self._follow(feed, parts, folder)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """See `lightning.pytorch.Callback`."""
        self._answer_signals()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """See `lightning.pytorch.Callback`."""
        self._answer_signals()

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
        self._close(None)  # there was nothing left to train

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """See `lightning.pytorch.Callback`."""
        self._close(exception)

    # ---- where they are not enough -------------------------------------------------------------------------------

    def _follow(self, feed: LightningData, parts: LightningParts, folder: Path | None) -> None:
        """Stand where Lightning restores, makes its loaders, and ends batches and epochs."""
        connector, strategy = self._trainer._checkpoint_connector, self._trainer.strategy
        fit, epoch = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop

        def restore(original: Callable[..., None], path: Any = None, weights_only: bool | None = None) -> None:
            if folder is None:
                original(path, weights_only)
                return
            if path is not None and self._context is not None:
                self._context.log.info("the run goes on from %s, not from ckpt_path", folder)
            parts.restore(folder, weights_only, original)

        def restored(original: Callable[[], None]) -> None:
            original()
            # Until it has begun it is nobody else's to close.
            training, self._training = self._training, None
            assert training is not None
            training.begin()
            self._training = training
            self._steps = int(self._trainer.global_step)
            if folder is not None:
                self._go_on(feed)

        def set_up_data(original: Callable[[], None]) -> None:
            def track(process: Callable[[Any], Any], loader: Any) -> Any:
                return feed.track(process(loader))

            with _replaced(strategy, "process_dataloader", track):
                original()

        def begin_run(original: Callable[[], None]) -> None:
            original()
            feed.begin_loop()

        def begin_epoch(original: Callable[[], None]) -> None:
            feed.begin_epoch()
            original()

        def begin_batches(original: Callable[[], None]) -> None:
            original()
            # The batch of the checkpoint is done, and so is what follows it: no part of it is to be done again, and
            # the end of this epoch is like that of any other.
            fit._restarting = epoch._restarting = False

        def end_batch(original: Callable[[Any], None], fetcher: Any) -> None:
            original(fetcher)
            self._end_batch()

        def end_epoch(original: Callable[[], None]) -> None:
            original()
            feed.is_between_epochs = True
            if self._is_last_batch:
                self._end_step()

        self._undo.callback(feed.untrack)
        for place, name, instead in (
            (connector, "_restore_modules_and_callbacks", restore),
            (connector, "resume_end", restored),
            (fit, "setup_data", set_up_data),
            (fit, "on_run_start", begin_run),
            (fit, "on_advance_start", begin_epoch),
            (fit, "on_advance_end", end_epoch),
            (epoch, "reset", begin_batches),
            (epoch, "on_advance_end", end_batch),
        ):
            self._undo.enter_context(_replaced(place, name, instead))

    def _go_on(self, feed: LightningData) -> None:
        """Lightning has loaded everything that it knows."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        trainer.should_stop = bool(self._saved.get("should_stop"))
        trainer._logger_connector._callback_metrics.update(self._saved.get("metrics", {}))
        if feed.is_between_epochs:
            # The epoch is done, and this is no restart in the middle of the next one.
            fit._restarting = fit.epoch_loop._restarting = fit._resuming_from_checkpoint = False
        fit.epoch_loop.val_loop._restarting = True  # by this Lightning knows that it needs no trial validation

    def _end_batch(self) -> None:
        trainer = self._trainer
        if trainer.global_step == self._steps:
            return
        self._steps = int(trainer.global_step)
        loop = trainer.fit_loop.epoch_loop
        self._is_last_batch = bool(loop._num_ready_batches_reached())
        if not self._is_last_batch:
            self._end_step(is_saved=loop.done)

    def _end_step(self, *, is_saved: bool = False) -> None:
        assert self._training is not None
        self._is_last_batch = False
        self._training.step(loss=self._loss, is_saved=is_saved)

    def _metrics(self) -> dict[str, Any]:
        """What has been logged, as it lies there: whoever asks for it has it computed, by all ranks together."""
        return dict(getattr(self._trainer._logger_connector, "_callback_metrics", {}))

    def _answer_signals(self) -> None:
        # Lightning answers SIGTERM by a collective call inside of the handler, and stops where the rank stands.
        if self._training is not None and self._context is not None:
            self._context.termination.reinstall_handlers()

    def _close(self, error: BaseException | None) -> None:
        training, self._training = self._training, None
        with self._undo:
            if training is not None:
                training.__exit__(type(error) if error is not None else None, error, None)


@contextlib.contextmanager
def _replaced(place: Any, name: str, instead: Callable[..., Any] | None) -> Generator[None]:
    """Let `instead`, which is given the original first, stand for a method; None puts the class's own there."""
    attributes = cast(dict[str, Any], vars(place))
    before: Any = attributes.pop(name, None)
    original = getattr(place, name)
    if instead is not None:

        def call(*arguments: Any, **options: Any) -> Any:
            return instead(original, *arguments, **options)

        attributes[name] = call
    try:
        yield
    finally:
        attributes.pop(name, None)
        if before is not None:
            attributes[name] = before


def _check(trainer: Any, context: RankContext) -> None:
    """Refuse what cannot be saved or resumed.

    Raises:
        UsageError: another strategy, ranks that Lightning started by itself, or others than were started.
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
            f"Lightning trains on {trainer.world_size} ranks, which have not been started as such; "
            "training was not started",
            hint="start all ranks with `safepoint run --nproc-per-node N SCRIPT`, and give the Trainer devices=N",
        )
    if trainer.world_size != context.place.world_size:
        raise UsageError(
            f"Lightning trains on {trainer.world_size} rank(s), and {context.place.world_size} were started; "
            "training was not started",
            hint="give the Trainer devices, num_nodes and strategy='ddp' for as many ranks as `safepoint run` starts",
        )
