"""Keeps entries of frozen weights out of a checkpoint of adapters, where DeepSpeed leaves some in it."""

import contextlib
from typing import Any

from safepoint.training.state.temporary_attributes import temporarily


def without_frozen_statistics(engine: Any) -> contextlib.AbstractContextManager[None]:
    """Remove all entries of frozen weights from an engine's checkpoints, while the block runs.

    DeepSpeed leaves out the weights themselves. Quantized weights add entries under their names (scales and tables),
    which belong to the base model and are loaded with it.

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

    return temporarily(engine, module_state_dict=module_state_dict)
