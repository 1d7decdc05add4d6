"""TRL's own SFT script, unchanged, under `holdfast run`."""

import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from holdfast.checkpoint.catalog import list_checkpoints
from holdfast.checkpoint.verify import verify
from tests.support.jobs import holdfast, no_orphans, read_events

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def ingredients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with a byte-level tokenizer, and a small conversational data set, all made here."""
    folder = tmp_path_factory.mktemp("sft")
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
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder


def program(ingredients: Path, output: Path) -> list[str]:
    settings = {
        "model_name_or_path": ingredients / "model",
        "dataset_name": ingredients / "data",
        "output_dir": output,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "max_length": 64,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "dtype": "float32",
    }
    arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return ["trl.scripts.sft", *arguments]


def test_sft_script_survives_an_interruption(ingredients: Path, tmp_path: Path) -> None:
    """SIGTERM to one rank: one checkpoint, 75, and the resumed run's model equals the uninterrupted run's."""
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "home")}
    reference = tmp_path / "reference"
    job = holdfast(reference, "--nproc-per-node", "2", "-m", program=program(ingredients, reference), **cache)
    with no_orphans(job):
        assert job.wait(150) == 0, job.text
    output = tmp_path / "run"
    job = holdfast(output, "--nproc-per-node", "2", "-m", program=program(ingredients, output), **cache)
    with no_orphans(job):
        job.wait_for_event("attempt_started")
        job.wait_for_step(3)
        os.kill(job.rank_pids()[1], signal.SIGTERM)
        assert job.wait(60) == 75, job.text
    assert not (output / "model.safetensors").exists(), "a half-trained model was saved as the final one"
    assert verify(list_checkpoints(output)[0]).is_valid
    job = holdfast(output, "--nproc-per-node", "2", "-m", program=program(ingredients, output), **cache)
    with no_orphans(job):
        assert job.wait(150) == 0, job.text
    assert read_events(output, "resumed")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (output, reference))
    assert all((ours[name] == theirs[name]).all() for name in theirs)
