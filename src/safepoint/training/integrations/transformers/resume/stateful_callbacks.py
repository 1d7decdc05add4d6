"""What stateful callbacks count; transformers saves it with every checkpoint."""

import copy
from typing import Any


def stateful_callbacks(trainer: Any) -> list[Any]:
    """A trainer's stateful callbacks, in their order."""
    from transformers.trainer_callback import ExportableState

    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ExportableState)]


class CallbackCounts:
    """A copy of what they have counted, and of the stop that they have requested.

    Args:
        trainer: whose callbacks they are.
    """

    def __init__(self, trainer: Any) -> None:
        self._counts: list[tuple[Any, dict[str, Any]]] = [
            (callback, copy.deepcopy(callback.state().get("attributes", {})))
            for callback in stateful_callbacks(trainer)
        ]
        self._stops = (trainer.control.should_training_stop, trainer.control.should_epoch_stop)

    def restore(self, trainer: Any) -> None:
        """Set the copied values on the callbacks again."""
        for callback, attributes in self._counts:
            for name, value in copy.deepcopy(attributes).items():
                setattr(callback, name, value)
        trainer.control.should_training_stop, trainer.control.should_epoch_stop = self._stops
