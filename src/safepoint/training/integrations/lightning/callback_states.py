"""Checks the states that the callbacks of Lightning load. An attacker may have written them.

A callback does not check its state, and uses it later: in `on_fit_start`, in an epoch, or at an evaluation. With a
value of another kind, each start of the run would fail there, with an error that names no file. So for each callback
of Lightning, a table states the kinds of its values. Settings that the script gave to the callback are not loaded.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.callbacks.weight_averaging import WeightAveraging

from safepoint.checkpoint.pickles.loading import refusal, states_of
from safepoint.checkpoint.pickles.optimizer_states import with_own_groups
from safepoint.checkpoint.pickles.temporary_attributes import Overrides
from safepoint.errors import CheckpointError
from safepoint.foundation.field_types import COUNT, NAMED, NUMBER, Kind, finite, whole

_REAL = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_WHOLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_OF_SWALR = {"anneal_epochs", "base_lrs", "last_epoch"}
"""Entries that each state of a SWALR has. With any state, Lightning removes the script's scheduler at the start."""
_MOST_ENTRIES = 10_000
"""The most entries of a dictionary or a list that a callback loads and saves again."""
_MOST_SECONDS = 1e10
"""More than three hundred years; still a valid `timedelta`."""


def _is_real_number(value: Any, *, may_be_nan: bool = True) -> bool:
    is_dense = type(value) is torch.Tensor and value.layout is torch.strided and value.numel() == 1
    if not is_dense or value.is_meta or value.is_quantized or value.is_nested:
        return False
    return value.dtype in _REAL | _WHOLE and (may_be_nan or float(value) == float(value))


def _is_elapsed(value: Any) -> bool:
    return isinstance(value, dict) and all(
        NUMBER.fits(one) and 0 <= one <= _MOST_SECONDS for one in cast("dict[Any, Any]", value).values()
    )


def _are_scores(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(path, str) and _is_real_number(score) for path, score in cast("dict[Any, Any]", value).items()
    )


def _are_groups(value: Any) -> bool:
    """Whether a value can be what BaseFinetuning knows of optimizers: groups, with the names of their parameters."""
    if not isinstance(value, dict):
        return False
    numbered = [one for number, one in cast("dict[Any, Any]", value).items() if isinstance(number, int)]
    groups = [group for one in numbered if isinstance(one, list) for group in cast("list[Any]", one)]
    return all(isinstance(one, list) and cast("list[Any]", one) for one in numbered) and all(map(_is_group, groups))


def _is_group(group: Any) -> bool:
    names: Any = group.get("params") if NAMED.fits(group) else None
    return isinstance(names, list) and all(isinstance(name, str) for name in cast("list[Any]", names))


def _is_of_swalr(value: Any) -> bool:
    return isinstance(value, Mapping) and cast("Mapping[Any, Any]", value).keys() >= _OF_SWALR


SCORE = Kind(words="a tensor in memory with one real number", fits=_is_real_number)
"""A metric, or the score of a model."""
_BEST = Kind(words=SCORE.words, fits=partial(_is_real_number, may_be_nan=False))
_MAPPING = Kind(words="a mapping", fits=lambda value: isinstance(value, Mapping))
_KINDS: dict[type[Any], dict[str, Kind]] = {
    BaseFinetuning: {
        "internal_optimizer_metadata": Kind(words="groups of parameters", fits=_are_groups),
        "previous_backbone_lr": finite(0).optional,
    },
    EarlyStopping: {"wait_count": COUNT, "stopped_epoch": COUNT, "best_score": _BEST, "patience": COUNT},
    ModelCheckpoint: {
        "best_model_score": SCORE.optional,
        "current_score": SCORE.optional,
        "kth_value": SCORE.optional,
        "best_k_models": Kind(words="a dictionary of paths with scores", fits=_are_scores).optional,
    },
    StochasticWeightAveraging: {
        "n_averaged": COUNT,
        "latest_update_epoch": whole(-1),
        "scheduler_state": Kind(words="the state of a SWALR", fits=_is_of_swalr).optional,
        "average_model_state": _MAPPING.optional,
    },
    Timer: {"time_elapsed": Kind(words="numbers of seconds", fits=_is_elapsed)},
    WeightAveraging: {"latest_update_step": COUNT},
}
_SETTINGS = {EarlyStopping: ("patience",)}
"""The settings that the script decides."""
_BY_STEPS, _BY_EPOCHS = ("latest_update_step",), ("n_averaged", "stopped_epoch")
_BY_COMPLETE_EPOCHS = ("latest_update_epoch",)
"""The counts that cannot exceed the steps, or the epochs, that the Trainer has done."""


