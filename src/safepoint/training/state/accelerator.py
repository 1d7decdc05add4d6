"""What an `accelerate.Accelerator` has prepared: which parallelism it uses, and whether a checkpoint can resume."""

import contextlib
from importlib import metadata
from typing import Any

import torch

from safepoint.errors import UsageError
from safepoint.training.state.temporary_attributes import temporarily


def check_accelerator(accelerator: Any) -> None:
    """Refuse parallelism whose checkpoints cannot be resumed.

    Raises:
        UsageError: with the reason.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 1:
        raise UsageError(
            "the script uses FSDP1, whose flat parameters PyTorch replaces by FSDP2; training was not started",
            hint='set "version": 2 in fsdp_config (fsdp_version: 2 in a configuration of Accelerate)',
        )
    version = metadata.version("accelerate")
    if plugin is not None and tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < (1, 15):
        raise UsageError(
            f"accelerate {version} does not load all that FSDP2 saves: before 1.13 it leaves "
            "out the optimizer's state, before 1.15 the adapters of FULL_STATE_DICT; training was not started",
            hint="pip install 'accelerate>=1.15'",
        )
    if plugin is not None and "LOCAL" in str(plugin.state_dict_type):
        raise UsageError(
            "the script uses LOCAL_STATE_DICT, whose files are the memory of one rank each; training was not started",
            hint="set state_dict_type to SHARDED_STATE_DICT, which writes as little, or to FULL_STATE_DICT",
        )
    parallel = getattr(accelerator, "parallelism_config", None)
    if parallel is None or getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        return
    for name, num_ranks in (("tensor", parallel.tp_size), ("context", parallel.cp_size)):
        if num_ranks > 1:
            raise UsageError(
                f"the script uses {name} parallelism on {num_ranks} ranks, which is not supported: a checkpoint "
                "would miss parts of the model; training was not started",
                hint="use FSDP2 or DeepSpeed's ZeRO-3 for a model that does not fit on one device",
            )


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that steps, without its wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def zero_stage_of(accelerator: Any) -> int | None:
    """The stage of DeepSpeed's ZeRO, 0 where it is off; None without DeepSpeed."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else int(plugin.zero_stage)


def writes_shards(accelerator: Any) -> bool:
    """Whether each rank of FSDP writes its shards; otherwise the first rank writes the whole model."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return plugin is not None and "SHARDED" in str(plugin.state_dict_type)


def shards_in_place(accelerator: Any) -> contextlib.AbstractContextManager[None]:
    """Leave shards on their device while they are saved: the writer copies them to the host, once."""
    config = getattr(getattr(accelerator.state, "fsdp_plugin", None), "state_dict_config", None)
    if not (writes_shards(accelerator) and getattr(config, "offload_to_cpu", False)):
        return contextlib.nullcontext()
    return temporarily(config, offload_to_cpu=False)
