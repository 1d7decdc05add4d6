"""Makes every `Trainer.train()` of the process a `TrainerRun`, which Safepoint saves, stops and resumes.

Hyper-parameter trials are left as they are.
"""

import functools
import inspect
from types import ModuleType
from typing import Any, cast

from safepoint.errors import SafepointError
from safepoint.training.compatibility.releases import TESTED, check_release
from safepoint.training.compatibility.transformers_releases import split_loop
from safepoint.training.context.rank_context import RankContext
from safepoint.training.integrations.transformers.run import TrainerRun

_METHODS = (
    "_maybe_log_save_evaluate",
    "_save_checkpoint",
    "_evaluate",
    "_run_epoch",
    "_finalize_training",
    "_load_rng_state",
    "_init_training_state",
    "_issue_warnings_after_load",
    "_load_best_model",
    "_push_from_checkpoint",
    "_get_output_dir",
    "_save",
    "get_total_train_batch_size",
)
_FUNCTIONS = ("skip_first_batches", "deepspeed_load_checkpoint")
"""Functions that the training loop looks up in the module `transformers.trainer`."""
_COUNTED = (
    "_tr_loss",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "current_flos",
    "current_gradient_accumulation_steps",
)
"""Attributes that the training loop sets on the Trainer, and that Safepoint reads."""


def hook_trainer(module: ModuleType, context: RankContext) -> None:
    """Make every `Trainer.train()` of the process, except hyper-parameter trials, a `TrainerRun` of `context`.

    Raises:
        SafepointError: this release of transformers lacks a method or attribute that Safepoint overrides or reads.
    """
    trainer_class: Any = module.Trainer
    for name in TESTED:
        check_release(name, warns=context.place.is_first)
    split_loop(module)
    missing = _missing(module, trainer_class)
    if missing:
        raise SafepointError(
            f"this release of transformers has no {missing[0]}; training was not started",
            hint='install a supported release: pip install "safepoint[transformers]"',
        )
    train, save_model = trainer_class.train, trainer_class.save_model

    @functools.wraps(train)
    def train_under_safepoint(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        context.outcome.check_not_interrupted()
        if kwargs.get("trial") or (args and args[0]):
            return train(self, resume_from_checkpoint, *args, **kwargs)  # a hyper-parameter trial is not a run
        run = TrainerRun(context, self)
        return run.train(lambda resume: train(self, resume, *args, **kwargs), resume_from_checkpoint)

    @functools.wraps(save_model)
    def save_model_unless_interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A script that catches SystemExit must not save a half-trained model as the final model.
        context.outcome.check_not_interrupted()
        return save_model(self, *args, **kwargs)

    trainer_class.train = train_under_safepoint
    trainer_class.save_model = save_model_unless_interrupted


def _missing(module: ModuleType, trainer_class: Any) -> list[str]:
    """The methods, attributes and functions that Safepoint needs, and that this release does not have."""
    contents = cast("dict[str, Any]", trainer_class.__dict__)
    methods = [inspect.unwrap(one) for one in contents.values() if inspect.isfunction(one)]
    named = {name for method in methods for name in method.__code__.co_names}
    return [
        *(f"Trainer.{name}" for name in _METHODS if not hasattr(trainer_class, name)),
        *(f"Trainer.{name}" for name in _COUNTED if name not in named),
        *(f"transformers.trainer.{name}" for name in _FUNCTIONS if not hasattr(module, name)),
    ]
