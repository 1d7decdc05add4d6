"""The Trainer's callbacks, which are notified of saves; training waits for a save where one needs it at once.

A callback that overrides `on_save` may read the checkpoint's folder or add to it. Those of experiment trackers do so
when they are configured to keep checkpoints, and otherwise only have the method.
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
"""Callbacks of transformers' own, and whether one looks."""
_TRACKERS_MODULE = "transformers.integrations.integration_utils"


class Listeners:
    """All callbacks of one training.

    Args:
        context: this rank.
        trainer: whose they are.
        peers: all ranks.
        boundary: knows what was saved.
    """

    def __init__(self, context: RankContext, trainer: Any, peers: Peers, boundary: Boundary) -> None:
        self._context = context
        self._trainer = trainer
        self._peers = peers
        self._boundary = boundary
        self._told_step: int | None = None
        self._does_one_look = True

    def loop_begins(self) -> None:
        """All ranks call it, when all callbacks are there: agree whether one of any rank looks at checkpoints."""
        looker = first_looker(self._trainer.callback_handler.callbacks)
        if looker is not None:
            self._context.log.info("%s looks at every checkpoint: training waits until it is written", looker)
        self._does_one_look = any(self._peers.gather(looker is not None))

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Around the handler's `on_save`: not called for a failed save; the files that callbacks add become part of
        it.
        """

        def on_save(args: Any, state: Any, control: Any) -> Any:
            boundary, step = self._boundary, int(self._trainer.state.global_step)
            if self._does_one_look:
                boundary.saves.finish()
            if boundary.saves.step != step:  # the save failed: there is nothing for callbacks to look at
                control.should_save = False
                return control
            self._told_step = step
            try:
                return original(args, state, control)
            finally:
                if boundary.saves.handed_step is None:
                    boundary.saver.adopt_added_files()
                    boundary.saver.prune()

        return on_save

    def tell_last(self) -> None:
        """What callbacks add to a checkpoint belongs to the last one too; the Trainer does not get to tell them."""
        trainer = self._trainer
        step = int(trainer.state.global_step)
        if self._boundary.saves.step != step or self._told_step == step:
            return
        try:
            trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        except PeerError as error:
            self._context.log.warning("%s; the save at step %s stands", error, step)
        except Exception:
            self._context.log.warning(
                "a callback failed in on_save of step %s; the checkpoint is saved", step, exc_info=True
            )


def first_looker(callbacks: Iterable[Any]) -> str | None:
    """The name of the first callback that looks at checkpoints, or None."""
    return next((type(callback).__name__ for callback in callbacks if _looks(callback)), None)


def _looks(callback: Any) -> bool:
    from transformers.trainer_callback import TrainerCallback

    kind = cast("Any", type(callback))
    base: Any = TrainerCallback
    if getattr(kind, "on_save", base.on_save) is base.on_save:
        return False
    says = _TRACKERS.get(kind.__name__) if kind.__module__ == _TRACKERS_MODULE else None
    try:
        return says is None or says(callback)
    except AttributeError:  # another release keeps it elsewhere
        return True