def is_of_lightning(callback: Any) -> bool:
    """Whether Lightning defines the class of a callback, or the script derived it from a class in the table."""
    return _is_defined_by_lightning(callback) or isinstance(callback, tuple(_KINDS))


def _is_defined_by_lightning(callback: Any) -> bool:
    return cast("Any", type(callback)).__module__.startswith(("lightning.", "pytorch_lightning."))


def check_state(callback: Any, state: Any, *, steps: int, epochs: int) -> dict[str, Any]:
    """Check the state that a callback is about to load.

    Args:
        callback: a callback of Lightning, or of a class that the script derived from one.
        state: the state from the checkpoint.
        steps: optimizer steps that the Trainer has done.
        epochs: epochs that the Trainer has done.

    Returns:
        The state, with the script's settings.

    Raises:
        TypeError: the state is not a dictionary.
        ValueError: a value is of another kind, or exceeds what the Trainer has done.
    """
    name = type(callback).__name__
    if not isinstance(state, dict):
        raise TypeError(f"the state of {name} is not a dictionary")
    saved = dict(cast("dict[str, Any]", state))
    if isinstance(callback, BaseFinetuning) and "internal_optimizer_metadata" not in saved:
        saved = {"internal_optimizer_metadata": saved, "previous_backbone_lr": saved.get("previous_backbone_lr")}
    for kind, kinds in _KINDS.items():
        for field, one in kinds.items() if isinstance(callback, kind) else ():
            if field in saved:
                one.check(f"{field!r} of {name}", saved[field])
        for setting in _SETTINGS.get(kind, ()) if isinstance(callback, kind) else ():
            saved[setting] = getattr(callback, setting)
    for most, counts in (
        (steps + epochs, _BY_STEPS),
        (epochs + 1, _BY_EPOCHS),
        (epochs, _BY_COMPLETE_EPOCHS),
    ):
        for field in counts if isinstance(callback, tuple(_KINDS)) else ():
            number: Any = saved.get(field)
            if type(number) is int and number > most:
                raise ValueError(f"{field!r} of {name} is {number}, and the Trainer can have reached {most}")
    if _is_defined_by_lightning(callback):
        _check_alike(callback, saved)
    return saved


def check_averages(checkpoint: Any, *, steps: int, epochs: int) -> None:
    """Check the number of averaged models that a WeightAveraging loads.

    Raises:
        TypeError: the state is not a dictionary.
        ValueError: the number is not a whole number, or exceeds what the Trainer has done.
    """
    state: Any = checkpoint.get("averaging_state", {})
    if not isinstance(state, dict):
        raise TypeError("the state of averaged models is not a dictionary")
    number = cast("dict[str, Any]", state).get("n_averaged", torch.tensor(0))
    if not _is_real_number(number) or number.dtype not in _WHOLE or not 0 <= int(number) <= steps + epochs:
        raise ValueError("'n_averaged' of averaged models is not a number that the Trainer can have reached")


def try_out(callback: Any) -> None:
    """Compute what a callback will compute with a state that it has loaded: in `on_fit_start`, or after a validation.

    Raises:
        Exception: whatever the callback would raise there.
    """
    one = callback
    if isinstance(callback, Timer):
        one.time_remaining()
        timedelta(seconds=int(one.time_elapsed()))
    elif isinstance(callback, EarlyStopping):
        bool(one.monitor_op(one.best_score - one.min_delta, one.best_score))
    elif isinstance(callback, ModelCheckpoint) and one.kth_best_model_path in one.best_k_models:
        bool(torch.lt(one.kth_value, one.best_k_models[one.kth_best_model_path]))


