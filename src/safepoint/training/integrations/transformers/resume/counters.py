"""Copies and restores the numbers that callbacks and TRL's trainers count during a training.

transformers saves the counts of stateful callbacks, such as the patience of early stopping. This module restores
these values.

TRL's trainers keep the averages between two log lines, and the number of tokens so far, in attributes that they do
not save. Trainers that generate also keep the completions that are still to be trained on. A resume must not generate
these completions again, because it would use other weights. This module copies and restores all of these attributes.
The module `accumulators` finds further numbers that a trainer counts.
"""

import copy
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from transformers.trainer_callback import ExportableState

from safepoint.foundation.field_types import COUNT, MOST_COUNT, NAMED, finite
from safepoint.training.integrations.transformers.resume.accumulators import (
    accumulators,
    changed,
    restore_accumulators,
    restore_into,
)

_TOKENS = "_total_train_tokens"
_FIGURES = ("_metrics", "_stored_metrics", _TOKENS)
"""In the first two, a mode such as `train` has lists of numbers, by their names. The third is a number."""
_TOKEN_COUNT = replace(finite(0), most=MOST_COUNT)
_MOST_NAMES = 10_000
_LONGEST_NAME = 200
_OWN_RECORDS = {"loss", "epoch", "step", "grad_norm", "learning_rate", "total_flos", "train_loss"}
_CYCLE = ("_step", "_buffered_inputs")
"""The number of micro-batches done, and the completions from which micro-batches are taken."""


class CallbackCounters:
    """A copy of the counts of stateful callbacks, and of the stop requests of callbacks.

    Args:
        trainer: the trainer that has the callbacks.
    """

    def __init__(self, trainer: Any) -> None:
        self._counters: list[tuple[Any, dict[str, Any]]] = [
            (callback, copy.deepcopy(callback.state().get("attributes", {})))
            for callback in _stateful_callbacks(trainer)
        ]
        self._stops = (trainer.control.should_training_stop, trainer.control.should_epoch_stop)

    def restore(self, trainer: Any) -> None:
        """Set the copied values on the callbacks again."""
        for callback, attributes in self._counters:
            for name, value in copy.deepcopy(attributes).items():
                setattr(callback, name, value)
        trainer.control.should_training_stop, trainer.control.should_epoch_stop = self._stops


def restore_callbacks(trainer: Any) -> None:
    """Restore the counters of stateful callbacks from the Trainer's state, in place.

    The Trainer has an option of its own, `restore_callback_states_from_checkpoint`. This option also restores the
    flags that were set when the checkpoint was saved. It replaces the callbacks by new objects, and the script may
    still refer to the old objects.

    Raises:
        ValueError: a saved value has another type than the callback's value.
    """
    saved: dict[str, Any] = trainer.state.stateful_callbacks
    by_name: dict[str, list[Any]] = {}
    for callback in _stateful_callbacks(trainer):
        by_name.setdefault(type(callback).__name__, []).append(callback)
    saved.setdefault(type(trainer.control).__name__, {})  # without this entry, each save would fail
    for name, callbacks in by_name.items():
        records: Any = saved.setdefault(name, {})  # a save needs an entry for a new callback, too
        # If the script has added two callbacks of a class, the Trainer appends the states of every save to one list.
        newest = cast("list[Any]", records if isinstance(records, list) else [records])[-len(callbacks) :]
        if not trainer.args.restore_callback_states_from_checkpoint:
            for callback, record in zip(callbacks, newest, strict=False):
                own: dict[str, Any] = callback.state().get("attributes", {})
                for attribute, value in record.get("attributes", {}).items():
                    if attribute in own:  # the file must not set other attributes
                        if not _is_alike(value, own[attribute]):
                            raise ValueError(
                                f"the attribute {attribute} of {name} is {value!r:.80}, of another type than its own"
                            )
                        setattr(callback, attribute, value)


def limit_callbacks(trainer: Any) -> None:
    """Limit what the Trainer's option `restore_callback_states_from_checkpoint` restores.

    Call this function before the Trainer restores callbacks. The Trainer makes each callback again with arguments
    from the checkpoint, even a callback that saves no state. It then sets all attributes that the checkpoint names.
    This function removes from the Trainer's state everything that the callback does not save itself.

    Raises:
        ValueError: a saved value has another type than the callback's value. Or a saved argument differs from the
            script's argument, and is not a number: for example, it may be the path of a file.
    """
    saved: dict[str, Any] = trainer.state.stateful_callbacks
    for name, records in list(saved.items()):
        own = [one for one in (*trainer.callback_handler.callbacks, trainer.control) if type(one).__name__ == name]
        if not all(isinstance(one, ExportableState) for one in own):
            del saved[name]
        elif own and isinstance(records, list):
            pairs = zip(own, cast("list[Any]", records), strict=False)
            saved[name] = [_own_part(record, one) for one, record in pairs]
        elif own:
            saved[name] = _own_part(records, own[0])


