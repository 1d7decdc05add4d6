"""A job of a queue, and its progress. `connect.py` runs first."""


# %%
def train_func():
    """The imports are inside, as everything that the function uses."""
    from datasets import load_from_disk
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="/tmp/output",
        num_train_epochs=1,
        per_device_train_batch_size=2,
        logging_steps=5,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained("/mnt/kubeflow-checkpoints/models/tiny"),
        args=arguments,
        train_dataset=load_from_disk("/mnt/kubeflow-checkpoints/data/texts"),
    )
    trainer.train()
    trainer.save_model(f"{trainer.args.output_dir}/final")


# %%
from kubeflow.trainer.options import Labels

trainer = TransformersTrainer(
    func=train_func,
    num_nodes=1,
    resources_per_node={"cpu": "250m", "memory": "2Gi"},
    env={"HF_HUB_OFFLINE": "1", "SAFEPOINT_NPROC_PER_NODE": "1"},
    output_dir=f"pvc://{CLAIM}/checkpoints/run",
)
try:
    client.train(trainer=trainer, runtime=runtime, options=[Labels({"kueue.x-k8s.io/queue-name": "none"})])
except RuntimeError as error:
    print("refused:", error)
name = client.train(trainer=trainer, runtime=runtime, options=[Labels(labels={"kueue.x-k8s.io/queue-name": "gpus"})])
print("at first", client.get_job(name).status)

# %%
for line in client.get_job_logs(name, follow=True):
    print(line)

# %%
job = client.get_job(name)
print("status", job.status, "step", job.progress.step, "of", job.progress.max_steps)
client.delete_job(name=name)
