"""Which checkpoints the Trainer, as it is set up, can read."""

from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.parallelism_config import ParallelismConfig

from safepoint.checkpoint.format.manifest import FileEntry, Manifest, Trigger
from safepoint.errors import ConflictError, UsageError
from safepoint.training.integrations.transformers.sharding.trainer_strategy import (
    check_checkpoint_strategy,
    check_supported,
    strategy_of,
)
from safepoint.training.state.strategy import check_partitions, has_same_partitions


def trainer(
    strategy: str,
    *,
    ranks: int = 2,
    state: str = "SHARDED_STATE_DICT",
    stage: int = 2,
    parallel: int = 0,
    version: int = 2,
    context: int = 1,
    **settings: Any,
) -> Any:
    """Settings are those of DeepSpeed, with `__` for a dot."""
    plugin = (
        SimpleNamespace(state_dict_type=f"StateDictType.{state}", fsdp_version=version)
        if strategy == "fsdp"
        else None
    )
    by_name = {name.replace("__", "."): value for name, value in settings.items()}
    zero = SimpleNamespace(zero_stage=stage, hf_ds_config=SimpleNamespace(get_value=by_name.get))
    return SimpleNamespace(
        is_deepspeed_enabled=strategy == "deepspeed",
        is_fsdp_enabled=strategy == "fsdp",
        args=SimpleNamespace(world_size=ranks),
        accelerator=SimpleNamespace(
            parallelism_config=ParallelismConfig(tp_size=parallel, cp_size=context) if parallel else None,
            state=SimpleNamespace(fsdp_plugin=plugin, deepspeed_plugin=zero if strategy == "deepspeed" else None),
        ),
    )


def manifest(
    strategy: str, *, ranks: int = 2, path: str = "pytorch_model_fsdp_0/.metadata", stage: int | None = None
) -> Manifest:
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
        zero_stage=stage,
        created="2026-01-01T00:00:00Z",
        files=(FileEntry(path=path, size_bytes=1, digest="xxh3-128:" + "0" * 32),),
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed"])
def test_the_same_strategy_is_read(strategy: str) -> None:
    """And is called by its name."""
    assert strategy_of(trainer(strategy)) == strategy
    check_checkpoint_strategy(trainer(strategy), manifest(strategy, stage=2 if strategy == "deepspeed" else None))


_OLD = {
    1: "global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    2: "global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    3: "global_step5/zero_pp_rank_1_mp_rank_00_model_states.pt",
}


@pytest.mark.parametrize(("ranks", "before", "after"), [(3, 2, 2), (1, 3, 3), (2, 3, 1), (2, 1, 2), (4, 2, 3)])
def test_zero_takes_other_ranks_and_stages(ranks: int, before: int, after: int) -> None:
    """What has to be copied for that is copied; with the files of older manifests, which name no stage."""
    now = trainer("deepspeed", ranks=ranks, stage=after)
    for saved in (manifest("deepspeed", stage=before), manifest("deepspeed", path=_OLD[before])):
        check_checkpoint_strategy(now, saved)
        is_known = saved.zero_stage is not None
        assert has_same_partitions(saved, after, ranks) == (not is_known and {before, after} == {1, 2} and ranks == 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_as_many_ranks_and_the_same_stage_need_no_copy(stage: int) -> None:
    """With any configuration of DeepSpeed, also one that it could not load again."""
    now = trainer("deepspeed", stage=stage, zero_optimization__round_robin_gradients=True)
    for saved in (manifest("deepspeed", stage=stage), manifest("deepspeed", path=_OLD[stage])):
        assert has_same_partitions(saved, stage, 2)
        check_checkpoint_strategy(now, saved)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_session_takes_no_other_split(stage: int) -> None:
    """There, Accelerate loads."""
    saved = manifest("deepspeed", stage=2)
    check_partitions(saved, 2, 2)
    check_partitions(manifest("ddp"), None, 7)
    for now, ranks in ((2, 3), (stage, 2)):
        with pytest.raises(ConflictError, match=rf"by ZeRO-2 on 2 ranks, .* is ZeRO-{now} on {ranks}"):
            check_partitions(saved, now, ranks)


def test_one_process_and_several_are_the_same() -> None:
    """DDP's files are those of one process."""
    check_checkpoint_strategy(trainer("ddp", ranks=1), manifest("ddp"))
    check_checkpoint_strategy(trainer("ddp"), manifest("single", ranks=1))


def test_fsdp_takes_another_number_of_ranks() -> None:
    """DCP reads what each of them needs."""
    check_checkpoint_strategy(trainer("fsdp", ranks=3), manifest("fsdp"))


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (trainer("fsdp", state="LOCAL_STATE_DICT", version=1), "LOCAL_STATE_DICT"),
        (trainer("fsdp", state="LOCAL_STATE_DICT"), "LOCAL_STATE_DICT"),
        (trainer("ddp", parallel=2), "tensor parallelism on 2 ranks"),
        (trainer("fsdp", parallel=1, context=4), "context parallelism on 4 ranks"),
    ],
)
def test_what_no_checkpoint_holds_is_refused_at_the_start(now: Any, words: str) -> None:
    """Whether there is a checkpoint or not."""
    with pytest.raises(UsageError, match=rf"{words}.*; training was not started"):
        check_supported(now, world_size=2)


