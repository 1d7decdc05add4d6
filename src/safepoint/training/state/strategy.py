"""Whether a run can go on from a checkpoint that was written under some strategy."""

import re
from pathlib import PurePosixPath

from safepoint.checkpoint.format.manifest import Manifest
from safepoint.errors import ConflictError
from safepoint.foundation.units import plural

_WHOLE = {"single", "ddp"}
"""These write the same files."""
_MODEL_IN_PARTS = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
_OPTIMIZER_IN_PARTS = re.compile(r".*_optim_states\.pt")


def check_strategy(manifest: Manifest, now: str) -> None:
    """Refuse a checkpoint that this run cannot read.

    Args:
        manifest: of the checkpoint.
        now: the strategy of this run.

    Raises:
        ConflictError: it was written under another strategy.
    """
    before = manifest.strategy
    if before != now and not {before, now} <= _WHOLE:
        raise ConflictError(
            f"the checkpoint of step {manifest.step} was written under {before}, this run uses {now}, which reads "
            "other files; training was not started",
            hint=f"train under {before}, or begin anew with --from-scratch",
        )


def zero_stages(manifest: Manifest) -> tuple[int, ...]:
    """The stages of ZeRO that may have written a checkpoint of DeepSpeed's.

    Args:
        manifest: one that does not state the stage is judged by its files, which are the same for 1 and 2.
    """
    if manifest.zero_stage is not None:
        return (manifest.zero_stage,)
    names = [PurePosixPath(entry.path).name for entry in manifest.files]
    if any(_MODEL_IN_PARTS.fullmatch(name) for name in names):
        return (3,)
    return (1, 2) if any(_OPTIMIZER_IN_PARTS.fullmatch(name) for name in names) else (0,)


def is_split_alike(manifest: Manifest, stage: int, world_size: int) -> bool:
    """Whether DeepSpeed itself loads the checkpoint.

    Args:
        manifest: of the checkpoint.
        stage: of ZeRO in this run.
        world_size: its ranks.
    """
    return stage in zero_stages(manifest) and manifest.world_size == world_size


def check_split(manifest: Manifest, stage: int | None, world_size: int) -> None:
    """Refuse a checkpoint of ZeRO that was split in another way.

    Args:
        manifest: of the checkpoint, which was written under this run's strategy.
        stage: of ZeRO in this run; None without DeepSpeed.
        world_size: its ranks.

    Raises:
        ConflictError: it was written by another number of ranks, or under another stage.
    """
    if stage is not None and not is_split_alike(manifest, stage, world_size):
        before = f"{called(zero_stages(manifest))} on {plural(manifest.world_size, 'rank')}"
        raise ConflictError(
            f"the checkpoint of step {manifest.step} was written by {before}, and its partitions are theirs; this "
            f"run is {called((stage,))} on {world_size}; training was not started",
            hint="train as it was written; only under the Trainer ranks and stage can change",
        )


def called(stages: tuple[int, ...]) -> str:
    """`ZeRO-3`, or `ZeRO-1 or 2` where that is not known, or `DeepSpeed without ZeRO`."""
    return "DeepSpeed without ZeRO" if stages == (0,) else f"ZeRO-{' or '.join(map(str, stages))}"
