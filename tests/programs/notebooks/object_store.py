"""Checkpoints in a bucket, with the model on a claim that the pods mount beside it. `connect.py` runs first."""

# %%
from kubeflow.trainer.options import (
    ContainerPatch,
    JobSetSpecPatch,
    JobSetTemplatePatch,
    JobSpecPatch,
    JobTemplatePatch,
    PodSpecPatch,
    PodTemplatePatch,
    ReplicatedJobPatch,
    RuntimePatch,
    TrainingRuntimeSpecPatch,
)

BUCKET, PREFIX = os.environ["BUCKET"], "checkpoints"


# %%
def train_func():
    """The model and the data lie at /mnt/shared; the output is what the SDK says."""
    import os

    from datasets import load_from_disk
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained("/mnt/shared/models/tiny")
    arguments = TrainingArguments(
        output_dir="/tmp/output",
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to="none",
        use_cpu=True,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained("/mnt/shared/models/tiny"),
        args=arguments,
        train_dataset=load_from_disk("/mnt/shared/data/texts"),
        data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False),
    )
    trainer.train()
    if int(os.environ["RANK"]) == 0:
        final = os.path.join(trainer.args.output_dir, "final")
        os.makedirs(final, exist_ok=True)
        trainer.save_model(final)
        tokenizer.save_pretrained(final)


# %%
volume = {"name": "shared", "persistentVolumeClaim": {"claimName": CLAIM}}
container = ContainerPatch(name="node", volume_mounts=[{"name": "shared", "mountPath": "/mnt/shared"}])
pod = PodTemplatePatch(spec=PodSpecPatch(volumes=[volume], containers=[container]))
template = JobTemplatePatch(spec=JobSpecPatch(template=pod))
jobs = JobSetSpecPatch(replicated_jobs=[ReplicatedJobPatch(name="node", template=template)])
patch = RuntimePatch(training_runtime_spec=TrainingRuntimeSpecPatch(template=JobSetTemplatePatch(spec=jobs)))

trainer = TransformersTrainer(
    func=train_func,
    num_nodes=2,
    resources_per_node={"nvidia.com/gpu": 1, "cpu": "250m", "memory": "2Gi"},
    env={"HF_HUB_OFFLINE": "1", "SAFEPOINT_NPROC_PER_NODE": "1"},
    enable_jit_checkpoint=True,
    periodic_checkpoint_config=PeriodicCheckpointConfig(save_strategy="steps", save_steps=4, save_total_limit=2),
    output_dir=f"s3://{BUCKET}/{PREFIX}",
    data_connection_name="s3-storage-connection",
    verify_cloud_storage_ssl=False,
    verify_cloud_storage_access=True,
)
name = client.train(trainer=trainer, runtime=runtime, options=[patch])
job = client.wait_for_job_status(name, {"Complete"}, timeout=300)
print("status", job.status)

# %%
import boto3
import urllib3

urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
store = boto3.client(
    "s3",
    endpoint_url=os.environ["ENDPOINT"],
    region_name="us-east-1",
    aws_access_key_id=os.environ["KEY"],
    aws_secret_access_key=os.environ["SECRET"],
    verify=False,
)
found = []
for page in store.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{PREFIX}/final/"):
    for item in page["Contents"]:
        target = Path("downloaded", item["Key"].removeprefix(f"{PREFIX}/final/"))
        target.parent.mkdir(parents=True, exist_ok=True)
        store.download_file(BUCKET, item["Key"], str(target))
        found.append(target.name)
print("downloaded", sorted(found))

# %%
from transformers import AutoModelForCausalLM, AutoTokenizer

print("parameters", AutoModelForCausalLM.from_pretrained("downloaded").num_parameters())
print("vocabulary", len(AutoTokenizer.from_pretrained("downloaded")))
client.delete_job(name=name)
