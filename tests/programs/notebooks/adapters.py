"""LoRA: a function that finds its checkpoint itself, and a callback that reads each one. `connect.py` runs first."""


# %%
def train_func(**parameters):
    """Ends with a barrier of its own."""
    import os
    from pathlib import Path

    import torch.distributed as dist
    from datasets import load_from_disk
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers.trainer_utils import get_last_checkpoint

    shared = Path("/mnt/kubeflow-checkpoints")
    out_dir = shared / "adapters" / "run"
    out_dir.mkdir(parents=True, exist_ok=True)

    class ReadAdapter(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.is_world_process_zero:
                adapter = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "adapter_model.safetensors"
                print(f"adapter of step {state.global_step}: {adapter.exists()}")

    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "tiny")
    model = AutoModelForCausalLM.from_pretrained(shared / "models" / "tiny")
    lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=parameters["lora_r"], target_modules=["q_proj", "v_proj"])
    model = get_peft_model(model, lora)
    model.enable_input_require_grads()
    split = load_from_disk(str(shared / "data" / "texts")).train_test_split(test_size=0.25, seed=42)
    arguments = TrainingArguments(
        output_dir=str(out_dir),
        num_train_epochs=parameters["num_epochs"],
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        learning_rate=parameters["learning_rate"],
        lr_scheduler_type="cosine",
        logging_steps=2,
        eval_steps=4,
        eval_strategy="steps",
        save_steps=4,
        save_total_limit=3,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        remove_unused_columns=False,
        report_to="none",
        ddp_find_unused_parameters=False,
        use_cpu=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        data_collator=DataCollatorForSeq2Seq(tokenizer=tokenizer, model=model, padding="longest"),
        processing_class=tokenizer,
        callbacks=[ReadAdapter()],
    )
    last = get_last_checkpoint(str(out_dir))
    print("last checkpoint", last)
    if last:
        trainer.train(resume_from_checkpoint=last)
    else:
        trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model(str(out_dir / "final"))
        tokenizer.save_pretrained(str(out_dir / "final"))
    if dist.is_initialized():
        dist.barrier()
        print("all ranks are here", os.environ["RANK"])


# %%
from kubeflow.trainer.options import Name

trainer = TransformersTrainer(
    func=train_func,
    func_args={"lora_r": 4, "num_epochs": 20, "learning_rate": 1.0e-4},
    num_nodes=2,
    resources_per_node={"nvidia.com/gpu": 1, "cpu": "250m", "memory": "2Gi"},
    env={"TRACKING_URI": os.environ.get("NO_SUCH_VARIABLE"), "HF_HUB_OFFLINE": "1", "SAFEPOINT_NPROC_PER_NODE": "1"},
    output_dir=f"pvc://{CLAIM}/adapters/run",
    periodic_checkpoint_config=PeriodicCheckpointConfig(save_strategy="steps", save_steps=4, save_total_limit=3),
    enable_jit_checkpoint=True,
    enable_progression_tracking=True,
)
name = client.train(trainer=trainer, runtime=runtime, options=[Name("adapters")])

# %%
client.wait_for_job_status(name, {"Running"}, timeout=200)
for line in client.get_job_logs(name, follow=True):
    if "saved step" in line:
        break
suspended = client.suspend_job(name)
print("suspended at", suspended.safe_step)
client.resume_job(name)

# %%
for line in client.get_job_logs(name, follow=True):
    print(line)

# %%
print("status", client.get_job(name=name).status)

from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained(SHARED / "models" / "tiny")
print("adapter", type(PeftModel.from_pretrained(base, SHARED / "adapters" / "run" / "final")).__name__)
client.delete_job(name=name)