def test_a_model_that_was_loaded_in_shards_is_refused() -> None:
    """By `distributed_config`, which the Trainer does not take for FSDP."""
    now = trainer("ddp")
    now.is_distributed_loading_by_transformers = True
    with pytest.raises(UsageError, match=r"\(distributed_config\).*; training was not started"):
        check_supported(now, world_size=2)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_that_the_trainer_would_not_read_are_refused() -> None:
    """Those of transformers' own way, and mixed ones; PEFT's begin."""
    peft = pytest.importorskip("peft")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = Qwen2Config(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )

    def lora() -> Any:
        return peft.LoraConfig(r=2, target_modules=["q_proj"])

    now = trainer("ddp")
    now.model = Qwen2ForCausalLM(shape)
    check_supported(now, world_size=2)
    try:
        now.model.add_adapter(lora())
    except ValueError as error:  # no release of PEFT may be new enough for the newest transformers yet
        pytest.skip(str(error))
    with pytest.raises(UsageError, match=r"add_adapter.*training was not started") as error:
        check_supported(now, world_size=2)
    assert "peft.get_peft_model" in str(error.value)
    sharded = trainer("fsdp")
    sharded.model = now.model
    check_supported(sharded, world_size=2)
    now.model = peft.get_peft_model(Qwen2ForCausalLM(shape), lora())
    check_supported(now, world_size=2)
    now.model = peft.get_peft_model(Qwen2ForCausalLM(shape), lora(), mixed=True)
    with pytest.raises(UsageError, match=r"PeftMixedModel.*training was not started"):
        check_supported(now, world_size=2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed"])
def test_the_others_begin(strategy: str) -> None:
    """Also where a script says in how many ways ranks share, and it is one; DeepSpeed saves its own ways."""
    check_supported(trainer(strategy), world_size=2)
    check_supported(trainer(strategy, parallel=2 if strategy == "deepspeed" else 1), world_size=2)


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
        (
            trainer("deepspeed", ranks=3, stage=0),
            manifest("deepspeed", stage=0),
            "DeepSpeed without ZeRO on 2 ranks, and this run uses DeepS.* on 3 ranks.* used: .* for ZeRO's stages",
        ),
        (trainer("deepspeed", stage=3), manifest("deepspeed"), "by DeepSpeed without ZeRO on 2 ranks"),
        (
            trainer("deepspeed", ranks=3, zero_optimization__round_robin_gradients=True),
            manifest("deepspeed", stage=2),
            "by ZeRO-2 on 2 ranks, and this run uses ZeRO-2 on 3 ranks.* used: with round_robin_gradients",
        ),
        (
            trainer("deepspeed", ranks=3, stage=3, zero_optimization__offload_optimizer__device="nvme"),
            manifest("deepspeed", stage=3),
            "offloaded to NVMe",
        ),
        (
            trainer("deepspeed", ranks=4, tensor_parallel__autotp_size=2),
            manifest("deepspeed", stage=2),
            "another parallelism besides ZeRO",
        ),
        (
            trainer("deepspeed", ranks=4, parallel=2),
            manifest("deepspeed", stage=2),
            "another parallelism besides ZeRO",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(now: Any, saved: Manifest, words: str) -> None:
    """Before anything is loaded, with both sides named."""
    with pytest.raises(ConflictError, match=words):
        check_checkpoint_strategy(now, saved)
