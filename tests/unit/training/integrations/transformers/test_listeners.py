"""Who wants to see a checkpoint as soon as it is saved."""

from typing import Any

from transformers.integrations import integration_utils
from transformers.trainer_callback import DefaultFlowCallback, ProgressCallback, TrainerCallback

from safepoint.training.integrations.transformers.callback import SafepointCallback
from safepoint.training.integrations.transformers.listeners import first_looker


class Looking(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Looks."""


def tracker(name: str, **attributes: Any) -> Any:
    """A tracker's callback whose library is not installed."""
    callback = object.__new__(getattr(integration_utils, name))
    callback.__dict__.update(attributes)
    return callback


def test_only_who_overrides_the_method_looks() -> None:
    """The Trainer's own do not, nor does Safepoint's."""
    own: list[Any] = [DefaultFlowCallback(), ProgressCallback(), SafepointCallback(run=None)]  # type: ignore[arg-type]
    assert first_looker(own) is None
    assert first_looker([*own, Looking()]) == "Looking"


def test_trackers_look_when_they_were_told_to_keep_checkpoints() -> None:
    """Everybody who logs to one would wait for every save otherwise."""
    keep, leave = integration_utils.WandbLogModel.CHECKPOINT, integration_utils.WandbLogModel.FALSE
    assert first_looker([tracker("WandbCallback", _log_model=leave)]) is None
    assert first_looker([tracker("WandbCallback", _log_model=keep)]) == "WandbCallback"
    assert first_looker([tracker("MLflowCallback", _log_artifacts=False, _auto_end_run=False)]) is None
    assert first_looker([tracker("MLflowCallback", _log_artifacts=True, _auto_end_run=False)]) == "MLflowCallback"
    assert first_looker([tracker("ClearMLCallback")]) == "ClearMLCallback", "what is not known looks"
