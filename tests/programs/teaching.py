"""Self-distillation as in TRL's documentation: SDFTTrainer, whose teacher follows the trained model."""

import argparse
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl.experimental.sdft import SDFTConfig, SDFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--model", required=True)
parser.add_argument("--lora", action="store_true")
options = parser.parse_args()

texts = [f"line {number}: of the numbers" for number in range(24)]
rows = [{"prompt": text, "privileged_context": text[::-1]} for text in texts]
config = SDFTConfig(
    output_dir=options.out,
    max_steps=8,
    per_device_train_batch_size=2,
    num_generations=2,
    max_completion_length=4,
    max_prompt_length=64,
    teacher_model_kind="ema",
    teacher_update_rate=0.3,
    teacher_sync_steps=1,
    learning_rate=1e-2,
    logging_steps=1,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    save_strategy="no",
    seed=5,
)
trainer = SDFTTrainer(
    model=options.model,
    args=config,
    train_dataset=Dataset.from_list(rows),
    peft_config=LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"]) if options.lora else None,
)


class Slow(TrainerCallback):
    """Leaves time for a signal between two steps."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.3)


trainer.add_callback(Slow())
trainer.train()
if trainer.is_world_process_zero():
    trainer.save_model(str(Path(options.out, "final")))
