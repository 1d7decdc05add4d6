"""The Trainer script that `bench_training.py` and `bench_commit.py` run: a small language model, real steps.

Nothing in it knows of Holdfast, but for `--parts`: then calls of the training thread are timed (`save_parts`).
`--times` gets the time at which each step ended, from a clock that all processes of the machine share.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

BYTES_PER_PARAMETER = 12  # the parameter and two moments, fp32
NUM_LAYERS = 6
VOCABULARY = 512


class Blocks(torch.utils.data.Dataset):
    def __init__(self, count: int, num_tokens: int) -> None:
        self.tokens = torch.randint(0, VOCABULARY, (count, num_tokens), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Watch(TrainerCallback):
    """Stretches steps to a least length, and writes down when each ended and its save was handed over."""

    def __init__(self, times: Path | None, least_s: float) -> None:
        self._file = times.open("a", buffering=1) if times else None
        self._least_s = least_s
        self._began_s = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self._began_s = time.monotonic()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        time.sleep(max(0.0, self._began_s + self._least_s - time.monotonic()))

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self._file is not None:
            print(f"{state.global_step + 1} {time.monotonic():.6f}", file=self._file)


def model_of(state_mb: int) -> Qwen2ForCausalLM:
    """A Qwen2 whose state, with AdamW's, is about so large."""
    wanted = state_mb * 1_000_000 // BYTES_PER_PARAMETER
    # A layer has 2.5 widths² for attention and 9 for the network; embedding and head share their weights.
    width = max(64, round((wanted / (11.5 * NUM_LAYERS)) ** 0.5 / 64) * 64)
    torch.manual_seed(1)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=width // 32,
            num_key_value_heads=width // 64,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--mb", type=int, required=True, help="of model and optimizer")
    parser.add_argument("--tokens", type=int, default=128, help="in a block")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=0, help="forward and backward take at least as long")
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--save-steps", type=int, default=0)
    parser.add_argument("--times", type=Path)
    parser.add_argument("--parts", type=Path)
    options = parser.parse_args()
    if options.parts:
        import save_parts

        save_parts.watch(options.parts)
    args = TrainingArguments(
        output_dir=options.out,
        max_steps=options.max_steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=1e-4,
        save_strategy="steps" if options.save_steps else "no",
        save_steps=options.save_steps or 500,
        save_total_limit=1,
        logging_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_num_workers=0,
        seed=7,
    )
    # Two ranks write to one file each.
    rank = int(os.environ.get("RANK", "0"))
    trainer = Trainer(model_of(options.mb), args, train_dataset=Blocks(50_000, options.tokens))
    trainer.add_callback(Watch(options.times if rank == 0 else None, options.step_ms / 1000))
    trainer.train()


if __name__ == "__main__":
    main()