def watch_later_loads(where: object, callbacks: Iterable[Any], optimizers: Callable[[], list[Any]]) -> Overrides:
    """Check what callbacks load after their states: until the returned `Overrides` is closed.

    Callbacks use their states in `on_fit_start`: BaseFinetuning puts groups of parameters into the optimizers.
    StochasticWeightAveraging removes the scheduler of the script; see `continue_averaging` for the state of its own.

    Args:
        where: the file that the states come from; named in errors.
        callbacks: the callbacks of the Trainer.
        optimizers: returns the optimizers of the Trainer.
    """

    def start(original: Callable[..., None], *arguments: Any) -> None:
        try:
            with states_of(where):
                original(*arguments)
        except CheckpointError as error:
            if isinstance(error.__cause__, MisconfigurationException):  # it is about the script
                raise error.__cause__ from None
            raise

    def start_finetuning(callback: Any, original: Callable[..., None], *arguments: Any) -> None:
        of_optimizers = optimizers()
        groups: dict[Any, Any] = callback._internal_optimizer_metadata
        # The callback would keep the groups of optimizers that do not exist, and each checkpoint would contain them.
        kept = {number: one for number, one in groups.items() if number in range(len(of_optimizers))}
        callback._internal_optimizer_metadata = kept
        with with_own_groups(where, *of_optimizers):
            start(original, *arguments)

    def start_averaging(callback: Any, original: Callable[..., None], *arguments: Any) -> None:
        start(original, *arguments)
        has_begun = callback._latest_update_epoch >= callback.swa_start
        if callback._scheduler_state is not None and not has_begun:
            what = "StochasticWeightAveraging has the state of a scheduler, although it has averaged no model yet"
            raise refusal(where, what, "otherwise keep `swa_epoch_start` as in the run that wrote the checkpoint")

    overrides = Overrides()
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            overrides.override(callback, "on_fit_start", partial(start_finetuning, callback))
        elif isinstance(callback, StochasticWeightAveraging):
            overrides.override(callback, "on_fit_start", partial(start_averaging, callback))
        elif _is_defined_by_lightning(callback):
            overrides.override(callback, "on_fit_start", start)
    return overrides


def _check_alike(callback: Any, saved: dict[str, Any]) -> None:
    """Check the values that have no entry in the table, by the callback's own values."""
    known = {name for kind, kinds in _KINDS.items() if isinstance(callback, kind) for name in kinds}
    own: dict[str, Any] = callback.state_dict()
    for name, value in saved.items():
        if name in own and name not in known and not _is_alike(value, own[name]):
            raise ValueError(f"{name!r} of {type(callback).__name__} has another type than the callback's value")
        is_table = isinstance(value, Mapping | list | tuple) and name not in known
        if is_table and len(cast("list[Any]", value)) > _MOST_ENTRIES:
            raise ValueError(f"{name!r} of {type(callback).__name__} has more than {_MOST_ENTRIES} entries")


def _is_alike(value: Any, own: Any) -> bool:
    """Whether a value from a checkpoint can replace a callback's own value. None means that it is not known yet."""
    kind = cast("type[Any]", type(own))
    if value is None or own is None:
        return value is None or isinstance(value, str | bool) or NUMBER.fits(value) or _is_real_number(value)
    if isinstance(own, torch.Tensor):
        return isinstance(value, torch.Tensor) and value.shape == own.shape and value.layout is own.layout
    if isinstance(own, bool | int | float):
        return isinstance(value, bool) or NUMBER.fits(value)
    if isinstance(own, dict) and isinstance(value, dict):
        known, saved = cast("dict[Any, Any]", own), cast("dict[Any, Any]", value)
        return all(_is_alike(one, known[name]) for name, one in saved.items() if name in known)
    return isinstance(value, kind)
