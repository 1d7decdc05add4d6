"""Trains the model of a job's only rank without DistributedDataParallel.

The launcher sets the environment variables of a process group for each rank, even if there is only one rank. So
Accelerate would wrap the model in DistributedDataParallel. The wrapper would copy all gradients in each step, which
takes 2.6 ms for a small model on a CPU. The wrapper would not change the gradients, because it averages over one
rank.
"""

from typing import Any

from safepoint.checkpoint.pickles.temporary_attributes import Overrides

_REPLICATED = "MULTI_"
"""The prefix of Accelerate's distributed types that replicate the model, such as `MULTI_GPU`."""


def train_unreplicated(accelerator: Any, overrides: Overrides) -> None:
    """Keep `accelerator` from wrapping models in DistributedDataParallel until `overrides` ends.

    Args:
        accelerator: the Trainer's accelerator, in a job of one rank.
        overrides: the overrides that are in effect during the call of `train`.
    """
    overrides.override(accelerator, "prepare_model", _prepare)


def _prepare(original: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
    """Call `Accelerator.prepare_model`, with `evaluation_mode=True` if Accelerate would replicate the model.

    The only effect of this argument is that Accelerate does not wrap the model.
    """
    state = original.__self__.state
    is_replicated = str(state.distributed_type.name).startswith(_REPLICATED)
    return original(model, device_placement=device_placement, evaluation_mode=evaluation_mode or is_replicated)


__all__ = ["train_unreplicated"]
