"""Decides which of the work that a checkpoint defers the script itself can cause.

The file of a rank in a checkpoint states work that was due at the step, and that a resume does first. Another person
may have written the file. So such work is done only if it can come from the script: from its settings, its data, its
callbacks or its kind of trainer. All other work is ignored, with a warning.
"""

import dataclasses
import inspect
import logging
from types import CodeType
from typing import Any, cast

from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback

from safepoint.training.integrations.transformers.resume.trainer_state import DeferredWork

_LIBRARIES = {"transformers", "trl"}
_NEVER_STOP = {"transformers", "safepoint"}
"""Of the callbacks of these packages, only `EarlyStoppingCallback` ends a training early."""
_EVALUATIONS = ("get_eval_dataloader", "evaluate", "_evaluate")


def possible_work(trainer: Any, pending: DeferredWork, log: logging.Logger) -> DeferredWork:
    """The part of the deferred work that the script can cause. A warning names the rest.

    Args:
        trainer: the Trainer, with the state of the checkpoint.
        pending: the work that the checkpoint states.
        log: the log of this rank.
    """
    if pending.evaluate and not _can_evaluate(trainer):
        _warn(trainer, log, "an evaluation is due, but this script never evaluates: the evaluation is left out")
        pending = dataclasses.replace(pending, evaluate=False, save=False)
    if pending.epoch_end and not float(trainer.state.epoch or 0.0).is_integer():
        _warn(trainer, log, "the end of an epoch is due, but the step of the checkpoint is within an epoch: the work "
              "at the end of the epoch is left out")  # fmt: skip
        pending = dataclasses.replace(pending, epoch_end=False)
    if pending.complete and not _can_end_early(trainer):
        _warn(trainer, log, "the training has ended before its last step, but nothing in this script ends a training "
              "early: the training continues")  # fmt: skip
        pending = dataclasses.replace(pending, complete=False)
    return pending


def _warn(trainer: Any, log: logging.Logger, sentence: str) -> None:
    if trainer.is_world_process_zero():
        log.warning("the checkpoint says that %s", sentence)


def _can_evaluate(trainer: Any) -> bool:
    kind = cast("Any", type(trainer))
    has_data = trainer.eval_dataset is not None or any(_is_of_script(getattr(kind, name)) for name in _EVALUATIONS)
    strategy: Any = trainer.args.eval_strategy
    is_asked = str(getattr(strategy, "value", strategy)) != "no"
    return has_data and (is_asked or _is_of_script(type(trainer)) or bool(_own_callbacks(trainer)))


def _can_end_early(trainer: Any) -> bool:
    data: Any = trainer.train_dataset
    is_stream = isinstance(data, IterableDataset) or not hasattr(data, "__len__")
    return is_stream or _uses_control(cast("type[Any]", type(trainer))) or bool(_own_callbacks(trainer))


def _uses_control(kind: type[Any]) -> bool:
    """Whether a class of the script has a method that uses the Trainer's `control`, which can end a training."""
    own = [base for base in kind.__mro__ if base is not object and _is_of_script(base)]
    methods = [inspect.unwrap(one) for base in own for one in vars(base).values() if inspect.isfunction(one)]
    return any("control" in _names_in(method.__code__) for method in methods)


def _names_in(code: CodeType) -> set[str]:
    """The names of all attributes and variables that a piece of code uses, with the functions inside of it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *code.co_varnames, *(name for one in inner for name in _names_in(one))}


def _own_callbacks(trainer: Any) -> list[Any]:
    callbacks = cast("list[Any]", trainer.callback_handler.callbacks)
    return [
        one
        for one in callbacks
        if isinstance(one, EarlyStoppingCallback) or _package_of(type(one)) not in _NEVER_STOP
    ]


def _is_of_script(part: Any) -> bool:
    """Whether a class or a method is neither of transformers nor of TRL."""
    return _package_of(part) not in _LIBRARIES


def _package_of(part: Any) -> str:
    return str(getattr(part, "__module__", "")).partition(".")[0]
