"""Which callbacks want to see a checkpoint as soon as it is saved; training waits for it where one does.

A callback that overrides `on_save` may read the checkpoint's folder or add to it. Those of experiment trackers do so
when they were told to keep checkpoints, and otherwise only have the method.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

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


__all__ = ["first_looker"]
