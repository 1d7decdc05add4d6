"""ZeRO-2 by a dict with "auto". `connect.py` runs first."""


# %%
def train_func():
    """All ranks save the final model; the first one adds the tokenizer."""
    import os
    import sys

    sys.path.insert(0, "/mnt/kubeflow-checkpoints/lib")
    from strategies import _let_accelerate_take_the_cpu

    os.environ["DS_ACCELERATOR"] = "cpu"
    _let_accelerate_take_the_cpu()
    from datasets import load_from_disk
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    tokenizer = AutoTokenizer.from_pretrained("/mnt/kubeflow-checkpoints/models/tiny")
    zero = {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 5e8,
        },
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    arguments = TrainingArguments(
        output_dir="/tmp/output",
        num_train_epochs=1,
        per_device_train_batch_size=2,
        report_to="none",
        deepspeed=zero,
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained("/mnt/kubeflow-checkpoints/models/tiny"),
        args=arguments,
        train_dataset=load_from_disk("/mnt/kubeflow-checkpoints/data/texts"),
    )
    trainer.train()
    final = os.path.join(trainer.args.output_dir, "final")
    trainer.save_model(final)
    if int(os.environ["RANK"]) == 0:
        tokenizer.save_pretrained(final)


# %%
trainer = TransformersTrainer(
    func=train_func,
    num_nodes=2,
    resources_per_node={"nvidia.com/gpu": 1, "cpu": "250m", "memory": "3Gi"},
    env={
        "HF_HUB_OFFLINE": "1",
        "SAFEPOINT_NPROC_PER_NODE": "1",
        "PYTHONPATH": os.environ["DEEPSPEED_PATH"],
        "TORCH_EXTENSIONS_DIR": "/mnt/kubeflow-checkpoints/torch_extensions",
    },
    output_dir=f"pvc://{CLAIM}/checkpoints/run",
    periodic_checkpoint_config=PeriodicCheckpointConfig(save_strategy="steps", save_steps=4, save_total_limit=2),
)
name = client.train(trainer=trainer, runtime=runtime)
for line in client.get_job_logs(name, follow=True):
    print(line)

# %%
print("status", client.get_job(name=name).status)
client.delete_job(name=name)
