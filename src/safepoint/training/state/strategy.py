"""The strategy by which ranks share a model: the strategy of an Accelerator, and the checkpoints that it can read."""

import contextlib
import re
from pathlib import PurePosixPath
from typing import Any

from safepoint.checkpoint.format.manifest import Manifest
from safepoint.checkpoint.pickles.temporary_attributes import temporarily
from safepoint.errors import ConflictError, UsageError
from safepoint.foundation.units import plural
from safepoint.training.compatibility.accelerate_releases import complete_fsdp

_WHOLE = {"single", "ddp"}
"""Strategies that write the same files. Each of them can read the other's checkpoints."""
_MODEL_IN_PARTS = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
_OPTIMIZER_IN_PARTS = re.compile(r".*_optim_states\.pt")


# ---- a checkpoint -------------------------------------------------------------------------------------------


def check_strategy(manifest: Manifest, now: str) -> None:
    """Refuse a checkpoint that this run cannot read.

    Args:
        manifest: the checkpoint's manifest.
        now: the strategy of this run.

    Raises:
        ConflictError: the checkpoint was written under another strategy.
    """
    before = manifest.strategy
    if before != now and not {before, now} <= _WHOLE:
        raise _other_files_error(f"the checkpoint of step {manifest.step}", before, now)


def check_fsdp_files(checkpoint: str, *, has_shards: bool, reads_shards: bool) -> None:
    """Refuse a checkpoint of FSDP whose `state_dict_type` differs from the `state_dict_type` of this run.

    Args:
        checkpoint: how the message names the checkpoint.
        has_shards: whether each rank has written its shards into the checkpoint.
        reads_shards: whether each rank of this run reads its shards.

    Raises:
        ConflictError: the checkpoint has shards and this run reads no shards, or the reverse.
    """
    if has_shards != reads_shards:
        before, now = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")[:: 1 if has_shards else -1]
        raise _other_files_error(checkpoint, before, now)


def _other_files_error(checkpoint: str, before: str, now: str) -> ConflictError:
    """The error for a checkpoint of the strategy `before`, if the strategy `now` reads other files."""
    return ConflictError(
        f"{checkpoint} was written under {before}, this run uses {now}, which reads other files; training was not "
        "started",
        hint=f"train under {before}, or start from the beginning with --from-scratch",
    )


def zero_stages(manifest: Manifest) -> tuple[int, ...]:
    """The stages of ZeRO that may have written a checkpoint of DeepSpeed; 0 stands for DeepSpeed without ZeRO.

    Args:
        manifest: the checkpoint's manifest. If it does not state the stage, the names of the files decide. Stages 1
            and 2 have the same names.
    """
    if manifest.zero_stage is not None:
        return (manifest.zero_stage,)
    names = [PurePosixPath(entry.path).name for entry in manifest.files]
    if any(_MODEL_IN_PARTS.fullmatch(name) for name in names):
        return (3,)
    return (1, 2) if any(_OPTIMIZER_IN_PARTS.fullmatch(name) for name in names) else (0,)


def has_same_partitions(manifest: Manifest, stage: int, world_size: int) -> bool:
    """Whether DeepSpeed itself can load the checkpoint.

    Args:
        manifest: the checkpoint's manifest.
        stage: the stage of ZeRO in this run.
        world_size: the number of ranks of this run.
    """
    return stage in zero_stages(manifest) and manifest.world_size == world_size


def check_partitions(manifest: Manifest, stage: int | None, world_size: int) -> None:
    """Refuse a checkpoint of ZeRO whose partitions differ from the partitions of this run.

    Args:
        manifest: the manifest of a checkpoint that was written under this run's strategy.
        stage: the stage of ZeRO in this run; None if the run does not use DeepSpeed.
        world_size: the number of ranks of this run.

    Raises:
        ConflictError: the checkpoint was written by another number of ranks, or under another stage.
    """
    if stage is not None and not has_same_partitions(manifest, stage, world_size):
        raise ConflictError(
            f"the checkpoint of step {manifest.step} was written by {writer_of(manifest)}, and this run is "
            f"{zero_name((stage,))} on {plural(world_size, 'rank')}: DeepSpeed cannot load the checkpoint's "
            "partitions; training was not started",
            hint="use the same number of ranks and the same stage; only a script with Hugging Face's Trainer can "
            "resume with another number or stage",
        )


def writer_of(manifest: Manifest) -> str:
    """What wrote a checkpoint, such as `ZeRO-3 on 2 ranks`."""
    return f"{zero_name(zero_stages(manifest))} on {plural(manifest.world_size, 'rank')}"


def zero_name(stages: tuple[int, ...]) -> str:
    """A name such as `ZeRO-3`, `ZeRO-1 or 2` if the stage is not certain, or `DeepSpeed without ZeRO`."""
    return "DeepSpeed without ZeRO" if stages == (0,) else f"ZeRO-{' or '.join(map(str, stages))}"


# ---- an Accelerator -----------------------------------------------------------------------------------------


def check_accelerator(accelerator: Any) -> None:
    """Refuse parallelism whose checkpoints cannot be resumed, and prepare Accelerate for FSDP.

    Raises:
        UsageError: the parallelism is not supported; the message says why.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and "LOCAL" in str(plugin.state_dict_type):
        raise UsageError(
            "the script uses LOCAL_STATE_DICT: each file holds one rank's part in that rank's own layout, and "
            "Safepoint does not support that; training was not started",
            hint="set state_dict_type to SHARDED_STATE_DICT (its checkpoints are no larger) or to FULL_STATE_DICT",
        )
    if plugin is not None:
        complete_fsdp()
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


def zero_stage_of(accelerator: Any) -> int | None:
    """The stage of DeepSpeed's ZeRO; 0 if ZeRO is off, None if the run does not use DeepSpeed."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else int(plugin.zero_stage)


def writes_shards(accelerator: Any) -> bool:
    """Whether each rank writes its shards: under FSDP with `SHARDED_STATE_DICT`."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return plugin is not None and "SHARDED" in str(plugin.state_dict_type)


def shards_in_place(accelerator: Any) -> contextlib.AbstractContextManager[None]:
    """Make FSDP leave the shards on their device during a save. The writer copies them to the host anyway."""
    config = getattr(getattr(accelerator.state, "fsdp_plugin", None), "state_dict_config", None)
    if not (writes_shards(accelerator) and getattr(config, "offload_to_cpu", False)):
        return contextlib.nullcontext()
    return temporarily(config, offload_to_cpu=False)
