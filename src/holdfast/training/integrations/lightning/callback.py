"""What a script gives Lightning's Trainer, and all it has to.

A step ends where Lightning can begin again without doing anything twice or leaving it out: after the batch; after the
validation that follows it; and after the last batch of an epoch, when everything that ends an epoch is done.
"""

import contextlib
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Checkpoint

from holdfast.errors import UsageError
from holdfast.training.integrations.lightning.feed import LightningFeed
from holdfast.training.integrations.lightning.parts import LightningParts
from holdfast.training.plain.training import Training
from holdfast.training.session import Session, current_session, start_session

_STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}


class HoldfastCallback(Checkpoint):
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
        self._session: Session | None = None
        self._training: Training | None = None
        self._feed: LightningFeed | None = None
        self._undo = contextlib.ExitStack()
        self._steps = 0
        self._loss: Any = None
        self._waits_for = ""
        """What comes before the end of the step: "validation", "epoch", or nothing."""

    # ---- Lightning's hooks, in their order -----------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """See `lightning.pytorch.Callback`."""
        if stage != "fit" or trainer.fast_dev_run:
            return
        session = current_session() or start_session()
        if session.interrupted is not None:
            raise session.interrupted
        _check(trainer, session)
        self._session = session
        self._feed = LightningFeed(trainer, session.log.info)
        self._track_loaders(trainer, self._feed)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """See `lightning.pytorch.Callback`."""
        session, feed = self._session, self._feed
        if session is None or feed is None:
            return
        settings = session.settings
        folder, steps = settings.output_dir or self._output_dir, settings.save_steps or self._save_steps
        if folder is None:
            raise UsageError("there is no place for checkpoints", hint="give HoldfastCallback an output_dir")
        if steps is not None and steps < 1:
            raise UsageError(f"save_steps {steps} must be at least 1")
        trainer.fit_loop.setup_data()
        parts = LightningParts(trainer, session.place)
        training = Training(session, parts=parts, feed=feed, output_dir=str(folder), save_steps=steps)
        training.epochs_to_do = max(0, trainer.max_epochs or 0)
        training.__enter__()
        self._training = training
        self._steps = trainer.global_step
        if feed.resumed_between_epochs:
            _end_epoch(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """See `lightning.pytorch.Callback`."""
        if self._training is None or self._session is None:
            return
        # Lightning answers SIGTERM by a collective call inside of the handler, and stops where the rank stands.
        self._session.termination.take_back()
        if self._steps and self._feed is not None and not self._feed.resumed_between_epochs:
            iter(trainer.fit_loop._data_fetcher)  # a stream has been read ahead since before the resume

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """See `lightning.pytorch.Callback`."""
        if self._training is None or self._feed is None:
            return
        if self._waits_for:
            self._feed.is_between_epochs = True
            self._end_step()
        self._feed.begin_epoch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """See `lightning.pytorch.Callback`."""
        trainer.fit_loop._restarting = False  # or plateau schedulers would not hear of this epoch's validation
        if self._training is None or trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self._loss = outputs["loss"] if isinstance(outputs, dict) and "loss" in outputs else None
        loop = trainer.fit_loop.epoch_loop
        if loop._num_ready_batches_reached():
            self._waits_for = "epoch"
        elif loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
            self._waits_for = "validation"
        else:
            self._end_step()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """See `lightning.pytorch.Callback`."""
        if self._waits_for == "validation":
            self._end_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """See `lightning.pytorch.Callback`."""
        if self._training is None or self._feed is None:
            return
        self._feed.is_between_epochs = True
        if self._waits_for:
            self._end_step()
        self._close(None)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """See `lightning.pytorch.Callback`."""
        self._close(None)  # there was nothing left to train

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """See `lightning.pytorch.Callback`."""
        self._close(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """See `lightning.pytorch.Callback`."""
        self._undo.close()

    # ---- what they do --------------------------------------------------------------------------------------------

    def _end_step(self) -> None:
        assert self._training is not None
        self._waits_for = ""
        self._training.step(loss=self._loss)

    def _close(self, error: BaseException | None) -> None:
        training, self._training = self._training, None
        self._undo.close()
        if training is not None:
            training.__exit__(type(error) if error is not None else None, error, None)

    def _track_loaders(self, trainer: Any, feed: LightningFeed) -> None:
        """Wrap what Lightning prepares for training, and nothing that it prepares for something else."""
        loop, strategy = trainer.fit_loop, trainer.strategy
        set_up, process = loop.setup_data, strategy.process_dataloader

        def track(loader: Any) -> Any:
            return feed.track(process(loader))

        def set_up_tracked() -> None:
            strategy.process_dataloader = track
            try:
                set_up()
            finally:
                del strategy.process_dataloader

        loop.setup_data = set_up_tracked
        self._undo.callback(delattr, loop, "setup_data")


def _end_epoch(trainer: Any) -> None:
    """Let the fit loop see the last epoch as done: Lightning knows no restart between the hooks of two epochs."""
    loop = trainer.fit_loop
    for count in (loop.epoch_progress.total, loop.epoch_progress.current):
        count.ready = count.completed
    # Its validation loop stays as it is: by that Lightning knows that it needs no trial validation.
    loop._restarting = loop.epoch_loop._restarting = loop._resuming_from_checkpoint = False


def _check(trainer: Any, session: Session) -> None:
    """Refuse what cannot be saved or resumed.

    Raises:
        UsageError: another strategy, or ranks that Lightning started by itself.
    """
    name = type(trainer.strategy).__name__
    if name not in _STRATEGIES:
        raise UsageError(
            f"checkpoints of Lightning's {name} are not supported; training was not started",
            hint="use strategy='ddp', or Hugging Face's Trainer for FSDP and DeepSpeed",
        )
    by_lightning = type(getattr(trainer.strategy, "cluster_environment", None)).__name__ == "LightningEnvironment"
    if trainer.world_size > 1 and (by_lightning or trainer.world_size != session.place.world_size):
        raise UsageError(
            f"Lightning trains on {trainer.world_size} ranks, which have not been started as such; "
            "training was not started",
            hint="start all ranks with `holdfast run --nproc-per-node N SCRIPT`, and give the Trainer devices=N",
        )


__all__ = ["HoldfastCallback"]
