"""Whether a run can go on from a checkpoint that was written under some strategy."""

from holdfast.checkpoint.manifest import Manifest
from holdfast.errors import ConflictError

_WHOLE = {"single", "ddp"}
"""These write the same files."""


def check_strategy(manifest: Manifest, now: str, world_size: int) -> None:
    """Refuse a checkpoint that this run cannot read.

    Args:
        manifest: of the checkpoint.
        now: the strategy of this run.
        world_size: its ranks.

    Raises:
        ConflictError: it was written under another strategy, or by another number of DeepSpeed's ranks.
    """
    before = manifest.strategy
    if before != now and not {before, now} <= _WHOLE:
        raise ConflictError(
            f"the checkpoint of step {manifest.step} was written under {before}, this run uses {now}, which reads "
            "other files; training was not started",
            hint=f"train under {before}, or begin anew with --from-scratch",
        )
    if now == "deepspeed" and manifest.world_size != world_size:
        raise ConflictError(
            f"the checkpoint of step {manifest.step} was written by {manifest.world_size} rank(s) of DeepSpeed, and "
            f"its partitions are theirs; this run has {world_size}; training was not started",
            hint=f"train on {manifest.world_size} rank(s), or begin anew with --from-scratch",
        )


__all__ = ["check_strategy"]
