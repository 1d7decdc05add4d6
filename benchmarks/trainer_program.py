"""The Trainer script of the benchmarks of training, commits, strategies and overhead: a small model, real steps.

Nothing in it knows of Safepoint, but for `--parts`: then calls of the training thread are timed (`save_parts`).
`--times` gets the time at which each step ended, from a clock that all processes of the machine share; with
`--stream` step 0 is the moment when training began. With `--turns`, it trains only while it has its turn (`Turns`).
"""

import argparse
import hashlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.programs.strategies import SHARDED, arguments_for

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


class Stream(torch.utils.data.IterableDataset):
    """A stream of blocks, each of which takes some milliseconds of work; it knows its position."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._work = bytes(4_000_000)
        self._place = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self._place < len(self._blocks):
            hashlib.sha256(self._work)
            self._place += 1
            yield self._blocks[self._place - 1]
        self._place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = state["place"]


class Watch(TrainerCallback):
    """Makes steps take a least time, and records when each ended and when its save was handed over."""

    def __init__(self, times: Path | None, least_s: float, *, tells_beginning: bool) -> None:
        self._file = times.open("a", buffering=1) if times else None
        self._least_s = least_s
        self._began_s = 0.0
        self._tells_beginning = tells_beginning

    def on_train_begin(self, args, state, control, **kwargs):
        if self._file is not None and self._tells_beginning:
            print(f"0 {time.monotonic():.6f}", file=self._file)

    def on_step_begin(self, args, state, control, **kwargs):
        self._began_s = time.monotonic()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        time.sleep(max(0.0, self._began_s + self._least_s - time.monotonic()))

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self._file is not None:
            print(f"{state.global_step + 1} {time.monotonic():.6f}", file=self._file)


class Turns(TrainerCallback):
    """Trains a block of steps for each turn that a benchmark grants, and reports how long the block took.

    A block is measured from the beginning of its first step to the beginning of the step that follows it.

    Args:
        path: the socket of the benchmark. Each byte from it is a turn; a line with seconds is the answer.
        name: with which this program introduces itself.
        block: the number of steps in a block.
    """

    def __init__(self, path: Path, name: str, block: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._socket.sendall(f"{name}\n".encode())
        self._block = block
        self._began_s = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % self._block:
            return
        if state.global_step:
            self._socket.sendall(f"{time.perf_counter() - self._began_s}\n".encode())
        if not self._socket.recv(1):  # the benchmark has ended
            control.should_training_stop = True
        self._began_s = time.perf_counter()


def model_of(state_mb: int) -> Qwen2ForCausalLM:
    """A Qwen2 whose state, with AdamW's, has about this size."""
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
    parser.add_argument("--strategy", default="", choices=("", *SHARDED))
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--turns", nargs=2, metavar=("SOCKET", "NAME"))
    parser.add_argument("--block", type=int, default=20, help="steps in a turn")
    parser.add_argument("--resume", action="store_true", help="the Trainer's own")
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
        disable_tqdm=True,
        **arguments_for(options.strategy, "Qwen2DecoderLayer"),
        dataloader_num_workers=0,
        seed=7,
    )
    # Two ranks write to one file each.
    rank = int(os.environ.get("RANK", "0"))
    model: Any = model_of(options.mb)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    blocks = Blocks(50_000, options.tokens)
    trainer = Trainer(model, args, train_dataset=Stream(blocks) if options.stream else blocks)
    trainer.accelerator.dataloader_config.use_stateful_dataloader = options.stream
    times = options.times if rank == 0 else None
    trainer.add_callback(Watch(times, options.step_ms / 1000, tells_beginning=options.stream))
    if options.turns:
        trainer.add_callback(Turns(Path(options.turns[0]), options.turns[1], options.block))
    trainer.train(resume_from_checkpoint=options.resume or None)


if __name__ == "__main__":
    main()
