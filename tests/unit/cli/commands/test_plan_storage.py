"""`safepoint plan storage`: what it prints, what it draws, and its messages."""

import json
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest

from safepoint.jobs.local import local_jobs
from tests.support.checkpoints import commit, prepared
from tests.support.commands import safepoint

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_LLAMA))
    return str(path)


def _plan(*arguments: str) -> Any:
    outcome = safepoint("plan", "storage", *arguments)
    assert outcome.code == 0, outcome.stderr
    return outcome


def test_the_terms_of_the_documents_and_ours(config: str) -> None:
    text = _plan(config, "--nodes", "2", "--gpus", "4").stdout
    assert "8.03B parameters" in text
    assert "DOCUMENTS  SAFEPOINT" in text
    for term in ("base cache", "checkpoint download", "N x checkpoint", "consolidation peak", "final model", "sum"):
        assert term in text
    assert "ask for" in text
    assert "grace period   30 s: a save" in text


def test_json_has_the_same_values(config: str) -> None:
    document = _plan(config, "--strategy", "fsdp", "--nodes", "2", "--json").document
    assert document["model"]["num_parameters"] == 8_030_261_248
    terms = document["first_pod"]["terms"]
    assert sum(term["bytes"] for term in terms) == document["first_pod"]["bytes"]
    assert sum(file["size_bytes"] for file in document["checkpoint"]["files"]) == document["checkpoint"]["size_bytes"]
    assert document["dtype"] == "bfloat16"


def test_a_number_of_parameters_in_place_of_a_model() -> None:
    outcome = _plan("--params", "70B", "--strategy", "zero3", "--lora-rank", "16", "--nodes", "2", "--gpus", "8")
    assert "LoRA of rank 16" in outcome.stdout
    assert "pass the config.json for exact sizes" in outcome.stdout


def test_two_layouts(config: str) -> None:
    outcome = _plan(config, "--compare", "6x1", "2x3")
    assert "6 x 1 GPUS" in outcome.stdout
    first, second = _plan(config, "--compare", "6x1", "2x3", "--json").document["layouts"]
    assert first["model_bytes"] == 3 * second["model_bytes"]


def test_a_picture(config: str, tmp_path: Path) -> None:
    target = tmp_path / "plan.svg"
    _plan(config, "--svg", str(target))
    root = ElementTree.fromstring(target.read_text())
    assert root.tag.endswith("svg")
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"documents", "Safepoint", "consolidation peak"} <= {*texts}


def test_settings_from_training_arguments(config: str, tmp_path: Path) -> None:
    path = tmp_path / "arguments.json"
    path.write_text(json.dumps({"output_dir": "out", "optim": "adafactor", "save_total_limit": 5}))
    document = _plan(config, "--for", str(path), "--json").document
    assert (document["optimizer"], document["keep"]) == ("adafactor", 5)
    document = _plan(config, "--for", str(path), "--save-total-limit", "1", "--json").document
    assert document["keep"] == 1  # what is typed is stronger


def test_types_and_quantized_models_that_are_not_trained(config: str) -> None:
    path = Path(config)
    for fields in ({"torch_dtype": "int8"}, {"dtype": "float8_e4m3fn"}):
        path.write_text(json.dumps({**_LLAMA, **fields}))
        outcome = safepoint("plan", "storage", config)
        assert (outcome.code, "is not a type of weights" in outcome.stderr) == (2, True)
        assert _plan(config, "--dtype", "bf16", "--json").document["dtype"] == "bfloat16"
    path.write_text(json.dumps({**_LLAMA, "quantization_config": {"load_in_4bit": True}}))
    outcome = safepoint("plan", "storage", config)
    assert (outcome.code, "the model is quantized" in outcome.stderr) == (2, True)
    assert "QLoRA of rank 8" in _plan(config, "--lora-rank", "8", "--quantized").stdout


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"optim": "no-such"}, ("--optimizer", "sgd")),
        ({"deepspeed": "gone.json"}, ("--strategy", "zero2")),
        ({"deepspeed": {}}, ("--strategy", "zero3")),
    ],
)
def test_an_option_wins_over_what_a_file_cannot_answer(
    field: dict[str, Any], words: tuple[str, str], config: str, tmp_path: Path
) -> None:
    path = tmp_path / "arguments.json"
    path.write_text(json.dumps({"output_dir": "out", **field}))
    assert safepoint("plan", "storage", config, "--for", str(path)).code == 2
    document = _plan(config, "--for", str(path), *words, "--json").document
    assert words[1] in {document["optimizer"], document["strategy"]}


