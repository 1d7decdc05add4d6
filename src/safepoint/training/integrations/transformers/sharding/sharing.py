"""How the Trainer's ranks share model and optimizer, and whether a checkpoint fits that."""

import sys
from typing import Any

from safepoint.checkpoint.format.manifest import Manifest
from safepoint.errors import ConflictError, UsageError
from safepoint.training.integrations.transformers.sharding.repartition import check_repartition
from safepoint.training.plain.state.accelerate import check_accelerator, writes_shards
from safepoint.training.state.strategy import check_strategy

_SHARDS = "pytorch_model_fsdp_0/"


def strategy_of(trainer: Any) -> str:
    """`single`, `ddp`, `fsdp` or `deepspeed`."""
    if trainer.is_deepspeed_enabled:
        return "deepspeed"
    if trainer.is_fsdp_enabled:
        return "fsdp"
    return "ddp" if trainer.args.world_size > 1 else "single"


def splits_weights(trainer: Any) -> bool:
    """Whether no rank has all weights."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return strategy_of(trainer) == "fsdp" or (plugin is not None and int(plugin.zero_stage) == 3)


def check_supported(trainer: Any) -> None:
    """Refuse ways of sharing the model of which Safepoint does not know that a checkpoint of them can be resumed.

    Raises:
        UsageError: with the reason.
    """
    _check_adapters(trainer)
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise UsageError(
            "the script loads the model in shards (distributed_config), and the Trainer saves one rank's part of the "
            "optimizer only; training was not started",
            hint="load the model whole and share it by the Trainer's fsdp and fsdp_config, or by Accelerate",
        )
    check_accelerator(trainer.accelerator)


def _check_adapters(trainer: Any) -> None:
    peft: Any = sys.modules.get("peft")
    model = getattr(trainer, "model", None)
    if peft is None or model is None:
        return
    if isinstance(model, peft.PeftMixedModel):
        raise UsageError(
            "the model is a PeftMixedModel, which PEFT cannot save; training was not started",
            hint="make it by peft.get_peft_model without mixed=True",
        )
    # FSDP and DeepSpeed read such a model from files of their own.
    is_added = getattr(model, "_hf_peft_config_loaded", False) and not isinstance(model, peft.PeftModel)
    if is_added and strategy_of(trainer) in {"single", "ddp"}:
        raise UsageError(
            "the model has its adapters by add_adapter or from_pretrained, and the Trainer reads no checkpoint of "
            "such a model; training was not started",
            hint="load the model without adapters and add them by peft.get_peft_model or PeftModel.from_pretrained",
        )


def check_sharing(trainer: Any, manifest: Manifest) -> None:
    """Refuse a checkpoint that the Trainer, as it is set up now, cannot read.

    Raises:
        ConflictError: it was written under another strategy; or by other ranks of DeepSpeed, and cannot be cut anew.
    """
    check_strategy(manifest, strategy_of(trainer))
    check_repartition(trainer, manifest)
    if manifest.strategy != "fsdp":
        return
    had_shards = any(entry.path.startswith(_SHARDS) for entry in manifest.files)
    if had_shards != writes_shards(trainer.accelerator):
        before, after = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")[:: 1 if had_shards else -1]
        raise ConflictError(
            f"the checkpoint of step {manifest.step} was written under {before}, this run uses {after}, which reads "
            "other files; training was not started",
            hint=f"train under {before}, or begin anew with --from-scratch",
        )
