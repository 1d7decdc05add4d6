"""Leaves out of a checkpoint of adapters what DeepSpeed, told to leave out frozen weights, still puts into it."""

import contextlib
from collections.abc import Generator
from typing import Any


@contextlib.contextmanager
def without_frozen_statistics(engine: Any) -> Generator[None]:
    """While this lasts, an engine's checkpoint has nothing that belongs to a frozen weight.

    DeepSpeed leaves out the weights themselves. Quantized ones add entries below their names, scales and tables,
    which are a part of the model as their codes are. Whoever loads the model has them.

    Args:
        engine: a `DeepSpeedEngine`.
    """
    original = engine.module_state_dict

    def module_state_dict(*args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any) -> dict[str, Any]:
        state = original(*args, exclude_frozen_parameters=exclude_frozen_parameters, **kwargs)
        if exclude_frozen_parameters:
            weights = engine.module.named_parameters()
            frozen = tuple(f"{name}." for name, weight in weights if not weight.requires_grad)
            for entry in [entry for entry in state if entry.startswith(frozen)]:
                del state[entry]
        return state

    engine.module_state_dict = module_state_dict
    try:
        yield
    finally:
        del engine.module_state_dict
