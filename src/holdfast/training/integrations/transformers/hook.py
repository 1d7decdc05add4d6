"""Makes every `Trainer.train()` of the process a `TrainerRun`, from the moment transformers is imported."""

import functools
from types import ModuleType
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.training.integrations.transformers.run import TrainerRun
from holdfast.training.session import Session

_REPLACED = (
    "_maybe_log_save_evaluate",
    "_save_checkpoint",
    "_evaluate",
    "_run_epoch",
    "_finalize_training",
    "_load_rng_state",
    "_init_training_state",
)


def hook_trainer(module: ModuleType, session: Session) -> None:
    """Make every `Trainer.train()` of the process run under `session`.

    Raises:
        HoldfastError: this release of transformers has another training loop.
    """
    trainer_class: Any = module.Trainer
    missing = [name for name in _REPLACED if not hasattr(trainer_class, name)]
    if missing:
        raise HoldfastError(
            f"this release of transformers has no Trainer.{missing[0]}; training was not started",
            hint='install a supported one: pip install "holdfast[transformers]"',
        )
    train, save_model = trainer_class.train, trainer_class.save_model

    @functools.wraps(train)
    def train_under_holdfast(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        _stay_interrupted(session)
        if kwargs.get("trial") or (args and args[0]):
            return train(self, resume_from_checkpoint, *args, **kwargs)  # a hyper-parameter trial is not a run
        run = TrainerRun(session, self)
        return run.train(lambda resume: train(self, resume, *args, **kwargs), resume_from_checkpoint)

    @functools.wraps(save_model)
    def save_model_unless_interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        _stay_interrupted(session)
        return save_model(self, *args, **kwargs)

    trainer_class.train = train_under_holdfast
    trainer_class.save_model = save_model_unless_interrupted


def _stay_interrupted(session: Session) -> None:
    # A script that catches SystemExit must not go on to save a half-trained model as the final one.
    if session.interrupted is not None:
        raise session.interrupted


__all__ = ["hook_trainer"]
