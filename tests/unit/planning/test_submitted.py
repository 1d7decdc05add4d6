"""Tests of safepoint.planning.submitted: the bounds hold, and what is not certain sets no limit."""

import json
from pathlib import Path
from typing import Any

import pytest

from safepoint.estimates.job_needs import JobNeeds, JobOutline
from safepoint.estimates.sizes import OPTIMIZERS, Strategy
from safepoint.planning.checkpoint_files import Training, checkpoint_bytes, files_of, weights_file_bytes
from safepoint.planning.model import adapter_of, read_model
from safepoint.planning.submitted import needs_of

_CONFIG = {
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
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_CONFIG))
    return str(path)


def _needs(model: str, *more: str, **job: Any) -> JobNeeds:
    outline = {"ranks_per_node": 1, "is_remote": True, "num_kept": 2, **job}
    found = needs_of(JobOutline(**outline), ["--model_name_or_path", model, *more])
    assert found is not None
    return found


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("rank", [0, 16])
def test_no_strategy_needs_more_than_the_bound(strategy: Strategy, rank: int, model: str) -> None:
    Path(model).write_text(json.dumps({**_CONFIG, "num_hidden_layers": 2, "tie_word_embeddings": True}))
    shape = read_model(Path(model))
    needs = _needs(model, *(("--use_peft", "--lora_r", str(rank)) if rank else ()), ranks_per_node=8)
    for optimizer in OPTIMIZERS.values():
        for dtype, is_mixed in (("float32", False), ("float32", True), ("bfloat16", True)):
            training = Training(
                tensors=shape.tensors,
                tied=shape.tied,
                dtype=dtype,
                adapter=adapter_of(shape, rank=rank, targets=()) if rank else (),
                strategy=strategy,
                optimizer=optimizer,
                num_ranks=8,
                is_mixed=is_mixed,
            )
            size = checkpoint_bytes(files_of(training))
            if strategy is Strategy.ZERO3 and not rank:
                size += weights_file_bytes(shape.tensors, dtype)  # gathered at a save
            assert size <= needs.most_bytes, (optimizer.name, dtype, is_mixed)


def test_the_folder_holds_all_checkpoints_of_the_worst_moment(model: str) -> None:
    needs = _needs(model)
    assert needs.unlimited == ""
    assert needs.local_bytes is not None
    assert needs.local_bytes > 6 * needs.most_bytes
    assert needs.local_bytes % (1 << 30) == 0
    assert needs.checkpoint_bytes == pytest.approx(48.2e9, rel=0.01)  # AdamW in 16 bits


@pytest.mark.parametrize(
    ("job", "arguments", "kept"),
    [
        ({"num_kept": None}, (), None),
        ({"num_kept": 3}, (), 3),
        ({"num_kept": 3}, ("--save_total_limit", "5"), 5),
        ({"num_kept": None}, ("--save_total_limit", "5"), 5),
        ({"num_kept": 3, "is_unbounded": True}, ("--save_total_limit", "5"), None),
    ],
)
def test_how_many_checkpoints_stay(
    job: dict[str, Any], arguments: tuple[str, ...], kept: int | None, model: str
) -> None:
    needs = _needs(model, *arguments, **job)
    if kept is None:
        assert needs.local_bytes is None
        assert "it is not known how many checkpoints stay in it" in needs.unlimited
        return
    assert (needs.local_bytes, needs.unlimited) == (_needs(model, num_kept=kept).local_bytes, "")


@pytest.mark.parametrize(
    ("job", "arguments", "reason"),
    [
        ({}, (), ""),
        ({"num_nodes": 2}, (), "with which strategy several ranks train"),
        ({"ranks_per_node": 8}, (), "with which strategy several ranks train"),
        ({"ranks_per_node": None}, (), "with which strategy several ranks train"),
        ({"ranks_per_node": 8}, ("--fsdp", "full_shard"), ""),
        ({}, ("--config", "a.yaml"), "a file with further arguments"),
        ({}, ("--optim", "lomo"), "the states of the optimizer 'lomo' are not known"),
    ],
)
def test_what_is_not_certain_sets_no_limit(
    job: dict[str, Any], arguments: tuple[str, ...], reason: str, model: str
) -> None:
    needs = _needs(model, *arguments, **job)
    assert reason in needs.unlimited
    assert bool(needs.unlimited) == bool(reason)
    assert needs.local_bytes is not None  # as an advice


def test_a_model_that_is_only_in_the_folder_sets_no_limit(model: str) -> None:
    needs = needs_of(JobOutline(ranks_per_node=1, is_remote=True, num_kept=2), [], code=Path(model).parent)
    assert needs is not None
    assert "no argument says that this model is trained" in needs.unlimited


def test_memory_and_grace_period(model: str) -> None:
    """With a folder in each of several pods, saves take no snapshot; with a claim there is no upload."""
    alone, several = _needs(model), _needs(model, num_nodes=2)
    claim = _needs(model, num_nodes=2, is_remote=False)
    assert alone.snapshot_bytes > 48e9
    assert several.snapshot_bytes == 0
    assert claim.snapshot_bytes == pytest.approx(alone.snapshot_bytes, rel=1e-6)
    assert claim.local_bytes is None
    assert claim.least_grace_s < alone.least_grace_s
    without = _needs(model, snapshot_slots=0)
    assert without.snapshot_bytes == 0


def test_without_a_model_there_is_nothing(tmp_path: Path) -> None:
    assert needs_of(JobOutline(ranks_per_node=1, is_remote=True, num_kept=2), ["--lr", "1"]) is None
    assert (
        needs_of(
            JobOutline(ranks_per_node=1, is_remote=True, num_kept=2), ["--model_name_or_path", "/only/in/the/pods"]
        )
        is None
    )


def test_what_cannot_be_planned_is_a_problem_and_no_error(model: str) -> None:
    for arguments, word in (
        (("--dtype", "int8"), "int8"),
        (("--use_peft", "--lora_target_modules", "nothing"), "nothing"),
    ):
        assert word in _needs(model, *arguments).problem
    Path(model).write_text('{"model_type": "unheard"}')
    needs = _needs(model)
    assert "unheard" in needs.problem
    assert "nothing was computed" not in needs.problem
    assert (needs.local_bytes, needs.snapshot_bytes, needs.least_grace_s) == (None, 0, 0)
