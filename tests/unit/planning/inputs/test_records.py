"""Numbers and layouts as people write them, TrainingArguments as JSON, and what a checkpoint's files show."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from safepoint.errors import UsageError
from safepoint.estimates.sizes import OPTIMIZERS, Strategy, optimizer_named
from safepoint.planning.inputs import (
    find_optimizer,
    given_by_adapter,
    given_by_files,
    notes_on_adapter,
    parse_layout,
    parse_parameters,
    read_arguments,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("70B", 70_000_000_000),
        ("8.03b", 8_030_000_000),
        ("350M", 350_000_000),
        ("7e9", 7_000_000_000),
        ("8_030_261_248", 8_030_261_248),
        (" 100k ", 100_000),
        ("1T", 10**12),
    ],
)
def test_a_number_of_parameters(text: str, count: int) -> None:
    assert parse_parameters(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "B", "-8B", "8Gi", "8 billion", "0x10", "nan", "inf", "1e999", "8BB", "٨B", "9" * 5000, "1" + "0" * 30],
)
def test_what_is_no_number_is_a_message(text: str) -> None:
    with pytest.raises(UsageError, match="--params") as raised:
        parse_parameters(text)
    assert len(str(raised.value)) < 300


def test_a_layout() -> None:
    assert parse_layout("6x1") == (6, 1)
    assert parse_layout(" 2X3 ") == (2, 3)
    for text in ("6", "6x", "x1", "0x6", "6x0", "-2x3", "6x1x1", "99999999999x1", "2x3.5"):
        with pytest.raises(UsageError, match="--compare"):
            parse_layout(text)


def test_optimizers_by_all_their_names() -> None:
    assert find_optimizer("AdamW") is OPTIMIZERS["adamw"]
    assert find_optimizer("adamw_torch_fused") is OPTIMIZERS["adamw"]
    assert find_optimizer("paged_adamw_8bit") is OPTIMIZERS["adamw-8bit"]
    assert find_optimizer("adafactor") is OPTIMIZERS["adafactor"]
    with pytest.raises(UsageError, match="galore_adamw"):
        find_optimizer("galore_adamw")


def test_every_name_of_the_trainer_is_known_or_refused_on_purpose() -> None:
    """Those that are refused keep states of other sizes, or are no optimizer by themselves."""
    from transformers.training_args import OptimizerNames

    unknown = {str(name.value) for name in OptimizerNames if optimizer_named(name.value) is None}
    kinds = ("galore", "lomo", "grokadamw", "schedule_free", "apollo", "stable_adamw", "anyprecision", "ademamix")
    left = {name for name in unknown if not any(kind in name for kind in kinds)}
    assert left <= {
        "rmsprop_bnb",
        "rmsprop_bnb_8bit",
        "rmsprop_bnb_32bit",
        "adamw_torch_4bit",
        "adamw_torch_8bit",
    } | {name for name in unknown if name.startswith(("adamw_torch_npu", "flash_"))}, left


def _write(folder: Path, **settings: Any) -> Path:
    path = folder / "arguments.json"
    path.write_text(TrainingArguments(output_dir=str(folder / "out"), use_cpu=True, **settings).to_json_string())
    return path


def test_the_arguments_that_transformers_writes(tmp_path: Path) -> None:
    given = read_arguments(_write(tmp_path, save_total_limit=3, optim="adafactor"))
    assert (given.keep, given.optimizer, given.is_mixed) == (3, OPTIMIZERS["adafactor"], False)
    assert given.strategy is None
    assert read_arguments(_write(tmp_path)).keep is None
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 500}
    assert read_arguments(_write(tmp_path, save_total_limit=1, **best)).keep == 2  # the best, and the newest
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["Layer"]}
    for kind, strategy in (("SHARDED_STATE_DICT", Strategy.FSDP), ("FULL_STATE_DICT", Strategy.FSDP_FULL)):
        path = _write(tmp_path, fsdp=True, fsdp_config={**config, "state_dict_type": kind})
        assert read_arguments(path).strategy is strategy


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_in_the_arguments_or_in_a_file(stage: int, tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": stage}}
    (tmp_path / "zero.json").write_text(json.dumps(config))
    for deepspeed in (config, "zero.json", str(tmp_path / "zero.json")):
        path = tmp_path / "arguments.json"
        path.write_text(json.dumps({"output_dir": "out", "bf16": True, "deepspeed": deepspeed}))
        given = read_arguments(path)
        assert (given.strategy, given.is_mixed) == (Strategy(f"zero{stage}"), True)


def test_a_file_of_deepspeed_that_is_damaged(tmp_path: Path) -> None:
    """The hint is about this file: `--for` itself is right."""
    (tmp_path / "zero.json").write_text("{")
    path = tmp_path / "arguments.json"
    path.write_text('{"output_dir": "out", "deepspeed": "zero.json"}')
    with pytest.raises(UsageError, match=r"deepspeed .*zero\.json") as raised:
        read_arguments(path)
    assert raised.value.hint == "pass --strategy zero1, zero2 or zero3"
    assert read_arguments(path, known={"strategy"}).strategy is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "it is not TrainingArguments"),
        ("[]", "it is not a JSON object"),
        ("not JSON", "it is not JSON"),
        ('{"output_dir": "a", "output_dir": "b"}', "a name appears twice"),
        ('{"output_dir": "a", "optim": "no-such"}', "optim 'no-such'"),
        ('{"output_dir": "a", "save_only_model": true}', "save_only_model is true"),
        (
            '{"output_dir": "a", "deepspeed": "gone.json"}',
            "'gone.json'; this file does not exist in the folder of the arguments file",
        ),
        ('{"output_dir": "a", "deepspeed": {"zero_optimization": {"stage": 7}}}', "DeepSpeed without ZeRO"),
        ('{"output_dir": "a", "deepspeed": {"zero_optimization": []}}', "DeepSpeed without ZeRO"),
        ('{"output_dir": "a", "deepspeed": {"zero_optimization": {"stage": [3]}}}', "stage = [3]"),
        ('{"output_dir": "a", "deepspeed": {"zero_optimization": {"stage": {}}}}', "stage = {}"),
        ('{"output_dir": "a", "deepspeed": {"zero_optimization": {"stage": 3.0}}}', "stage = 3.0"),
        ('{"output_dir": "a", "deepspeed": {"zero_optimization": {"stage": true}}}', "stage = True"),
        ('{"output_dir": "a", "deepspeed": 3}', "deepspeed = 3"),
        (
            '{"output_dir": "a", "deepspeed": "' + "x" * 5000 + '"}',
            "this file does not exist in the folder of the arguments file",
        ),
        ('{"output_dir": "a", "save_total_limit": "3"}', "save_total_limit = '3'"),
        ('{"output_dir": "a", "optim": 7}', "optim = 7"),
        ('{"output_dir": "a", "bf16": "true"}', "bf16 = 'true'"),
        ('{"output_dir": "a", "fp16": 1}', "fp16 = 1"),
        ('{"output_dir": "a", "save_only_model": "true"}', "save_only_model = 'true'"),
        ('{"output_dir": "a", "save_total_limit": 1, "load_best_model_at_end": "yes"}', "load_best_model_at_end = "),
        ('{"output_dir": "a", "fsdp": 1.5}', "fsdp = 1.5"),
        ('{"output_dir": "a", "fsdp": true, "fsdp_config": {"state_dict_type": 1}}', "state_dict_type = 1"),
    ],
)
def test_other_files_are_a_message(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "arguments.json"
    path.write_text(content)
    with pytest.raises(UsageError) as raised:
        read_arguments(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ({"optim": "no-such"}, "optimizer"),
        ({"optim": 7}, "optimizer"),
        ({"deepspeed": "gone.json"}, "strategy"),
        ({"deepspeed": {}}, "strategy"),
        ({"save_total_limit": "3"}, "keep"),
        ({"bf16": "true"}, "is_mixed"),
    ],
)
def test_the_file_is_not_asked_for_what_an_option_answers(field: dict[str, Any], name: str, tmp_path: Path) -> None:
    path = tmp_path / "arguments.json"
    path.write_text(json.dumps({"output_dir": "a", **field}))
    with pytest.raises(UsageError):
        read_arguments(path)
    assert getattr(read_arguments(path, known={name}), name) is None


def test_a_long_path_is_cut_off_in_messages() -> None:
    with pytest.raises(UsageError) as raised:
        read_arguments(Path("/x" * 2500))
    assert len(str(raised.value)) < 400


def test_the_files_of_a_checkpoint_show_its_strategy() -> None:
    rng = {"rng_state_0.pth": 5, "rng_state_1.pth": 5}
    for files, strategy in (
        ({"model.safetensors": 10, "optimizer.pt": 20}, None),
        ({"pytorch_model_fsdp_0/__0_0.distcp": 10}, Strategy.FSDP),
        ({"pytorch_model_fsdp.bin": 10}, Strategy.FSDP_FULL),
        ({"global_step4/mp_rank_00_model_states.pt": 10}, Strategy.ZERO2),
        ({"global_step4/zero_pp_rank_0_mp_rank_00_model_states.pt": 10}, Strategy.ZERO3),
    ):
        given = given_by_files({**files, **rng}, source="checkpoint-4")
        assert (given.strategy, given.measured_bytes) == (strategy, sum(files.values()) + 10)


def test_an_adapter_has_its_rank_and_modules() -> None:
    record: dict[str, Any] = {"r": 8, "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "base"}
    assert given_by_adapter(record) == (8, ("q_proj", "v_proj"), "base")
    assert given_by_adapter({"r": 8, "target_modules": "all-linear", "base_model_name_or_path": 4}) == (
        *(8, ("all-linear",), None),
    )


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"r": "8"}, "r = '8'"),
        ({"r": 0}, "r = 0"),
        ({}, "r = None"),
        ({"r": 8, "peft_type": "IA3"}, "peft_type = 'IA3'"),
    ],
)
def test_an_adapter_that_cannot_be_planned_is_refused(record: dict[str, Any], message: str) -> None:
    """Without a rank, all weights would be planned."""
    with pytest.raises(UsageError, match=message):
        given_by_adapter(record)


def test_fields_of_an_adapter_that_are_not_used_are_noted() -> None:
    record: dict[str, Any] = {"r": 8, "modules_to_save": ["lm_head"], "use_dora": False, "rank_pattern": {}}
    (note,) = notes_on_adapter(record, "checkpoint-8")
    assert note.startswith("modules_to_save = ['lm_head'] in the adapter_config.json of checkpoint-8 is not used")


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"save_total_limit": -4}, "save_total_limit = -4"),
        ({"save_total_limit": 0}, "save_total_limit = 0"),
        ({"save_strategy": "no"}, "save_strategy is 'no'"),
        ({"fsdp": "hybrid_shard auto_wrap"}, "fsdp = 'hybrid_shard auto_wrap'"),
        ({"fsdp": ["shard_grad_op"]}, "fsdp = ['shard_grad_op']"),
        (
            {"deepspeed": {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Lamb"}}},
            "the DeepSpeed configuration in",
        ),
    ],
)
def test_a_value_that_changes_nothing_in_the_plan_is_noted(fields: dict[str, Any], note: str, tmp_path: Path) -> None:
    path = tmp_path / "arguments.json"
    path.write_text(json.dumps({"output_dir": "out", **fields}))
    (found,) = read_arguments(path).notes
    assert found.startswith(note)
    path.write_text(json.dumps({"output_dir": "out", "save_total_limit": 3, "fsdp": "full_shard auto_wrap"}))
    assert read_arguments(path).notes == ()


@pytest.mark.parametrize("value", ["3", 3.0, 2.5, True, [3]])
def test_a_limit_of_another_type_is_refused(value: object, tmp_path: Path) -> None:
    path = tmp_path / "arguments.json"
    path.write_text(json.dumps({"output_dir": "out", "save_total_limit": value}))
    with pytest.raises(UsageError, match="save_total_limit = "):
        read_arguments(path)


def test_the_configuration_of_fsdp_may_be_a_file(tmp_path: Path) -> None:
    """TrainingArguments also accept its path."""
    path = tmp_path / "arguments.json"
    path.write_text(json.dumps({"output_dir": "out", "fsdp": True, "fsdp_config": "fsdp.json"}))
    with pytest.raises(
        UsageError, match=r"fsdp_config 'fsdp\.json'; this file does not exist in the folder of the arguments file"
    ):
        read_arguments(path)
    (tmp_path / "fsdp.json").write_text('{"state_dict_type": "FULL_STATE_DICT"}')
    assert read_arguments(path).strategy is Strategy.FSDP_FULL
    (tmp_path / "fsdp.json").write_text('{"state_dict_type": "LOCAL_STATE_DICT"}')
    with pytest.raises(UsageError, match="the file that fsdp_config names has a state_dict_type"):
        read_arguments(path)
