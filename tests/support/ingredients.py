"""Makes a tiny language model, its tokenizer, and small data sets for each of TRL's trainers."""

import json
from pathlib import Path

_REWARDS = """
import os
import time
from pathlib import Path

import torch
from transformers import GenerationMixin, StoppingCriteria

plain, number = GenerationMixin.generate, 0


class Slow(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        time.sleep(float(os.environ.get("TOKEN_S", "0")))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def generate(self, *args, **kwargs):
    global number
    number += 1
    with Path(os.environ["MARKS"], "marks-" + os.environ["RANK"]).open("a") as file:
        file.write(f"generation {number}\\n")
    return plain(self, *args, stopping_criteria=[Slow()], **kwargs)


GenerationMixin.generate = generate


def vowels(completions, **_):
    return [sum(map(text.count, "aeiou")) / 8 for text in completions]
"""
"""Importing it makes every generation leave a mark and take as long as TOKEN_S says."""


def make_ingredients(folder: Path) -> None:
    """Write `model`, a folder for each kind of data set, and `rewards.py`, into `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet)
    texts = [f"line {number}: {Path(__file__).read_text()[number * 20 : number * 20 + 60]}" for number in range(96)]
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder / "model")
    config = Qwen2Config(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.1,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    rows = {
        "text": [{"text": text} for text in texts],
        "preferences": [
            {"prompt": text[:20], "chosen": text[20:50], "rejected": text[30:60][::-1]} for text in texts
        ],
        "judged": [
            {"prompt": text[:20], "completion": text[20:50], "label": number % 3 > 0}
            for number, text in enumerate(texts)
        ],
        "prompts": [{"prompt": text[:16]} for text in texts[:32]],
    }
    for kind, items in rows.items():
        (folder / kind).mkdir()
        (folder / kind / "train.jsonl").write_text("\n".join(map(json.dumps, items)))
    (folder / "rewards.py").write_text(_REWARDS)