def _own_part(record: dict[str, Any], callback: Any) -> dict[str, Any]:
    """The part of a saved state that the callback itself saves."""
    now: dict[str, Any] = callback.state()
    kept: dict[str, Any] = {}
    for part, fits in (("args", _is_number_or_same), ("attributes", _is_alike)):
        own = now.get(part, {})
        kept[part] = {name: value for name, value in record.get(part, {}).items() if name in own}
        for name, value in kept[part].items():
            if not fits(value, own[name]):
                raise ValueError(
                    f"{name} of {type(callback).__name__} is {value!r:.80} in the checkpoint, and {own[name]!r:.80} "
                    "in the script"
                )
    return kept


def _is_number_or_same(value: Any, own: Any) -> bool:
    numbers = (bool, int, float, type(None))
    return value == own or (isinstance(value, numbers) and isinstance(own, numbers))


def _is_alike(value: Any, own: Any) -> bool:
    """Whether a saved value can replace a callback's own value. None means that a value is not known yet."""
    if own is None or value is None:
        return True
    numbers = (bool, int, float)
    return type(value) is type(own) or (isinstance(own, numbers) and isinstance(value, numbers))


def _stateful_callbacks(trainer: Any) -> list[Any]:
    """A trainer's stateful callbacks, in their order."""
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ExportableState)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCounters:
    """What a trainer has counted.

    Args:
        numbers: what `accumulators` has found, by name. For TRL's trainers, the attributes in `_FIGURES` and `_CYCLE`
            are left out.
        figures: for TRL's trainers, the attributes in `_FIGURES`, by name; valid for any number of ranks.
        cycle: for TRL's trainers, the attributes in `_CYCLE`, by name; valid for this rank and its batch geometry
            only.
        is_training: whether the model was in training mode. In training mode, TRL logs the averages of the training.
            In evaluation mode, it logs the averages of the evaluation.
    """

    numbers: dict[str, Any] = field(default_factory=dict[str, Any])
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    cycle: dict[str, Any] = field(default_factory=dict[str, Any])
    is_training: bool = True

    @classmethod
    def of(cls, trainer: Any) -> "TrainerCounters":
        """Copy the containers. Their tensors are not copied, because TRL's trainers never change these tensors."""
        numbers = accumulators(trainer)
        if not _is_of_trl(trainer):
            return cls(numbers=numbers)
        own = cast("dict[str, Any]", trainer.__dict__)
        cycle = {name: _copied(own[name]) for name in _CYCLE if name in own}
        if not _is_within_cycle(trainer):
            cycle.pop("_buffered_inputs", None)  # the next micro-batch generates completions
        return cls(
            numbers={name: one for name, one in numbers.items() if name not in {*_FIGURES, *_CYCLE}},
            figures={name: _copied(own[name]) for name in _FIGURES if name in own},
            cycle=cycle,
            is_training=bool(trainer.model.training),
        )

    @property
    def has_completions(self) -> bool:
        """Whether there are completions that are still to be trained on."""
        return self.cycle.get("_buffered_inputs") is not None

    def since(self, begin: "TrainerCounters") -> "TrainerCounters":
        """A copy with only the numbers that have changed since `begin`. Other numbers are settings of the script."""
        return replace(self, numbers=changed(self.numbers, begin.numbers))

    def restore(self, trainer: Any, *, is_trusted: bool = False) -> None:
        """Set the copied values on a trainer of the same kind.

        Args:
            trainer: the trainer.
            is_trusted: whether the values were copied in this process. Values from a file are checked.

        Raises:
            ValueError: a value from a file is invalid.
        """
        restore_accumulators(trainer, self.numbers)
        own = cast("dict[str, Any]", trainer.__dict__)
        if not _is_of_trl(trainer):
            return
        if not is_trusted:
            check_figures(self.figures)
        # Ignore other names: if they were set, the file of a checkpoint could replace any attribute, even a method.
        for name in (name for name in _FIGURES if name in self.figures):
            value = self.figures[name]
            if not is_trusted and name != _TOKENS:
                value = _without_own_records(value)
                if isinstance(own.get(name), dict) and own[name].keys() - value.keys():
                    raise ValueError(f"{name} lacks an entry that the trainer has")
            if isinstance(own.get(name), dict):
                restore_into(own[name], value)
            else:
                own[name] = value
        _check_cycle(self.cycle)
        for name in (name for name in _CYCLE if name in self.cycle):
            own[name] = _copied(self.cycle[name], trainer.args.device)
        if trainer.model.training != self.is_training:
            trainer.model.train(self.is_training)