def test_settings_from_a_job(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes and ranks, what it keeps, and the size of the checkpoint that it has written."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "train.py").touch()
    output = prepared(tmp_path / "out")
    commit(output, 10)
    real = sum(path.stat().st_size for path in (output.root / "checkpoint-10").rglob("*") if path.is_file())
    words = ("--name", "tiny", "--nnodes", "2", "--save-total-limit", "3", "--output-dir", str(output.root))
    with mock.patch.object(local_jobs, "start_supervisor"):
        submitted = safepoint("submit", *words, str(tmp_path / "train.py"))
    assert submitted.code == 0, submitted.stderr
    (tmp_path / "tiny").mkdir()  # a folder of the same name is no file with arguments
    monkeypatch.chdir(tmp_path)
    document = _plan(config, "--for", "tiny", "--json").document
    assert (document["nodes"], document["keep"]) == (2, 3)
    assert document["checkpoint"]["is_measured"]
    # The manifest does not list itself.
    assert 0 < real - document["checkpoint"]["size_bytes"] < 4096


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "there is no model"),
        (("nowhere",), 2, "the model 'nowhere' cannot be read"),
        (("--params", "-8B"), 2, "--params '-8B'"),
        (("--params", "8 GB"), 2, "--params '8 GB'"),
        (("--params", "8B", "--nodes", "0"), 2, "--nodes 0"),
        (("--params", "8B", "--gpus", "-1"), 2, "--gpus -1"),
        (("--params", "8B", "--layers", "0"), 2, "--layers 0"),
        (("--params", "8B", "--dtype", "int3"), 2, "--dtype 'int3'"),
        (("--params", "8B", "--optimizer", "adamx"), 2, "did you mean adamw"),
        (("--params", "8B", "--strategy", "zero4"), 2, "--strategy 'zero4'"),
        (("--params", "8B", "--strategy", "single", "--gpus", "2"), 2, "--strategy single is for one process"),
        (("--params", "8B", "--lora-rank", "0"), 2, "--lora-rank 0"),
        (("--params", "8B", "--lora-rank", "-4"), 2, "--lora-rank -4"),
        (("--params", "8B", "--quantized"), 2, "--quantized is for an adapter"),
        (("--params", "8B", "--lora-targets", "q_proj"), 2, "--lora-targets is for an adapter"),
        (("--params", "8B", "--lora-rank", "4", "--lora-targets", "x"), 2, "--lora-targets x"),
        (("--params", "8B", "--save-total-limit", "0"), 2, "--save-total-limit 0"),
        (("--params", "8B", "--store-keep", "0"), 2, "--store-keep 0"),
        (("--params", "8B", "--grace", "nan"), 2, "--grace nan"),
        (("--params", "8B", "--step-time", "-1"), 2, "--step-time -1"),
        (("--params", "8B", "--upload-speed", "fast"), 2, "--upload-speed 'fast'"),
        (("--params", "8B", "--upload-speed", "0"), 2, "--upload-speed 0"),
        (("--params", "8B", "--disk-speed", "9" * 400), 2, "--disk-speed"),
        (("--params", "8B", "--compare", "6x1", "2x4"), 2, "6 and 8 GPUs"),
        (("--params", "8B", "--compare", "6", "2x3"), 2, "--compare '6'"),
        (("--params", "8B", "--svg", "/nowhere/a.svg"), 13, "/nowhere/a.svg cannot be written"),
        (("--params", "8B", "--for", "gone.json"), 2, "--for gone.json"),
        (("--params", "8B", "--for", "no-such-job"), 10, "no-such-job"),
        (("--params", "8B", "--for", "/x" * 2500), 2, "--for /x/x"),
        (("x" * 5000,), 2, "the model 'xxx"),
        (("--params", "8B", "--snapshot-slots", "-1"), 2, "--snapshot-slots -1"),
        (("--params", "8B", "--compare", "6x1", "2x3", "--gpus", "2"), 2, "--gpus and --compare contradict"),
        (("meta-llama/Llama-3.1-8B",), 2, "hf download meta-llama/Llama-3.1-8B config.json"),
        (("--hidden", "64"), 2, "--hidden is for --params"),
        (("x", "--params", "8B"), 2, "contradict each other"),
    ],
)
def test_mistakes_name_the_option(arguments: tuple[str, ...], code: int, message: str) -> None:
    outcome = safepoint("plan", "storage", *arguments)
    assert outcome.code == code, outcome.stderr
    assert message in outcome.stderr
    assert outcome.stdout == ""
    assert len(outcome.stderr) < 1200
