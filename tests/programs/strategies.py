"""Strategies of the Trainer, on the CPU or on the CUDA device that there is, for tests."""

import contextlib
import os
import types
from pathlib import Path
from typing import Any

import torch

SHARDED = ("fsdp", "fsdp-full", "fsdp1", "fsdp1-full", "zero1", "zero2", "zero3")


def arguments_for(strategy: str, layer: str, *, has_groups: bool = False, variant: str = "") -> dict[str, Any]:
    """Arguments of TrainingArguments for one of SHARDED, or for the usual one, which is no name.

    Args:
        strategy: by its name here.
        layer: the class of the module that FSDP wraps.
        has_groups: whether ZeRO is to use the Trainer's optimizer, in place of DeepSpeed's with its one group.
        variant: of ZeRO; `sums` adds gradients up in full precision, `offload` keeps the optimizer on the host.
    """
    has_device = torch.cuda.is_available()
    if has_device:
        torch.use_deterministic_algorithms(True)  # bits are compared
    if strategy.startswith("fsdp"):
        if not has_device:
            _let_accelerate_take_the_cpu()
            if strategy.startswith("fsdp1"):
                _let_fsdp1_take_the_cpu()
        state = "FULL_STATE_DICT" if strategy.endswith("-full") else "SHARDED_STATE_DICT"
        version = 1 if strategy.startswith("fsdp1") else 2
        # transformers below 5 reads neither from its own arguments.
        os.environ |= {"FSDP_VERSION": str(version), "FSDP_STATE_DICT_TYPE": state}
        config = {"version": version, "transformer_layer_cls_to_wrap": [layer], "state_dict_type": state}
        return {"use_cpu": False, "fsdp": "full_shard auto_wrap" if version == 1 else True, "fsdp_config": config}
    if strategy.startswith("zero"):
        if not has_device:
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
            "bf16": {"enabled": "auto"},
        }
        if has_groups:
            del config["optimizer"]
        if variant == "sums":
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        if variant == "offload":
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
            config["zero_force_ds_cpu_optimizer"] = False
        return {"use_cpu": False, "deepspeed": config}
    return {"use_cpu": not has_device}


def _let_accelerate_take_the_cpu() -> None:
    """Accelerate shares models on accelerators only; here the CPU passes for one."""
    import accelerate.state
    import accelerate.utils.dataclasses
    import transformers.training_args
    from accelerate.utils import DistributedType

    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    state: Any = accelerate.state.PartialState
    state._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    state.set_device = set_device
    # FSDP initializes the shards on an accelerator: here one of a kind that this torch does not know.
    accelerate.utils.dataclasses.is_npu_available = lambda: True
    torch.npu = types.SimpleNamespace(current_device=lambda: torch.device("cpu"))


def _let_fsdp1_take_the_cpu() -> None:
    """FSDP1 takes what it has moved to the host for copies, which on the CPU they are not."""
    import torch.distributed.fsdp._init_utils
    import torch.distributed.fsdp._optim_utils
    import torch.distributed.fsdp._state_dict_utils

    fsdp: Any = torch.distributed.fsdp
    fsdp._init_utils._check_module_states_for_sync_module_states = lambda _: None
    unshard = fsdp._state_dict_utils._common_unshard_pre_state_dict_hook
    unflatten = fsdp._optim_utils._unflatten_orig_param_states

    def unshard_here(module: Any, state: Any, offload_to_cpu: bool, rank0_only: bool) -> None:
        unshard(module, state, offload_to_cpu=False, rank0_only=rank0_only)

    def unflatten_here(*args: Any) -> None:
        unflatten(*args[:-1], False)

    fsdp._state_dict_utils._common_unshard_pre_state_dict_hook = unshard_here
    fsdp._optim_utils._unflatten_orig_param_states = unflatten_here


def _plain(value: Any) -> Any:
    """Without the objects of DeepSpeed, which only DeepSpeed can load."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value if type(value) in {bool, int, float, str} else None


def whole_state(trainer: Any) -> dict[str, Any]:
    """Everything that the ranks have split, whole; all of them call it."""
    return _whole_of_zero(trainer) if trainer.is_deepspeed_enabled else _whole_of_fsdp(trainer)


def _whole_of_fsdp(trainer: Any) -> dict[str, Any]:
    """Weights and optimizer by names, as torch puts them together."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, optimizer = get_state_dict(trainer.model, trainer.optimizer.optimizer, options=options)
    return {"weights": weights, "optimizer": optimizer}


def _whole_of_zero(trainer: Any) -> dict[str, Any]:
    """As DeepSpeed itself puts it together.

    Weights in full precision with their moments by name, weights that are not trained and buffers, and of the
    optimizer's groups settings and steps.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine = trainer.model_wrapped
    optimizer = engine.optimizer.optimizer
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # The first step does it, before it has come to the second group.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    trained, others = {}, {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    for name, weight in engine.module.named_parameters():
        if weight.requires_grad:
            states = {key: safe_get_full_optimizer_state(weight, key) for key in ("exp_avg", "exp_avg_sq")}
            trained[name] = {"fp32": safe_get_full_fp32_param(weight), **states}
        with deepspeed.zero.GatheredParameters([weight]) if hasattr(weight, "ds_id") else contextlib.nullcontext():
            others[name] = weight.detach().clone()
    groups = [{n: v for n, v in group.items() if n != "params"} for group in optimizer.param_groups]
    steps = [float(state["step"]) for state in optimizer.state.values()]
    batch = engine.train_batch_size(), engine.gradient_accumulation_steps() * engine.dp_world_size
    return {"trained": trained, "others": others, "groups": groups, "steps": steps, "batch": batch}


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
    whole = _whole_of_fsdp(trainer)
    if trainer.is_world_process_zero():
        torch.save(whole, folder / "whole.pt")
