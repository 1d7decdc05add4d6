"""Which checkpoints the Trainer, as it is set up, can read."""

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.checkpoint.manifest import FileEntry, Manifest, Trigger
from holdfast.errors import ConflictError
from holdfast.training.integrations.transformers.sharing import check_sharing, strategy_of


def trainer(strategy: str, *, ranks: int = 2, state: str = "SHARDED_STATE_DICT") -> Any:
    plugin = SimpleNamespace(state_dict_type=f"StateDictType.{state}") if strategy == "fsdp" else None
    return SimpleNamespace(
        is_deepspeed_enabled=strategy == "deepspeed",
        is_fsdp_enabled=strategy == "fsdp",
        args=SimpleNamespace(world_size=ranks),
        accelerator=SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)),
    )


def manifest(strategy: str, *, ranks: int = 2, path: str = "pytorch_model_fsdp_0/.metadata") -> Manifest:
    return Manifest(
        run_id="run",
        attempt=1,
        step=7,
        epoch=0.5,
        trigger=Trigger.PERIODIC,
        world_size=ranks,
        global_batch=8,
        gradient_accumulation=1,
        samples_seen=56,
        strategy=strategy,
        created="2026-01-01T00:00:00Z",
        files=(FileEntry(path=path, size_bytes=1, digest="xxh3-128:" + "0" * 32),),
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed"])
def test_the_same_strategy_is_read(strategy: str) -> None:
    """And is called by its name."""
    assert strategy_of(trainer(strategy)) == strategy
    check_sharing(trainer(strategy), manifest(strategy))


def test_one_process_and_several_are_the_same() -> None:
    """DDP's files are those of one process."""
    check_sharing(trainer("ddp", ranks=1), manifest("ddp"))
    check_sharing(trainer("ddp"), manifest("single", ranks=1))


def test_fsdp_takes_another_number_of_ranks() -> None:
    """DCP reads what each of them needs."""
    check_sharing(trainer("fsdp", ranks=3), manifest("fsdp"))


@pytest.mark.parametrize(
    ("now", "saved", "words"),
    [
        (trainer("ddp"), manifest("fsdp"), "written under fsdp, this run uses ddp"),
        (trainer("fsdp"), manifest("deepspeed"), "written under deepspeed, this run uses fsdp"),
        (
            trainer("fsdp", state="FULL_STATE_DICT"),
            manifest("fsdp"),
            "written under SHARDED_STATE_DICT, this run uses FULL_STATE_DICT",
        ),
        (
            trainer("fsdp"),
            manifest("fsdp", path="pytorch_model_fsdp.bin"),
            "written under FULL_STATE_DICT, this run uses SHARDED_STATE_DICT",
        ),
        (trainer("deepspeed", ranks=3), manifest("deepspeed"), "by 2 rank.s. of DeepSpeed"),
    ],
)
def test_what_cannot_be_read_is_refused(now: Any, saved: Manifest, words: str) -> None:
    """Before anything is loaded, with both sides named."""
    with pytest.raises(ConflictError, match=words):
        check_sharing(now, saved)
