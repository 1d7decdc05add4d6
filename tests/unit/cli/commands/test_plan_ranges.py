"""Inputs of `safepoint plan` that make its formulas meaningless: an error, or a warning in text and in JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import safepoint

INTERVAL = "interval --mtbf 4h --stall 2s"
SIMULATE = "simulate --ranks 8,1024 --days 3 --trials 2 --policy safepoint"


def _warnings(words: str) -> list[str]:
    """The warnings of the answer, which are the same in text and JSON."""
    document: dict[str, Any] = safepoint("plan", *words.split(), "--json").document
    outcome = safepoint("plan", *words.split())
    assert outcome.code == 0, outcome.stderr
    found = [line.split(maxsplit=1)[1] for line in outcome.stdout.splitlines() if line.startswith("warning ")]
    assert found == document["warnings"]
    notes = [line.split(maxsplit=1)[1] for line in outcome.stdout.splitlines() if line.startswith("note ")]
    assert notes == document["notes"]
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"{INTERVAL} --restart 10000h", "--restart (416 d 16 h) is longer than --mtbf (4 h 00 m)"),
        ("interval --mtbf 10m --stall 2s --durable 3h", "--durable (3 h 00 m) is longer than --mtbf"),
        ("interval --mtbf 1s --stall 2h", "--stall (2 h 00 m) is longer than --mtbf (1.00 s)"),
        (f"{INTERVAL} --announced 1 --notice-restart 90d", "--notice-restart (90 d 00 h) is longer"),
        (f"{INTERVAL} --durable 1m --copied 2m --ranks-only 0.5", "--copied 2m is longer than --durable 1m"),
        ("cost --restart 1000h", "--restart (41 d 16 h) is longer than the mean time between --interruptions"),
        ("cost --announced 0 --blocking 90d --stall 90d --durable 90d", "--blocking (90 d 00 h) is longer"),
        ("simulate --step 60d --days 30", "--step (60 d 00 h) is longer than --days (30 d 00 h)"),
        ("simulate --step 5s --days 0.00001", "--step (5.00 s) is longer than --days (0.86 s)"),
        ("storage --params 8B --hidden 3", "a layer has at least a width of 8"),
        ("storage --params 8B --hidden 1024", "the feed-forward part of each layer would have 77,854 rows"),
        ("storage --params 8B --layers 9 --hidden 8", "no model has more layers than the width of a layer"),
        ("storage --params 8B --layers 10000", "no model has more layers than the width of a layer"),
        ("storage --params 1B --hidden 131072 --layers 1", "is too little for"),
        ("storage --params 8B --vocabulary 1", "--vocabulary 1 is invalid"),
        ("storage --params 8B --grace 31d", "--grace must be a time from 1s to 30d"),
    ],
)
def test_what_cannot_be_computed_is_an_error(words: str, expected: str) -> None:
    outcome = safepoint("plan", *words.split())
    assert (outcome.code, outcome.stdout) == (2, "")
    assert expected in outcome.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("interval --mtbf 1h --stall 2h", "--stall (2 h 00 m) is longer than --mtbf (1 h 00 m): most saves"),
        ("interval --mtbf 1h --stall 2h", "Daly's formula is for a --stall of less than twice --mtbf"),
        ("interval --mtbf 1h --stall 10m", "Young's formula is for a --stall of less than a tenth of --mtbf"),
        ("interval --mtbf 1h --stall 2h", "only 5.25 % of the time is productive work"),
        (f"{INTERVAL} --restart 5h", "--restart (5 h 00 m) is longer than --mtbf (4 h 00 m): most restarts"),
        (f"{INTERVAL} --announced 0.5 --notice-restart 5h", "--notice-restart (5 h 00 m) is longer"),
        (f"{INTERVAL} --ranks-only 0.5 --ranks-restart 5h", "--ranks-restart (5 h 00 m) is longer"),
        (f"{INTERVAL} --durable 5h", "--durable (5 h 00 m) is longer than --mtbf"),
        (f"{INTERVAL} --ranks-only 0.5 --durable 5h --copied 5h", "--copied (5 h 00 m) is longer than --mtbf"),
        (f"{INTERVAL} --ranks-only 0.5 --snapshot-every 1h", "is not shorter than the best interval"),
        (f"{INTERVAL} --ranks-only 0.5 --snapshot-every 5h", "--snapshot-every (5 h 00 m) is longer than --mtbf"),
        (f"{INTERVAL} --snapshot-every 1s --snapshot-stall 2s", "is longer than --snapshot-every (1.00 s)"),
        ("cost --interval 100h", "--interval (4 d 04 h) is not shorter than --job (3 d 00 h)"),
        ("cost --interruptions 50/hour", "--blocking (10 m 00 s) is longer than the mean time between"),
        ("cost --interruptions 50/hour", "--notice-save (10 m 00 s) is longer than the mean time between"),
        ("cost --interruptions 50/hour", "--durable (10 m 00 s) is longer than the mean time between"),
        (f"{SIMULATE} --machine-failures 1/hour --step 50m", "from 1,024 ranks on, --step (50 m 00 s) is longer"),
        (f"{SIMULATE} --replace 5d", "--replace (5 d 00 h) is not shorter than --days (3 d 00 h)"),
        (f"{SIMULATE} --restart 5d", "--restart (5 d 00 h) is not shorter than --days (3 d 00 h)"),
        (f"{SIMULATE} --preemptions 1/day --waiting 5d", "--waiting (5 d 00 h) is not shorter than --days"),
        (f"{SIMULATE} --machine-rate 10k", "from 1,024 ranks on, a save is durable after"),
        (f"{SIMULATE} --policy hf-hourly --days 0.01", "hf-hourly saves every 1 h 00 m, and the job runs for 14 m"),
        ("storage --params 8B --hidden 2048", "is an unusual model: the feed-forward part of a layer has 17.7 times"),
        ("storage --params 8B --upload-speed 10k", "the upload of a checkpoint takes"),
        ("storage --params 8B --disk-speed 10k", "a save takes"),
        ("storage --params 8B --download-speed 10k", "the download of the model takes"),
        ("storage --params 8B --nodes 2 --network-speed 10k", "a resume takes"),
    ],
)
def test_a_figure_outside_of_the_range_of_its_formula_has_a_warning(words: str, expected: str) -> None:
    assert any(expected in text for text in _warnings(words))


@pytest.mark.parametrize("words", [INTERVAL, "cost --price 55", SIMULATE, "storage --params 8B"])
def test_usual_inputs_have_no_warning(words: str) -> None:
    assert _warnings(words) == []


def test_a_simulation_says_what_its_intervals_are_worth() -> None:
    notes = safepoint("plan", *SIMULATE.split(), "--json").document["notes"]
    assert any("up to --ranks 1024, fewer than 10 interruptions are expected in all trials" in one for one in notes)
    notes = safepoint("plan", *SIMULATE.split(), "--trials", "1", "--json").document["notes"]
    assert any("one trial has no confidence interval" in one for one in notes)
    words = (*SIMULATE.split(), "--preemptions", "1/day", "--notice", "10s", "--json")
    notes = safepoint("plan", *words).document["notes"]
    assert any("safepoint: from 8 ranks on, a save on SIGTERM takes" in one for one in notes)


# ---- empty values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", ["", "  ", "\t"])
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("storage", "EMPTY"), "MODEL"),
        (("storage", "--params", "EMPTY"), "--params"),
        (("storage", "--params", "8B", "--for", "EMPTY"), "--for"),
        (("storage", "--params", "8B", "--on", "EMPTY"), "--on"),
        (("storage", "--params", "8B", "--dtype", "EMPTY"), "--dtype"),
        (("storage", "--params", "8B", "--svg", "EMPTY"), "--svg"),
        (("storage", "--params", "8B", "--lora-rank", "8", "--lora-targets", "EMPTY"), "--lora-targets"),
        (("storage", "--params", "8B", "--compare", "1x2", "EMPTY"), "--compare"),
        (("interval", "--mtbf", "EMPTY", "--stall", "2s"), "--mtbf"),
        (("interval", "--mtbf", "4h", "--stall", "2s", "--svg", "EMPTY"), "--svg"),
        (("cost", "--for", "EMPTY"), "--for"),
        (("cost", "--namespace", "EMPTY"), "--namespace"),
        (("simulate", "--policy", "EMPTY"), "--policy"),
        (("simulate", "--failures", "EMPTY"), "--failures"),
    ],
)
def test_an_empty_value_is_refused(
    words: tuple[str, ...], name: str, empty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty MODEL would be the current folder, and an empty variable of the shell no option."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 9})
    )
    monkeypatch.chdir(tmp_path)
    outcome = safepoint("plan", *(empty if word == "EMPTY" else word for word in words))
    assert (outcome.code, outcome.stdout) == (2, "")
    assert f"{name} is empty; nothing was computed" in outcome.stderr


# ---- values in files -----------------------------------------------------------------------------------------------


def test_a_limit_that_limits_nothing_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "arguments.json"
    path.write_text('{"output_dir": "out", "save_total_limit": -4}')
    (found,) = _warnings(f"storage --params 8B --for {path}")
    assert found.startswith("save_total_limit = -4 in ")
    assert _warnings(f"storage --params 8B --for {path} --save-total-limit 3") == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"hidden_size": 100, "num_attention_heads": 32}, "hidden_size = 100 and num_attention_heads = 32"),
        ({"hidden_size": 3}, "which contradict each other"),
        ({"torch_dtype": 16}, "the type '16' is not a type of weights"),
        ({"dtype": None, "torch_dtype": "int8"}, "the type 'int8' is not a type of weights"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
    ],
)
def test_fields_that_contradict_each_other_or_have_a_wrong_type(
    fields: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    base = {
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**base, **fields}))
    outcome = safepoint("plan", "storage", str(path))
    assert outcome.code == 2
    assert expected in outcome.stderr


# ---- text and JSON -------------------------------------------------------------------------------------------------


def test_the_text_of_a_simulation_has_the_inputs_of_its_failure_model() -> None:
    text = safepoint("plan", *SIMULATE.split()).stdout
    assert "each machine fails every 237 d 08 h, 13.09 % of the failures end ranks only" in text
    assert "10.09 % are maintenance, announced 10 m 00 s before" in text
    words = "--failures queue --waiting 20m --reclaims 1/week --rack-failures 1/year --machines-per-rack 4"
    text = safepoint("plan", *SIMULATE.split(), *words.split()).stdout
    assert (
        "a queue preempts the job every 42 h 00 m, announced 10 m 00 s before, and the job then waits for 20 m 00 s"
        in text
    )
    assert "each machine is reclaimed every 7 d 00 h, announced 2 m 00 s before" in text
    assert "each rack of 4 machines fails every 365 d 06 h" in text
    assert "IN QUEUE" in text


def test_the_text_of_a_simulation_has_the_columns_of_its_document() -> None:
    document = safepoint("plan", *SIMULATE.split(), "--json").document
    lines = safepoint("plan", *SIMULATE.split()).stdout.splitlines()
    rows = [line.split() for line in lines if line.startswith("safepoint ")]
    for row, shown in zip(document["results"], rows, strict=True):
        assert shown[1] == f"{100 * row['ettr']:.2f}"
        assert shown[5] == f"{100 * row['expected_ettr']:.2f}"
        assert shown[-1] == str(row["interruptions"])


def test_a_comparison_states_its_settings() -> None:
    words = "storage --params 8B --optimizer sgd --strategy fsdp --compare 6x1 2x3 --network-speed 2G"
    text = safepoint("plan", *words.split()).stdout
    assert "training       fsdp, sgd, bfloat16" in text
    assert "speeds         download 479 MB/s, network 2.0 GB/s" in text
