"""Calls `on_save` of the Trainer's callbacks. If a callback reads checkpoints, each call waits until the save ends.

A callback that overrides `on_save` may read the checkpoint's folder, or add files to it. Callbacks of experiment
trackers read the folder only if they are configured to upload checkpoints.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

from safepoint.errors import PeerError
from safepoint.training.collective.peers import Peers
from safepoint.training.context.rank_context import RankContext
from safepoint.training.engine.boundary import Boundary

_TRACKERS: dict[str, Callable[[Any], bool]] = {
    "WandbCallback": lambda one: str(getattr(one._log_model, "value", one._log_model)) == "checkpoint",
    "MLflowCallback": lambda one: bool(one._log_artifacts),
    "NeptuneCallback": lambda one: bool(one._should_upload_checkpoint),
    "ClearMLCallback": lambda one: bool(one._log_model),
    "DVCLiveCallback": lambda one: one._log_model == "all",
    "TrackioCallback": lambda one: False,
    "SwanLabCallback": lambda one: False,
}
"""Name of a callback class of transformers that overrides `on_save` → a function that returns whether an instance
reads checkpoints."""
_TRACKERS_MODULE = "transformers.integrations.integration_utils"


class SaveCallbacks:
    """The callbacks of one training.

    Args:
        context: the context of this rank.
        trainer: the trainer that has the callbacks.
        peers: all ranks.
        boundary: does the work between two steps, such as saves.
    """

    def __init__(self, context: RankContext, trainer: Any, peers: Peers, boundary: Boundary) -> None:
        self._context = context
        self._trainer = trainer
        self._peers = peers
        self._boundary = boundary
        self._notified_step: int | None = None
        self._must_wait = True

    def loop_begins(self) -> None:
        """Agree with all ranks whether a callback of any rank reads checkpoints."""
        reader = first_reader(self._trainer.callback_handler.callbacks)
        if reader is not None:
            self._context.log.info(
                "%s may read every checkpoint, so training waits until each checkpoint is written", reader
            )
        self._must_wait = any(self._peers.gather(reader is not None))

    def on_save(self, original: Callable[..., Any], args: Any, state: Any, control: Any) -> Any:
        """Replaces the handler's `on_save`: skips failed saves, and adds the callbacks' files to the checkpoint."""
        boundary, step = self._boundary, int(self._trainer.state.global_step)
        if self._must_wait:
            boundary.saves.finish()
        if boundary.saves.step != step:  # the save failed
            control.should_save = False
            return control
        self._notified_step = step
        try:
            return original(args, state, control)
        finally:
            if boundary.saves.pending_step is None:
                boundary.saver.adopt_added_files()
                boundary.saver.prune()  # only now, because the manifest must first list the callbacks' files

    def notify(self) -> None:
        """Call `on_save` for the last save, if the Trainer itself has not called it."""
        trainer = self._trainer
        step = int(trainer.state.global_step)
        if self._boundary.saves.step == step != self._notified_step:
            trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

    def notify_before_leaving(self) -> None:
        """Like `notify`, but errors are only logged."""
        step = int(self._trainer.state.global_step)
        try:
            self.notify()
        except PeerError as error:
            self._context.log.warning("%s; the checkpoint of step %s is saved", error, step)
        except Exception:
            self._context.log.warning(
                "a callback's on_save failed for step %s; the checkpoint is saved", step, exc_info=True
            )


def first_reader(callbacks: Iterable[Any]) -> str | None:
    """The name of the first callback that reads checkpoints, or None."""
    return next((type(callback).__name__ for callback in callbacks if _reads(callback)), None)


def _reads(callback: Any) -> bool:
    from transformers.trainer_callback import TrainerCallback

    kind = cast("Any", type(callback))
    base: Any = TrainerCallback
    if getattr(kind, "on_save", base.on_save) is base.on_save:
        return False
    is_reader = _TRACKERS.get(kind.__name__) if kind.__module__ == _TRACKERS_MODULE else None
    try:
        return is_reader is None or is_reader(callback)
    except AttributeError:  # the attribute has another name in this release
        return True
