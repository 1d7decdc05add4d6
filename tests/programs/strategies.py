"""Strategies of the Trainer on the CPU, for tests."""

import os
from pathlib import Path
from typing import Any

import torch

SHARDED = ("fsdp", "fsdp-full", "zero1", "zero2", "zero3")


def arguments_for(strategy: str, layer: str) -> dict[str, Any]:
    """Arguments of TrainingArguments for one of SHARDED, or for the usual one, which is no name.

    Args:
        strategy: by its name here.
        layer: the class of the module that FSDP wraps.
    """
    if strategy.startswith("fsdp"):
        _let_accelerate_take_the_cpu()
        state = "FULL_STATE_DICT" if strategy == "fsdp-full" else "SHARDED_STATE_DICT"
        config = {"version": 2, "transformer_layer_cls_to_wrap": [layer], "state_dict_type": state}
        return {"use_cpu": False, "fsdp": True, "fsdp_config": config}
    if strategy.startswith("zero"):
        os.environ["DS_ACCELERATOR"] = "cpu"
        _let_accelerate_take_the_cpu()
        config = {
            "zero_optimization": {"stage": int(strategy[-1])},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
            },
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
        return {"use_cpu": False, "deepspeed": config}
    return {"use_cpu": True}


def _let_accelerate_take_the_cpu() -> None:
    """Accelerate shares models on accelerators only; here the CPU passes for one."""
    import accelerate.state
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    state: Any = accelerate.state.PartialState
    state._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    state.set_device = set_device


def _plain(value: Any) -> Any:
    """Without the objects of DeepSpeed, which only DeepSpeed can load."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value if type(value) in {bool, int, float, str} else None


def save_final(trainer: Any, strategy: str, folder: Path) -> None:
    """Write weights and optimizer in a form in which they can be compared; all ranks call it."""
    folder.mkdir(parents=True, exist_ok=True)
    if strategy.startswith("zero"):
        # Each rank's fp32 partition of the weights is among it.
        torch.save(
            _plain(trainer.model_wrapped.optimizer.state_dict()),
            folder / f"partition-{trainer.args.process_index}.pt",
        )
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(trainer.model, trainer.optimizer.optimizer, options=whole)
    if trainer.is_world_process_zero():
        torch.save({"weights": weights, "optimizer": moments}, folder / "whole.pt")
