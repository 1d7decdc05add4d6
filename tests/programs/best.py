"""An ordinary Trainer script that ends with its best model, whose checkpoint something changes meanwhile."""

import argparse
import shutil
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

from safepoint.checkpoint.format.manifest import MANIFEST_NAME


class Change(TrainerCallback):
    """After the last evaluation: the first one is the best, because the greatest loss counts as the best."""

    def __init__(self, what: str) -> None:
        self._what = what

    def on_evaluate(self, args, state, control, **kwargs):
        best = Path(args.output_dir, "checkpoint-1")
        if state.global_step < state.max_steps or not state.is_world_process_zero:
            return
        while not (best / MANIFEST_NAME).exists():
            time.sleep(0.05)
        if self._what == "bit":
            with (best / "model.safetensors").open("r+b") as file:
                file.seek(-1, 2)
                last = file.read(1)[0]
                file.seek(-1, 2)
                file.write(bytes([last ^ 1]))
        elif self._what == "manifest":
            (best / MANIFEST_NAME).unlink()
        elif self._what == "folder":
            shutil.rmtree(best)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--change", default="nothing")
    options = parser.parse_args()
    args = TrainingArguments(
        output_dir=options.out,
        max_steps=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    tokens = torch.arange(8).repeat(16, 1)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(
        Qwen2ForCausalLM(config), args, train_dataset=data, eval_dataset=data, callbacks=[Change(options.change)]
    )
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model(str(Path(options.out, "final")))


if __name__ == "__main__":
    main()
