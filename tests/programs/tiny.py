"""An ordinary Trainer script, small enough for tests: nothing in it knows of Safepoint.

The model is a tiny Qwen2 with dropout on random token blocks; --step-ms stretches a micro-batch.
"""

import argparse
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from strategies import SHARDED, arguments_for, save_final, whole_state
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Blocks(torch.utils.data.Dataset):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 64, (count, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Counted(torch.utils.data.Dataset):
    """Counts what is read of it, over all processes: a byte in a file for each sample."""

    def __init__(self, blocks: Blocks, file: Path) -> None:
        self.blocks, self.file = blocks, file

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        with self.file.open("ab") as file:
            file.write(b".")
        return self.blocks[index]


class Stream(torch.utils.data.IterableDataset):
    """The same blocks, over and over, and no index."""

    def __init__(self, counted: Counted) -> None:
        self.counted = counted

    def __iter__(self):
        for index in range(len(self.counted)):
            yield self.counted[index]


class SlowTrainer(Trainer):
    step_s = 0.0
    eval_s = 0.0
    slow_from = 0
    hurry = None
    marks = None
    tells_samples = False

    @functools.cached_property
    def sample_of(self) -> dict[tuple[int, ...], int]:
        """The index of each sample, by its tokens."""
        blocks = getattr(self.train_dataset, "blocks", self.train_dataset)
        return {tuple(row): index for index, row in enumerate(blocks.tokens.tolist())}

    def mark(self, what: str) -> None:
        """One line for every micro-batch, before it is computed: tests wait for it."""
        with Path(self.marks or self.args.output_dir, f"marks-{self.args.process_index}").open("a") as file:
            file.write(f"{what} {self.state.global_step}\n")

    def training_step(self, *args, **kwargs):
        self.mark("train")
        if self.tells_samples:
            path = Path(self.args.output_dir, f"samples-{self.args.process_index}")
            tokens = args[1]["input_ids"].tolist()
            with path.open("a") as file:
                file.write(
                    json.dumps([self.state.global_step, [self.sample_of[tuple(row)] for row in tokens]]) + "\n"
                )
        if self.state.global_step >= self.slow_from and not (self.hurry and self.hurry.exists()):
            time.sleep(self.step_s)
        return super().training_step(*args, **kwargs)

    def prediction_step(self, *args, **kwargs):
        self.mark("eval")
        time.sleep(self.eval_s)
        return super().prediction_step(*args, **kwargs)


class KeepingTrainer(SlowTrainer):
    """Adds to each checkpoint after the Trainer's own files, in both ways that are common."""

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
            (folder / "kept.json").write_text(json.dumps({"step": self.state.global_step}))
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            torch.save({"weight": next(self.model.parameters()).detach()}, folder / "kept.pt")
            Path(self.args.output_dir, "newest-step.txt").write_text(str(self.state.global_step))


class CrashOnce(TrainerCallback):
    def __init__(self, step: int, rank: int, flag: Path) -> None:
        self.step, self.rank, self.flag = step, rank, flag

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and args.process_index == self.rank and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), 9)


def count_forward(module: torch.nn.Module, *_: object) -> None:
    module.seen.add_(int(module.training))


class TellState(TrainerCallback):
    """Writes all that the ranks have split, when training begins and after a step."""

    def __init__(self, step: int, trainer: Trainer) -> None:
        self.step, self.trainer = step, trainer

    def tell(self, name: str) -> None:
        state = whole_state(self.trainer)
        if self.trainer.is_world_process_zero():
            torch.save(state, Path(self.trainer.args.output_dir, name))

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step:
            self.tell("state-begin.pt")

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.tell(f"state-{self.step}.pt")

    def on_train_end(self, args, state, control, **kwargs):
        self.tell("state-end.pt")


class AddFile(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        name = f"notes-{args.process_index}.txt"
        Path(args.output_dir, f"checkpoint-{state.global_step}", name).write_text("added in on_save")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--grad-accum", type=int, default=2)
    parser.add_argument("--save-strategy", default="no")
    parser.add_argument("--save-steps", type=float, default=500)
    parser.add_argument("--save-total-limit", type=int, default=None)
    parser.add_argument("--eval-strategy", default="no")
    parser.add_argument("--eval-steps", type=int, default=5)
    parser.add_argument("--eval-sets", nargs="*", default=[], help="names of several sets, in place of one")
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--logging-steps", type=int, default=3)
    parser.add_argument("--logging-strategy", default="steps")
    parser.add_argument("--step-ms", type=float, default=0)
    parser.add_argument("--slow-from", type=int, default=0, help="the first step that --step-ms stretches")
    parser.add_argument("--hurry", type=Path, help="--step-ms has no effect when there is this file")
    parser.add_argument("--marks", help="the folder for the marks, when it is not the output folder")
    parser.add_argument("--eval-ms", type=float, default=0)
    parser.add_argument("--load-s", type=float, default=0)
    parser.add_argument("--crash-step", type=int, default=0)
    parser.add_argument("--crash-rank", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--add-file", action="store_true")
    parser.add_argument("--patience", type=int, default=None)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--experts", type=int, default=0, help="saved one by one, and one tensor in memory")
    parser.add_argument("--raise-at-start", action="store_true")
    parser.add_argument("--jit", action="store_true", help="the Trainer's own JIT checkpoints")
    parser.add_argument("--strategy", default="", choices=("", *SHARDED))
    parser.add_argument("--data", default="map", choices=("map", "stream", "stateful", "stateful-stream"))
    parser.add_argument("--end", default="final", help="the folder for what there is at the end")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--tied", action="store_true", help="the embeddings are the output layer, too")
    parser.add_argument("--settings", type=json.loads, default={}, help="more TrainingArguments, as JSON")
    parser.add_argument("--keep-more", action="store_true", help="a _save_checkpoint of the script's own")
    parser.add_argument("--trainers", type=int, default=1, help="one after the other, each from what the last made")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--model-seed", type=int, default=1)
    parser.add_argument(
        "--frozen", action="store_true", help="train without the embeddings, beside a buffer that counts"
    )
    parser.add_argument(
        "--weight-decay", type=float, default=0.0, help="with the Trainer's own optimizer, in two groups"
    )
    parser.add_argument("--zero-variant", default="", choices=("", "sums", "offload"))
    parser.add_argument("--split-at-load", action="store_true", help="load the model as ZeRO-3 splits it")
    parser.add_argument("--masks", action="store_true", help="a collator that draws random numbers, as in run_mlm")
    parser.add_argument("--tell-samples", action="store_true")
    parser.add_argument("--tell-state", type=int, default=None, metavar="STEP")
    options = parser.parse_args()
    if options.raise_at_start:
        raise RuntimeError("this script fails on purpose")

    model = None
    for number in range(options.trainers):
        out = options.out if number == 0 else f"{options.out}-{number}"
        model = train(options, out, model)


def tiny_model(options: argparse.Namespace) -> torch.nn.Module:
    shape: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": options.hidden,
        "intermediate_size": 2 * options.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "attention_dropout": options.dropout,
        "max_position_embeddings": 16,
        "tie_word_embeddings": options.tied,
    }
    if not options.experts:
        return Qwen2ForCausalLM(Qwen2Config(**shape))
    experts = {"num_experts": options.experts, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))


