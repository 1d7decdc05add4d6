"""How the Trainer's ranks share model and optimizer, and whether a checkpoint fits that."""

from typing import Any

from holdfast.checkpoint.manifest import Manifest
from holdfast.errors import ConflictError
from holdfast.training.integrations.accelerate import writes_shards

_SHARDS = "pytorch_model_fsdp_0/"
_WHOLE = {"single", "ddp"}


def strategy_of(trainer: Any) -> str:
    """`single`, `ddp`, `fsdp` or `deepspeed`."""
    if trainer.is_deepspeed_enabled:
        return "deepspeed"
    if trainer.is_fsdp_enabled:
        return "fsdp"
    return "ddp" if trainer.args.world_size > 1 else "single"


def check_sharing(trainer: Any, manifest: Manifest) -> None:
    """Refuse a checkpoint that the Trainer, as it is set up now, cannot read.

    Raises:
        ConflictError: it was written under another strategy, or by another number of DeepSpeed's ranks.
    """
    now = strategy_of(trainer)
    ranks = trainer.args.world_size
    if now == manifest.strategy == "deepspeed" and ranks != manifest.world_size:
        raise ConflictError(
            f"the checkpoint of step {manifest.step} was written by {manifest.world_size} rank(s) of DeepSpeed, and "
            f"its partitions are theirs; this run has {ranks}; training was not started",
            hint=f"train on {manifest.world_size} rank(s), or begin anew with --from-scratch",
        )
    if now == manifest.strategy == "fsdp":
        had_shards = any(entry.path.startswith(_SHARDS) for entry in manifest.files)
        if had_shards == writes_shards(trainer.accelerator):
            return
        before, after = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")[:: 1 if had_shards else -1]
    elif now == manifest.strategy or {now, manifest.strategy} <= _WHOLE:
        return
    else:
        before, after = manifest.strategy, now
    raise ConflictError(
        f"the checkpoint of step {manifest.step} was written under {before}, this run uses {after}, which reads "
        "other files; training was not started",
        hint=f"train under {before}, or begin anew with --from-scratch",
    )


__all__ = ["check_sharing", "strategy_of"]
