"""Checks what a DeepSpeed engine has loaded from a checkpoint that an attacker may have written.

DeepSpeed takes its loss scaler, its clipping of gradients and its counters from the checkpoint without a check. With
a scale of 0 all weights become NaN. The number of steps becomes a part of the path of the next save. So the script
decides about settings, and only counters and the scale of a dynamic loss scaler come from a checkpoint.
"""

import contextlib
from collections.abc import Generator
from typing import Any, cast

from safepoint.checkpoint.pickles.loading import refusal
from safepoint.checkpoint.pickles.scaler_states import SCALE
from safepoint.errors import printable
from safepoint.foundation.field_types import COUNT, FLAG, Kind, whole

_COUNTS = ("global_steps", "global_samples", "skipped_steps")
_SETTINGS = ("clip_grad", "dynamic_loss_scale")
_SCALERS = ("loss_scaler", "loss_scale_config")
"""The attributes of an optimizer that hold its loss scaler: under ZeRO, and without it."""
_OF_SCALER: dict[str, Kind] = {
    "cur_scale": SCALE,
    "cur_iter": COUNT,
    "last_overflow_iter": whole(-1),
    "cur_hysteresis": whole(0),
}
"""The attributes that a dynamic loss scaler changes in a training. Its other attributes are settings."""


def is_engine(part: Any) -> bool:
    """Whether an object is a DeepSpeedEngine with an optimizer."""
    kinds = cast("tuple[Any, ...]", type(part).__mro__)
    is_of_deepspeed = any(kind.__module__.partition(".")[0] == "deepspeed" for kind in kinds)
    return is_of_deepspeed and hasattr(part, "load_checkpoint") and getattr(part, "optimizer", None) is not None


@contextlib.contextmanager
def checked_engine(engine: Any, where: object) -> Generator[None]:
    """While the block runs, the engine loads a checkpoint. Afterwards it has its own settings again.

    Args:
        engine: a DeepSpeedEngine.
        where: the file or the checkpoint that it loads; named in errors.

    Raises:
        CheckpointError: a counter or the scale of the loss scaler is invalid.
    """
    optimizer: Any = engine.optimizer
    own = _attributes(optimizer)
    settings = {name: own[name] for name in _SETTINGS if name in own}
    scalers = {name: (own[name], dict(_attributes(own[name]))) for name in _SCALERS if own.get(name) is not None}
    yield
    try:
        for name in _COUNTS:
            COUNT.check(name, getattr(engine, name, 0))
        FLAG.check("overflow", own.get("overflow", False))
        for name, (scaler, before) in scalers.items():
            counted = _counted(own[name], before)
            _attributes(scaler).clear()
            _attributes(scaler).update({**before, **counted})
            settings[name] = scaler
    except ValueError as error:
        raise refusal(where, f"the state of DeepSpeed in it is invalid: {printable(str(error))}") from error
    own.update(settings)


def _attributes(part: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", getattr(part, "__dict__", {}))


def _counted(loaded: Any, before: dict[str, Any]) -> dict[str, Any]:
    """The numbers that a dynamic loss scaler has counted, from the scaler that was loaded.

    Raises:
        ValueError: a number is invalid.
    """
    if not (before.get("dynamic") or before.get("dynamic_loss_scale")):
        return {}
    found = _attributes(loaded)
    counted = {name: found[name] for name in _OF_SCALER if name in found and name in before}
    for name, value in counted.items():
        _OF_SCALER[name].check(name, value)
    return counted