def masking_collator() -> DataCollatorForLanguageModeling:
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    return DataCollatorForLanguageModeling(
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", mask_token="w2")
    )


def train(options: argparse.Namespace, out: str, model: torch.nn.Module | None) -> torch.nn.Module:
    """One Trainer, into `out`, of a new model or of one that there is."""
    args = TrainingArguments(
        output_dir=out,
        num_train_epochs=options.epochs,
        max_steps=options.max_steps,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        gradient_accumulation_steps=options.grad_accum,
        learning_rate=1e-2,
        save_strategy=options.save_strategy,
        save_steps=options.save_steps,
        save_total_limit=options.save_total_limit,
        eval_strategy=options.eval_strategy,
        eval_steps=options.eval_steps,
        load_best_model_at_end=options.best,
        logging_steps=options.logging_steps,
        logging_strategy=options.logging_strategy,
        logging_first_step=False,
        dataloader_num_workers=options.workers,
        report_to="none",
        weight_decay=options.weight_decay,
        **arguments_for(
            options.strategy, "Qwen2DecoderLayer", has_groups=options.weight_decay > 0, variant=options.zero_variant
        ),
        disable_tqdm=True,
        seed=7,
        **({"enable_jit_checkpoint": True} if options.jit else {}),
        **({"lr_scheduler_type": "cosine"} | options.settings),
    )
    Path(out).mkdir(parents=True, exist_ok=True)
    loading = Path(out, f"loading-{os.environ.get('RANK', '0')}")
    loading.with_name(f".{loading.name}").write_text(str(os.getpid()))
    loading.with_name(f".{loading.name}").rename(loading)
    time.sleep(options.load_s)
    torch.manual_seed(options.model_seed)
    model = model or tiny_model(options)
    if options.split_at_load:
        folder = Path(options.out, "base")
        if args.process_index == 0:
            model.save_pretrained(folder)
        torch.distributed.barrier()
        model = Qwen2ForCausalLM.from_pretrained(folder)
    if options.frozen:
        model.model.embed_tokens.weight.requires_grad_(False)
        model.register_buffer("seen", torch.zeros(1) + options.model_seed)
        model.register_forward_hook(count_forward)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=4, lora_alpha=8, lora_dropout=options.dropout, target_modules=["q_proj", "v_proj"])
        )
    data: torch.utils.data.Dataset = Blocks(options.samples, 3)
    if options.data != "map":
        data = Counted(data, Path(out, "reads"))
    if options.data.endswith("stream"):
        data = Stream(data)
    trainer = (KeepingTrainer if options.keep_more else SlowTrainer)(
        model,
        args,
        train_dataset=data,
        eval_dataset={name: Blocks(16, 4) for name in options.eval_sets} or Blocks(16, 4),
        data_collator=masking_collator() if options.masks else None,
    )
    trainer.accelerator.dataloader_config.use_stateful_dataloader = options.data.startswith("stateful")
    trainer.step_s, trainer.eval_s = options.step_ms / 1000, options.eval_ms / 1000
    trainer.slow_from, trainer.marks, trainer.hurry = options.slow_from, options.marks, options.hurry
    if options.crash_step:
        flag = Path(out, "crashed")
        trainer.add_callback(CrashOnce(options.crash_step, options.crash_rank, flag))
    if options.patience is not None:
        # No improvement is ever large enough: training stops after this many evaluations beyond the first.
        trainer.add_callback(EarlyStoppingCallback(options.patience, early_stopping_threshold=1e6))
    trainer.tells_samples = options.tell_samples
    if options.tell_state is not None:
        trainer.add_callback(TellState(options.tell_state, trainer))
    if options.add_file:
        trainer.add_callback(AddFile())
    trainer.train()
    # What follows must not happen after an interruption.
    final = Path(out, options.end)
    if options.strategy:
        save_final(trainer, options.strategy, final)
    elif trainer.is_world_process_zero():
        trainer.save_model(str(final))
        torch.save(trainer.optimizer.state_dict(), final / "optimizer.pt")
    if trainer.is_world_process_zero():
        (final / "log.json").write_text(json.dumps(trainer.state.log_history))
    return trainer.model


if __name__ == "__main__":
    main()
