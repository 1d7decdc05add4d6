"""FSDP whose kind of state is changed after the Trainer was made. `connect.py` runs first."""


# %%
def train_func():
    """All ranks save the final model; the first one adds the tokenizer."""
    import os
    import sys

    sys.path.insert(0, "/mnt/kubeflow-checkpoints/lib")
    from strategies import _let_accelerate_take_the_cpu

    _let_accelerate_take_the_cpu()
    from datasets import load_from_disk
    from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    tokenizer = AutoTokenizer.from_pretrained("/mnt/kubeflow-checkpoints/models/tiny")
    arguments = TrainingArguments(
        output_dir="/tmp/output",
        num_train_epochs=1,
        per_device_train_batch_size=2,
        report_to="none",
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "activation_checkpointing": True,
            "sync_module_states": True,
            "use_orig_params": True,
            "limit_all_gathers": False,
        },
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained("/mnt/kubeflow-checkpoints/models/tiny"),
        args=arguments,
        train_dataset=load_from_disk("/mnt/kubeflow-checkpoints/data/texts"),
    )
    plugin = trainer.accelerator.state.fsdp_plugin
    plugin.state_dict_type = StateDictType.SHARDED_STATE_DICT
    plugin.state_dict_config = ShardedStateDictConfig()
    plugin.optim_state_dict_config = ShardedOptimStateDictConfig()
    trainer.train()
    final = os.path.join(trainer.args.output_dir, "final")
    trainer.save_model(final)
    if int(os.environ["RANK"]) == 0:
        tokenizer.save_pretrained(final)


# %%
import time

trainer = TransformersTrainer(
    func=train_func,
    num_nodes=2,
    resources_per_node={"nvidia.com/gpu": 1, "cpu": "250m", "memory": "3Gi"},
    env={"HF_HUB_OFFLINE": "1", "SAFEPOINT_NPROC_PER_NODE": "1"},
    enable_jit_checkpoint=True,
    periodic_checkpoint_config=PeriodicCheckpointConfig(save_strategy="steps", save_steps=4, save_total_limit=2),
    output_dir=f"pvc://{CLAIM}/checkpoints/run",
)
name = client.train(trainer=trainer, runtime=runtime)
while client.get_job(name=name).status not in {"Complete", "Failed"}:
    time.sleep(1)

# %%
print("status", client.get_job(name=name).status)
print("\n".join(list(client.get_job_logs(name))[-40:]))
client.delete_job(name=name)
