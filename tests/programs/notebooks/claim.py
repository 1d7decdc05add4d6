"""Checkpoints on a claim, from the first cell to the deletion of the job. `connect.py` runs first."""

# %%
from kubeflow.trainer.options import (
    Annotations,
    ContainerPatch,
    JobSetSpecPatch,
    JobSetTemplatePatch,
    JobSpecPatch,
    JobTemplatePatch,
    Labels,
    Name,
    PodSpecPatch,
    PodTemplatePatch,
    ReplicatedJobPatch,
    RuntimePatch,
    TrainingRuntimeSpecPatch,
)

from safepoint.sdk.options import ContainerOverride, PodSpecOverride, PodTemplateOverride, PodTemplateOverrides


# %%
def train_func(note):
    """Fine-tunes a model that lies on the claim, whose root is where the SDK mounts it."""
    import os

    import torch
    from datasets import load_from_disk
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
    )

    rank = int(os.environ["RANK"])
    print(f"note {note}; unset {'UNSET' in os.environ}; also {os.listdir('/mnt/also')}")
    print("shared memory", os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize >> 20, "MiB")
    model = AutoModelForCausalLM.from_pretrained(
        "/mnt/kubeflow-checkpoints/models/tiny",
        dtype=torch.bfloat16,
        device_map={"": "cpu"},
        local_files_only=True,
    )
    tokenizer = AutoTokenizer.from_pretrained("/mnt/kubeflow-checkpoints/models/tiny")
    arguments = TrainingArguments(
        output_dir="/tmp/output",  # the SDK replaces it
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=2,
        report_to="none",
        bf16=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=load_from_disk("/mnt/kubeflow-checkpoints/data/texts"),
        data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False),
    )
    trainer.train()
    if rank == 0:
        final = os.path.join(trainer.args.output_dir, "final")
        trainer.save_model(final)
        tokenizer.save_pretrained(final)
        print("final model in", final)


# %%
def mounted(volume, path, pod_class, container_class):
    """A pod that mounts one volume more."""
    mount = {"name": volume["name"], "mountPath": path}
    return pod_class(volumes=[volume], containers=[container_class(name="node", volume_mounts=[mount])])


shared_memory = {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "100Mi"}}
pod = mounted(shared_memory, "/dev/shm", PodSpecPatch, ContainerPatch)
template = JobTemplatePatch(spec=JobSpecPatch(template=PodTemplatePatch(spec=pod)))
jobs = JobSetSpecPatch(replicated_jobs=[ReplicatedJobPatch(name="node", template=template)])
patch = RuntimePatch(training_runtime_spec=TrainingRuntimeSpecPatch(template=JobSetTemplatePatch(spec=jobs)))
also = {"name": "also", "persistentVolumeClaim": {"claimName": CLAIM}}
override = PodTemplateOverrides(
    PodTemplateOverride(target_jobs=["node"], spec=mounted(also, "/mnt/also", PodSpecOverride, ContainerOverride))
)

trainer = TransformersTrainer(
    func=train_func,
    func_args={"note": "a `b` $HOME \\ 'c'"},
    num_nodes=2,
    resources_per_node={"nvidia.com/gpu": 1, "cpu": "250m", "memory": "2Gi"},
    env={"UNSET": os.environ.get("NO_SUCH_VARIABLE"), "HF_HUB_OFFLINE": "1", "SAFEPOINT_NPROC_PER_NODE": "1"},
    enable_jit_checkpoint=True,
    periodic_checkpoint_config=PeriodicCheckpointConfig(save_strategy="steps", save_steps=2, save_total_limit=2),
    output_dir=f"pvc://{CLAIM}/checkpoints/run",
)
name = client.train(
    trainer=trainer,
    runtime=runtime,
    options=[Name("fine-tuning"), Labels({"team": "a"}), Annotations({"note": "b"}), patch, override],
)
print("submitted", name)

# %%
for line in client.get_job_logs(name, follow=True):
    print(line)

# %%
job = client.get_job(name)
print("status", job.status, "nodes", job.num_nodes, "runtime", job.runtime.name, "created", job.creation_timestamp)
print("steps", [(step.name, step.status) for step in job.steps])

# %%
folder = SHARED / "checkpoints" / "run"
print("folders", sorted(item.name for item in folder.iterdir() if item.name.startswith(("checkpoint-", "final"))))

from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(folder / "final")
tokenizer = AutoTokenizer.from_pretrained(folder / "final")
answer = model.generate(**tokenizer("hello", return_tensors="pt"), max_new_tokens=4, do_sample=False)
print("tokens", answer.shape[1])

# %%
client.delete_job(name=name)
print("jobs", [job.name for job in client.list_jobs()])
