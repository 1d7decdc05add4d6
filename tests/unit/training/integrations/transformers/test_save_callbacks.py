"""Who wants to see a checkpoint as soon as it is saved."""

from typing import Any

from transformers.integrations import integration_utils
from transformers.trainer_callback import DefaultFlowCallback, ProgressCallback, TrainerCallback

from safepoint.training.integrations.transformers.run import TrainerRun
from safepoint.training.integrations.transformers.save_callbacks import first_reader


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
    own: list[Any] = [DefaultFlowCallback(), ProgressCallback(), object.__new__(TrainerRun)]
    assert first_reader(own) is None
    assert first_reader([*own, Looking()]) == "Looking"


def test_trackers_look_when_they_were_told_to_keep_checkpoints() -> None:
    """Everybody who logs to one would wait for every save otherwise."""
    keep, leave = integration_utils.WandbLogModel.CHECKPOINT, integration_utils.WandbLogModel.FALSE
    assert first_reader([tracker("WandbCallback", _log_model=leave)]) is None
    assert first_reader([tracker("WandbCallback", _log_model=keep)]) == "WandbCallback"
    assert first_reader([tracker("MLflowCallback", _log_artifacts=False, _auto_end_run=False)]) is None
    assert first_reader([tracker("MLflowCallback", _log_artifacts=True, _auto_end_run=False)]) == "MLflowCallback"
    assert first_reader([tracker("ClearMLCallback")]) == "ClearMLCallback", "what is not known looks"
