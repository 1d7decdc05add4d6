"""A function of a reader of Red Hat's documentation, which does not show one."""


def train_fn():
    """A plain Trainer, whose arguments say nothing about checkpoints."""
    import os

    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    rows = torch.randint(0, 250, (1280, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(
        output_dir=os.environ["OUTPUT_DIR"],
        num_train_epochs=1,
        per_device_train_batch_size=2,
        bf16=True,
        report_to="none",
    )
    model = AutoModelForCausalLM.from_pretrained(os.environ["MODEL_LOCAL_PATH"])
    Trainer(model, args, train_dataset=data).train()
