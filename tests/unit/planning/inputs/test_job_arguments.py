"""Tests of safepoint.planning.inputs.job_arguments."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safepoint.estimates.sizes import OPTIMIZERS, Strategy
from safepoint.planning.inputs import JobArguments, read_job_arguments


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("--lr 1e-4 data.csv", {}),
        ("--model_name_or_path /models/a --lr 1", {"model": "/models/a"}),
        ("--model-name-or-path=/models/a", {"model": "/models/a"}),
        ("--model_name_or_path a --model_name_or_path b", {"model": "b"}),
        ("--model_name_or_path", {}),
        ("--save_total_limit 3", {"keep": 3}),
        ("--save_total_limit 0", {}),
        ("--save_total_limit three", {}),
        ("--save_total_limit ٣", {}),
        ("--optim adamw_bnb_8bit", {"optimizer": OPTIMIZERS["adamw-8bit"]}),
        ("--optim lomo", {"doubt": "the states of the optimizer 'lomo' are not known"}),
        ("--bf16", {"is_mixed": True}),
        ("--bf16 True --torch_dtype float16", {"is_mixed": True, "dtype": "float16"}),
        ("--bf16 false --dtype bfloat16", {"dtype": "bfloat16"}),
        ("--use_peft", {"lora_rank": 16}),
        ("--use_peft --lora_r 8 --lora_target_modules q_proj v_proj", {"lora_rank": 8, "lora_targets": 2}),
        ("--use_peft False --lora_r 8", {}),
        ("--use_peft --lora_modules_to_save lm_head", {}),
        ("--fsdp full_shard auto_wrap", {"strategy": Strategy.FSDP}),
        ("--fsdp True", {"strategy": Strategy.FSDP}),
        ("--fsdp False", {}),
        ("--fsdp", {}),
        ("--deepspeed none.json", {}),
        ("--config a.yaml", {"doubt": "--config names a file with further arguments"}),
        ("--reward_model_path b", {"doubt": "--reward_model_path names another model"}),
    ],
)
def test_what_arguments_say(text: str, expected: dict[str, Any]) -> None:
    if expected.get("lora_targets") == 2:
        expected["lora_targets"] = ("q_proj", "v_proj")
    assert replace(read_job_arguments(text.split()), notes=()) == JobArguments(**expected)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("--save_total_limit 0", "--save_total_limit 0 is no limit"),
        ("--save_total_limit -4", "--save_total_limit -4 is no limit"),
        ("--save_total_limit 2.5", "--save_total_limit 2.5 is not a whole number, and not used"),
        ("--save_total_limit abc", "--save_total_limit abc is not a whole number, and not used"),
        ("--save_total_limit", "--save_total_limit is not a whole number, and not used"),
        ("--save_total_limit 1000000", "--save_total_limit 1000000 is not used: a plan has at most 999,999 check"),
        (f"--save_total_limit {'9' * 5000}", f"--save_total_limit {'9' * 81} is not used: a plan has at most"),
        (f"--use_peft --lora_r {'9' * 5000}", f"--lora_r {'9' * 91} is not a valid rank of an adapter"),
        ("--use_peft --lora_r many", "--lora_r many is not a valid rank of an adapter"),
        ("--optim lomo", "--optim lomo: the states of this optimizer are not known"),
        ("--use_peft --lora_modules_to_save lm_head", "--lora_modules_to_save lm_head: PEFT also saves"),
        ("--deepspeed none.json", "--deepspeed none.json: this machine cannot read this file"),
    ],
)
def test_an_argument_that_is_not_used_is_noted(text: str, note: str) -> None:
    (found,) = read_job_arguments(text.split()).notes
    assert found.startswith(note)


def test_arguments_that_are_used_have_no_note() -> None:
    words = "--save_total_limit 3 --use_peft --lora_r 8 --optim adamw_torch --fsdp full_shard"
    assert read_job_arguments(words.split()).notes == ()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_configuration_of_deepspeed_in_the_folder_that_is_sent(stage: int, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    found = read_job_arguments(["--deepspeed", "ds.json"], code=tmp_path)
    assert found.strategy == Strategy(f"zero{stage}")


def test_a_damaged_configuration_of_deepspeed_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("[")
    assert read_job_arguments(["--deepspeed", "ds.json"], code=tmp_path).strategy is None
