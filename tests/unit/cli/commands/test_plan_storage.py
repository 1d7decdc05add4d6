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
    assert "grace period   30 s, of which a save can use 27 s" in text


def test_json_has_the_same_values(config: str) -> None:
    document = _plan(config, "--strategy", "fsdp", "--nodes", "2", "--json").document
    assert document["model"]["num_parameters"] == 8_030_261_248
    terms = document["first_pod"]["terms"]
    assert sum(term["bytes"] for term in terms) == document["first_pod"]["bytes"]
    assert sum(file["size_bytes"] for file in document["checkpoint"]["files"]) == document["checkpoint"]["size_bytes"]
    assert document["dtype"] == "bfloat16"


def test_the_answer_states_what_it_was_computed_with(config: str) -> None:
    words = (
        "--mixed-precision",
        "--lora-rank",
        "8",
        "--step-time",
        "2s",
        "--disk-speed",
        "1G",
        "--snapshot-slots",
        "2",
    )
    document = _plan(config, *words, "--json").document
    inputs = document["inputs"]
    assert (inputs["is_mixed"], inputs["lora_rank"], inputs["is_quantized"]) == (True, 8, False)
    assert (inputs["step_s"], inputs["disk_bytes_per_s"], inputs["snapshot_slots"]) == (2, 10**9, 2)
    text = _plan(config, *words).stdout
    assert (
        "speeds         upload 68.0 MB/s, download 479 MB/s, disk 1.0 GB/s, network 1.2 GB/s; a step takes 2.00 s"
        in text
    )


def test_a_cache_of_its_own_has_the_buffer_too(config: str) -> None:
    """With a shared claim, the downloaded model is on another volume."""
    document = _plan(config, "--json").document
    weights = document["first_pod"]["terms"][0]["bytes"]
    assert document["cache_bytes"] >= weights + (1 << 30)
    assert document["cache_bytes"] % (1 << 30) == 0


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
    assert {"documents", "Safepoint", "4  consolidation peak", "4: 96.4 GB"} <= {*texts}


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


def test_an_8bit_optimizer_keeps_embeddings_in_32_bits(config: str) -> None:
    document = _plan(config, "--optimizer", "adamw-8bit", "--json").document
    assert round(document["checkpoint"]["size_bytes"] / 1e9, 1) == 35.5


def test_a_save_to_a_shared_claim_is_not_faster_with_more_nodes(config: str) -> None:
    """All nodes write to the same disk."""
    needed = [
        _plan(config, "--strategy", "fsdp", "--nodes", nodes, "--json").document["grace"] for nodes in ("1", "100")
    ]
    assert needed[1]["folder"]["needed_s"] >= needed[0]["folder"]["needed_s"]
    assert needed[1]["store"]["needed_s"] < needed[0]["store"]["needed_s"]


def test_mixed_precision_moves_16_bits_between_pods(config: str) -> None:
    words = ("--strategy", "fsdp", "--mixed-precision", "--compare", "6x1", "2x3", "--json")
    layouts = _plan(config, *words).document["layouts"]
    assert [round(one["step_bytes"] / 1e9, 1) for one in layouts] == [40.2, 24.1]


def test_a_rank_that_is_wider_than_the_matrices_is_noted(config: str) -> None:
    text = _plan(config, "--lora-rank", "5000").stdout
    assert "LoRA of rank 5000" in text
    assert "--lora-rank 5000 is larger than the smallest side of the adapted matrices (1024)" in text
    assert "is larger than" not in _plan(config, "--lora-rank", "1024").stdout


@pytest.mark.parametrize("option", ["--upload-speed", "--download-speed", "--disk-speed", "--network-speed"])
def test_a_speed_without_its_unit_is_noted(option: str, config: str) -> None:
    assert f"{option} 68 is 68 bytes in a second: did you mean 68M?" in _plan(config, option, "68").stdout
    assert "did you mean" not in _plan(config, option, "68M").stdout


def test_times_have_units_as_in_the_other_plans(config: str) -> None:
    for words, grace_s in ((("--grace", "1m"), 60), (("--grace", "45"), 45), (("--grace", "1m30s"), 90)):
        assert _plan(config, *words, "--json").document["grace"]["grace_s"] == grace_s
    document = _plan(config, "--step-time", "2m", "--json").document
    assert document["grace"]["folder"]["needed_s"] > 120


@pytest.mark.parametrize(
    "words",
    [
        ("--grace", "60"),
        ("--step-time", "1s"),
        ("--store-keep", "3"),
        ("--upload-speed", "1G"),
        ("--disk-speed", "1G"),
    ],
)
def test_options_that_a_comparison_does_not_show_are_refused(words: tuple[str, str], config: str) -> None:
    outcome = safepoint("plan", "storage", config, "--compare", "6x1", "2x3", *words)
    assert outcome.code == 2
    assert f"{words[0]} is for the plan of one layout" in outcome.stderr
    _plan(config, "--compare", "6x1", "2x3", *words, "--json")  # its document has the plan of the first layout


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
        (("--params", "8B", "--grace", "soon"), 2, "--grace 'soon'"),
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
        (("--hidden", "64"), 2, "--hidden can be used only with --params"),
        (("x", "--params", "8B"), 2, "contradict each other"),
    ],
)
def test_mistakes_name_the_option(arguments: tuple[str, ...], code: int, message: str) -> None:
    outcome = safepoint("plan", "storage", *arguments)
    assert outcome.code == code, outcome.stderr
    assert message in outcome.stderr
    assert outcome.stdout == ""
    assert len(outcome.stderr) < 1200
