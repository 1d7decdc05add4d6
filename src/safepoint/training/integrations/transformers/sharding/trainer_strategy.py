"""The strategy by which the Trainer's ranks share model and optimizer, with checks of models and checkpoints."""

import sys
from typing import Any

from safepoint.checkpoint.format.manifest import Manifest
from safepoint.errors import UsageError
from safepoint.foundation.units import plural
from safepoint.training.compatibility.peft_releases import loses_adapters_under_fsdp1
from safepoint.training.integrations.transformers.sharding.repartition import check_repartition
from safepoint.training.state.strategy import (
    check_accelerator,
    check_fsdp_files,
    check_strategy,
    writes_shards,
    zero_stage_of,
)

_SHARDS = "pytorch_model_fsdp_0/"


def strategy_of(trainer: Any) -> str:
    """The Trainer's strategy: `single`, `ddp`, `fsdp` or `deepspeed`."""
    if trainer.is_deepspeed_enabled:
        return "deepspeed"
    if trainer.is_fsdp_enabled:
        return "fsdp"
    return "ddp" if trainer.args.world_size > 1 else "single"


def splits_weights(trainer: Any) -> bool:
    """Whether the weights are split, so that no rank has all of them."""
    return strategy_of(trainer) == "fsdp" or zero_stage_of(trainer.accelerator) == 3


def check_supported(trainer: Any, *, world_size: int) -> None:
    """Refuse models and strategies whose checkpoints cannot be resumed.

    Args:
        trainer: the Trainer, which is about to train.
        world_size: the number of ranks that were started.

    Raises:
        UsageError: no checkpoint of this training could be resumed, or the Trainer has found another number of ranks
            than was started. The message says which.
    """
    if trainer.args.world_size != world_size:
        raise UsageError(
            f"the Trainer has found {plural(trainer.args.world_size, 'rank')}, but WORLD_SIZE is {world_size}",
            hint="start the ranks with `safepoint run` or torchrun",
        )
    _check_adapters(trainer)
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise UsageError(
            "the script loads the model in shards (distributed_config), and the Trainer then saves only one rank's "
            "part of the optimizer; training was not started",
            hint="load the model whole and use the Trainer's fsdp and fsdp_config, or Accelerate",
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
            hint="make it with peft.get_peft_model, without mixed=True",
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    has_fsdp1 = plugin is not None and plugin.fsdp_version == 1
    if has_fsdp1 and isinstance(model, peft.PeftModel) and loses_adapters_under_fsdp1():
        raise UsageError(
            f"the script trains adapters under FSDP1, and PEFT {peft.__version__} saves no adapters there; training "
            "was not started",
            hint='set "version": 2 in fsdp_config, or install a release that saves them: pip install "peft<0.21"',
        )
    # The Trainer cannot resume a plain model to which add_adapter or from_pretrained has added adapters, except under
    # FSDP and DeepSpeed.
    is_added = getattr(model, "_hf_peft_config_loaded", False) and not isinstance(model, peft.PeftModel)
    if is_added and strategy_of(trainer) in {"single", "ddp"}:
        raise UsageError(
            "the model's adapters were added by add_adapter or from_pretrained, and the Trainer cannot resume such a "
            "model; training was not started",
            hint="load the model without adapters and add them with peft.get_peft_model or PeftModel.from_pretrained",
        )


def check_checkpoint_strategy(trainer: Any, manifest: Manifest) -> None:
    """Refuse a checkpoint that this Trainer cannot load.

    Raises:
        ConflictError: the checkpoint was written under another strategy, or under FSDP with another
            `state_dict_type`; or DeepSpeed cannot load its partitions.
    """
    check_strategy(manifest, strategy_of(trainer))
    check_repartition(trainer, manifest)
    if manifest.strategy == "fsdp":
        check_fsdp_files(
            f"the checkpoint of step {manifest.step}",
            has_shards=any(entry.path.startswith(_SHARDS) for entry in manifest.files),
            reads_shards=writes_shards(trainer.accelerator),
        )