def uses_completions(trainer: Any, completions: Any) -> bool:
    """Whether the next micro-batch of a trainer of TRL is one of these completions."""
    own = cast("dict[str, Any]", vars(trainer))
    return completions is not None and own.get("_buffered_inputs") is completions and _is_within_cycle(trainer)


def _check_cycle(cycle: dict[str, Any]) -> None:
    """Check the form of completions. Their content cannot be checked here; see `TrainerResume`.

    Raises:
        ValueError: the trainer could not take a micro-batch from the completions.
    """
    if "_step" in cycle:
        COUNT.check("_step", cycle["_step"])
    completions: Any = cycle.get("_buffered_inputs")
    if completions is not None:
        batches = cast("list[Any]", completions if isinstance(completions, list) else [])
        if not batches or not all(one is None or isinstance(one, dict) for one in batches):
            raise ValueError("_buffered_inputs is not a list of micro-batches")


def check_figures(figures: dict[str, Any]) -> None:
    """Check the form of saved figures: it must be a form with which TRL's trainers can compute.

    TRL's trainers add the average of each list to the log, and the Trainer saves the log as JSON. A list may contain
    numbers that are not finite, because TRL records NaN for a batch without a value.

    Raises:
        ValueError: a trainer could not compute with the figures, or each later save would fail.
    """
    for name in (name for name in _FIGURES if name in figures):
        value: Any = figures[name]
        if name == _TOKENS:
            _TOKEN_COUNT.check(name, value)
            continue
        NAMED.check(name, value)
        for mode, lists in cast("dict[str, Any]", value).items():
            if not NAMED.fits(lists):
                raise ValueError(f"the entry {mode!r:.80} of {name} is not a mapping with names as keys")
            if len(lists) > _MOST_NAMES or max(map(len, (mode, *lists))) > _LONGEST_NAME:
                raise ValueError(
                    f"{name} has more than {_MOST_NAMES} names, or one of more than {_LONGEST_NAME} characters"
                )
            for one in cast("dict[str, Any]", lists).values():
                if not isinstance(one, list | deque) or not all(map(_is_figure, cast("list[Any]", one))):
                    raise ValueError(f"{name} has an entry that is not a list of numbers")


def _is_figure(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_meta or value.is_complex() or value.layout != torch.strided:
            return False
        value = value.item()
    return isinstance(value, float | bool) or (isinstance(value, int) and abs(value) <= MOST_COUNT)


def _without_own_records(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures with numbers in the place of tensors.

    Empty lists are left out, because some trainers divide by the length. The names of the Trainer's own records are
    left out, because the figures would replace these records in the log, and could choose the best checkpoint.
    """
    return {
        mode: {
            name: [one.item() if isinstance(one, torch.Tensor) else one for one in values]
            for name, values in lists.items()
            if values and name.removeprefix("eval_") not in _OWN_RECORDS
        }
        for mode, lists in figures.items()
    }


def _is_of_trl(trainer: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "trl" for base in type(trainer).__mro__)


def _is_within_cycle(trainer: Any) -> bool:
    """Whether completions that were generated are still to be trained on after this step."""
    per_generation = getattr(trainer.args, "steps_per_generation", None)
    if per_generation is None:
        return False
    return getattr(trainer, "_step", 0) % (per_generation * getattr(trainer, "num_iterations", 1)) != 0


def _copied(value: Any, device: torch.device | None = None) -> Any:
    if isinstance(value, dict):
        return {name: _copied(one, device) for name, one in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | deque):
        return [_copied(one, device) for one in cast("list[Any]", value)]
    if isinstance(value, tuple):
        return tuple(_copied(one, device) for one in cast("tuple[Any, ...]", value))
    return value.to(device) if isinstance(value, torch.Tensor) and device is not None else value
