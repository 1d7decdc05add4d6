"""Trains the model of a job's only rank without DistributedDataParallel.

A rank has the variables of a process group, even if it is the only rank. So Accelerate would wrap the model in
DistributedDataParallel. The wrapper would copy all gradients in each step (2.6 ms for a small model on a CPU), and
would not change the result, because the sum over one rank is the gradient itself.
"""

from typing import Any

from safepoint.checkpoint.pickles.temporary_attributes import Overrides

_REPLICATED = "MULTI_"
"""The prefix of Accelerate's distributed types that replicate the model, such as `MULTI_GPU`."""


def train_unreplicated(accelerator: Any, overrides: Overrides) -> None:
    """Make `accelerator` leave out DistributedDataParallel until `overrides` ends.

    Args:
        accelerator: the Trainer's accelerator, in a job of one rank.
        overrides: the overrides in the call of `train`.
    """
    overrides.override(accelerator, "prepare_model", _prepare)


def _prepare(original: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
    """See `Accelerator.prepare_model`. `evaluation_mode` only makes Accelerate leave out the wrapper of the model."""
    state = original.__self__.state
    is_replicated = str(state.distributed_type.name).startswith(_REPLICATED)
    return original(model, device_placement=device_placement, evaluation_mode=evaluation_mode or is_replicated)


__all__ = ["train_unreplicated"]
