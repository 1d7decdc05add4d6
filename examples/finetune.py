"""Train a small language model on the source code of the Python standard library.

An ordinary transformers Trainer script: a byte-level BPE tokenizer and a Qwen2-style causal model, both from
scratch, on text that every machine with Python has. Nothing is downloaded. It runs alone
(`python examples/finetune.py`) and on several ranks (`torchrun --nproc-per-node 2 examples/finetune.py`).
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments
from transformers.utils.logging import disable_progress_bar

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
END_OF_FILE = "<|endoftext|>"
HEAD_DIM = 64


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Token blocks of one length, shape (num_blocks, block_size); each is its own label."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def read_sources(max_bytes: int) -> Iterator[str]:
    """Yield standard library modules in path order, about `max_bytes` of them in all."""
    root = Path(sysconfig.get_path("stdlib"))
    num_bytes = 0
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            continue
        source = path.read_bytes()[: max_bytes - num_bytes]
        num_bytes += len(source)
        yield source.decode("utf-8", errors="replace")
        if num_bytes >= max_bytes:
            return


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE. The same texts give the same tokenizer, so every rank trains its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_FILE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_FILE, pad_token=END_OF_FILE)


def pack(texts: list[str], tokenizer: PreTrainedTokenizerFast, block_size: int) -> torch.Tensor:
    """Join all texts, each closed by the end-of-file token, and cut them into whole blocks."""
    encoded: list[list[int]] = tokenizer(texts, verbose=False)["input_ids"]
    tokens = torch.tensor([token for ids in encoded for token in [*ids, tokenizer.eos_token_id]])
    num_blocks = len(tokens) // block_size
    return tokens[: num_blocks * block_size].view(num_blocks, block_size)


def build_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    num_heads = args.hidden_size // HEAD_DIM
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=args.block_size,
        attention_dropout=args.dropout,
        tie_word_embeddings=True,
        use_cache=False,
        eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_FILE),
    )
    return Qwen2ForCausalLM(config)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small language model on the source code of the Python standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output-dir", default="finetune-output", help="checkpoints, and the model in final/")
    parser.add_argument("--max-bytes", type=int, default=1_000_000, help="bytes of source text to learn from")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens in the vocabulary, at least 257")
    parser.add_argument("--block-size", type=int, default=128, help="tokens in one sample")
    parser.add_argument("--eval-blocks", type=int, default=32, help="samples held out for evaluation")
    parser.add_argument("--hidden-size", type=int, default=320, help=f"model width, a multiple of {HEAD_DIM}")
    parser.add_argument("--layers", type=int, default=5, help="transformer layers")
    parser.add_argument("--dropout", type=float, default=0.1, help="attention dropout")
    parser.add_argument("--epochs", type=float, default=3.0, help="passes over the data")
    parser.add_argument("--max-steps", type=int, default=-1, help="optimizer steps; overrides --epochs")
    parser.add_argument("--batch-size", type=int, default=4, help="samples in one forward pass of one rank")
    parser.add_argument("--grad-accum", type=int, default=2, help="forward passes in one optimizer step")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate; falls along a cosine")
    parser.add_argument("--save-steps", type=int, default=100, help="optimizer steps between checkpoints")
    parser.add_argument("--eval-steps", type=int, default=100, help="optimizer steps between evaluations")
    parser.add_argument("--logging-steps", type=int, default=10, help="optimizer steps between logged losses")
    parser.add_argument("--seed", type=int, default=42, help="of the weights, the data order and the dropout")
    parser.add_argument("--cpu", action="store_true", help="leave accelerators alone")
    args = parser.parse_args()
    if args.hidden_size < HEAD_DIM or args.hidden_size % HEAD_DIM:
        parser.error(f"--hidden-size is {args.hidden_size}; it must be a multiple of {HEAD_DIM}")
    return args


def main() -> None:
    args = parse_args()
    disable_progress_bar()
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        num_train_epochs=args.epochs,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.grad_accum,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        weight_decay=0.01,
        save_strategy="steps",
        save_steps=args.save_steps,
        eval_strategy="steps",
        eval_steps=args.eval_steps,
        logging_steps=args.logging_steps,
        seed=args.seed,
        use_cpu=args.cpu,
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
    )
    texts = list(read_sources(args.max_bytes))
    tokenizer = train_tokenizer(texts, args.vocab_size)
    blocks = pack(texts, tokenizer, args.block_size)
    if len(blocks) <= args.eval_blocks:
        raise SystemExit(f"{len(blocks)} blocks of text leave nothing to train on: raise --max-bytes")

    # Trainer seeds itself only when it is built; the weights below are drawn before that.
    torch.manual_seed(args.seed)
    model = build_model(args, tokenizer)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=Blocks(blocks[: -args.eval_blocks]),
        eval_dataset=Blocks(blocks[-args.eval_blocks :]),
        processing_class=tokenizer,
    )
    if trainer.is_world_process_zero():
        num_blocks = len(blocks) - args.eval_blocks
        print(f"{model.num_parameters() / 1e6:.1f} M parameters, {num_blocks} training blocks", flush=True)

    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_state()
    trainer.save_model(str(Path(args.output_dir, "final")))
    if trainer.is_world_process_zero():
        print(f"evaluation loss {metrics['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
