"""Ordinary scripts that train adapters: on a quantized model, or with DPO beside a frozen copy of themselves."""

import argparse
import json
import time
from pathlib import Path

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from strategies import SHARDED, arguments_for, save_final
from tiny import Blocks
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Marks(TrainerCallback):
    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def on_step_begin(self, args, state, control, **kwargs):
        with Path(args.output_dir, f"marks-{args.process_index}").open("a") as file:
            file.write(f"train {state.global_step}\n")
        time.sleep(self.step_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--ingredients", required=True, type=Path)
    parser.add_argument("--kind", choices=("qlora", "dpo"), required=True)
    parser.add_argument("--strategy", choices=("", *SHARDED), default="")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)  # adapters begin with random numbers
    common = {
        "output_dir": options.out,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 3,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **arguments_for(options.strategy, "Qwen2DecoderLayer"),
    }
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    callbacks = [Marks(options.step_ms / 1000)]
    if options.kind == "qlora":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_quant_storage=torch.float32,  # as all other weights: FSDP shards one type at a time
        )
        model = AutoModelForCausalLM.from_pretrained(
            options.ingredients / "model", quantization_config=quantization, dtype=torch.float32
        )
        model = prepare_model_for_kbit_training(model)
        model = get_peft_model(model, lora)
        args = TrainingArguments(**common, gradient_checkpointing=True)
        trainer = Trainer(model, args, train_dataset=Blocks(96, 3), callbacks=callbacks)
    else:
        from trl import DPOConfig, DPOTrainer

        model = AutoModelForCausalLM.from_pretrained(options.ingredients / "model", dtype=torch.float32)
        model = get_peft_model(model, lora)  # DPO makes a frozen copy of these adapters, and saves both
        args = DPOConfig(**common, bf16=False, gradient_checkpointing=False, max_length=64)
        trainer = DPOTrainer(
            model,
            args=args,
            train_dataset=load_dataset(str(options.ingredients / "preferences"), split="train"),
            processing_class=AutoTokenizer.from_pretrained(options.ingredients / "model"),
            callbacks=callbacks,
        )
    trainer.train()
    final = Path(options.out, "final")
    if options.strategy:
        save_final(trainer, options.strategy, final)
    elif trainer.is_world_process_zero():
        trainer.save_model(str(final))
        torch.save(trainer.optimizer.state_dict(), final / "optimizer.pt")
    if trainer.is_world_process_zero():
        (final / "log.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
