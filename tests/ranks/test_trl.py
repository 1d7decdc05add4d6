"""TRL's own scripts, unchanged, under `holdfast run`: interrupted, resumed, and the model of an uninterrupted run."""

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from holdfast.checkpoint.catalog import list_checkpoints
from holdfast.checkpoint.verify import verify
from tests.support.jobs import holdfast, no_orphans, read_events

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def ingredients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with a byte-level tokenizer, and small data sets of every kind, all made here."""
    folder = tmp_path_factory.mktemp("trl")
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
        hidden_size=32,
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
        "prompts": [{"prompt": text[:16]} for text in texts[:24]],
    }
    for kind, items in rows.items():
        (folder / kind).mkdir()
        (folder / kind / "train.jsonl").write_text("\n".join(map(json.dumps, items)))
    (folder / "rewards.py").write_text(
        "def vowels(completions, **_):\n    return [sum(map(text.count, 'aeiou')) / 8 for text in completions]\n"
    )
    return folder


@dataclass(frozen=True)
class Script:
    """One of TRL's.

    Args:
        data: the kind of rows that it reads.
        settings: beside those of all.
        at: steps done when it is interrupted.
    """

    data: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    at: int = 3


_ONLINE = {"num_generations": 2, "max_completion_length": 8, "reward_funcs": "rewards.vowels", "num_train_epochs": 1}
SCRIPTS = {
    "sft": Script("text", {"max_length": 64}),
    "dpo": Script("preferences", {"max_length": 64}),
    "reward": Script("preferences", {"max_length": 64}),
    "kto": Script("judged", {"max_length": 64}),
    "grpo": Script("prompts", _ONLINE),
    "rloo": Script("prompts", _ONLINE),
}


def program(name: str, ingredients: Path, output: Path) -> list[str]:
    script = SCRIPTS[name]
    settings = {
        "model_name_or_path": ingredients / "model",
        "dataset_name": ingredients / script.data,
        "output_dir": output,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "dtype": "float32",
        **script.settings,
    }
    arguments = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    return [f"trl.scripts.{name}", *arguments]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name != "sft" else []) for name in SCRIPTS]
)
def test_a_script_survives_an_interruption(name: str, ingredients: Path, tmp_path: Path) -> None:
    """SIGTERM to one rank: one checkpoint, 75, and the resumed run's model equals the uninterrupted run's."""
    variables = {
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ingredients),
    }
    two = ("--nproc-per-node", "2", "-m")
    reference = tmp_path / "reference"
    job = holdfast(reference, *two, program=program(name, ingredients, reference), **variables)
    with no_orphans(job):
        assert job.wait(150) == 0, job.text
    output = tmp_path / "run"
    job = holdfast(output, *two, program=program(name, ingredients, output), **variables)
    with no_orphans(job):
        job.wait_for_event("attempt_started")
        job.wait_for_step(SCRIPTS[name].at)
        os.kill(job.rank_pids()[1], signal.SIGTERM)
        assert job.wait(60) == 75, job.text
    assert not (output / "model.safetensors").exists(), "a half-trained model was saved as the final one"
    assert verify(list_checkpoints(output)[0]).is_valid
    job = holdfast(output, *two, program=program(name, ingredients, output), **variables)
    with no_orphans(job):
        assert job.wait(150) == 0, job.text
    assert read_events(output, "resumed")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (output, reference))
    assert all((ours[key] == theirs[key]).all() for key in theirs)
    before = load_file(ingredients / "model" / "model.safetensors")
    assert any((before[key] != theirs[key]).any() for key in before if key in theirs), "nothing was trained"
