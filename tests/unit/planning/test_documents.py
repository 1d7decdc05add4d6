"""The tables and the sums of the documents, and the same models computed by Safepoint (docs/planning.md explains)."""

import pytest

from safepoint.estimates.sizes import OPTIMIZERS, Strategy
from safepoint.planning.checkpoint_files import Training
from safepoint.planning.documents import DDP_8B, FSDP_7B, TABLE_6_2, ZERO3_70B_LORA, documented_multiplier
from safepoint.planning.layouts import compare_layouts
from safepoint.planning.model import ModelShape, adapter_of, of_config
from safepoint.planning.storage import Run, StoragePlan, plan_storage

_GIB = 1 << 30
_LLAMA = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8}
LLAMA_8B = {
    **_LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LLAMA_70B = {
    **_LLAMA,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN_7B = {
    "model_type": "qwen2",
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}


def _model(config: dict[str, object]) -> ModelShape:
    return of_config(config, name="model", where="config.json")


def _plan(config: dict[str, object], strategy: Strategy, *, keep: int, nodes: int = 2, rank: int = 0) -> StoragePlan:
    model = _model(config)
    adapter = adapter_of(model, rank=rank, targets=["all-linear"]) if rank else ()
    training = Training(
        tensors=model.tensors,
        dtype="bfloat16",
        adapter=adapter,
        strategy=strategy,
        optimizer=OPTIMIZERS["adamw"],
        num_ranks=nodes,
    )
    return plan_storage(Run(model=model, training=training, nodes=nodes, keep=keep))


def test_published_parameter_counts() -> None:
    """Llama 3.1 8B and 70B, and Qwen 2.5 7B, as their model cards state them."""
    assert _model(LLAMA_8B).num_parameters == 8_030_261_248
    assert _model(LLAMA_70B).num_parameters == 70_553_706_496
    assert _model(QWEN_7B).num_parameters == 7_615_616_512


# ---- the documents by themselves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("column", TABLE_6_2, ids=lambda column: column.name)
def test_the_sums_of_section_6_5_3(column: object) -> None:
    assert column in TABLE_6_2
    assert column.sum == pytest.approx(column.stated_sum)  # pyright: ignore


@pytest.mark.parametrize("column", TABLE_6_2, ids=lambda column: column.name)
def test_local_checkpoints_of_table_6_2_are_n_checkpoints(column: object) -> None:
    assert column.kept * column.checkpoint == pytest.approx(column.local_checkpoints)  # pyright: ignore


def test_the_multipliers_of_section_6_5_4() -> None:
    assert [column.multiplier for column in TABLE_6_2] == pytest.approx([2, 2, 42.5])
    assert documented_multiplier(Strategy.ZERO3, has_adapter=True) == pytest.approx(42.5)
    assert documented_multiplier(Strategy.FSDP, has_adapter=False) == pytest.approx(2)
    assert documented_multiplier(Strategy.DDP, has_adapter=True) == pytest.approx(2)


def test_what_the_documents_contradict_themselves_in() -> None:
    """Table 6.2 and the sums differ in two figures; table 6.1 lies below the sums of DDP and ZeRO-3."""
    assert FSDP_7B.safety_buffer - FSDP_7B.sum_buffer == pytest.approx(1.7)
    assert (ZERO3_70B_LORA.checkpoint_download, ZERO3_70B_LORA.sum_download) == (2.4, 0)
    assert [column.stated_sum - column.observed_peak for column in TABLE_6_2] == [75, 0, 18]


# ---- the same, computed --------------------------------------------------------------------------------------------


def test_ddp_8b() -> None:
    """The documents' GB are GiB: weights 15, with moments 45. Their formula on these sizes gives their sum."""
    plan = _plan(LLAMA_8B, Strategy.DDP, keep=DDP_8B.kept)
    assert plan.checkpoint_bytes / _GIB == pytest.approx(DDP_8B.checkpoint, rel=0.01)
    assert plan.final_bytes / _GIB == pytest.approx(DDP_8B.final_model, rel=0.01)
    terms = {term.name.partition(" (")[0]: term for term in plan.first_pod.terms}
    assert terms["checkpoint download"].documented_bytes / _GIB == pytest.approx(DDP_8B.checkpoint_download, rel=0.01)
    assert terms["N x checkpoint"].documented_bytes / _GIB == pytest.approx(DDP_8B.local_checkpoints, rel=0.01)
    assert terms["consolidation peak"].documented_bytes / _GIB == pytest.approx(DDP_8B.consolidation_peak, rel=0.01)
    # Only the model's download differs: 15 GiB of weights, where the documents have about 25 GB.
    assert plan.first_pod.documented_bytes / _GIB == pytest.approx(DDP_8B.sum - 10, rel=0.02)
    assert plan.first_pod.ours_bytes < 0.85 * plan.first_pod.documented_bytes
    assert plan.first_pod.ours_bytes / _GIB == pytest.approx(205, rel=0.01)


def test_fsdp_7b() -> None:
    """With two pods each has a half of the checkpoint, and the whole is the peak."""
    plan = _plan(QWEN_7B, Strategy.FSDP, keep=FSDP_7B.kept)
    assert plan.first_pod.checkpoint_bytes / _GIB == pytest.approx(FSDP_7B.checkpoint, rel=0.02)
    terms = {term.name.partition(" (")[0]: term for term in plan.first_pod.terms}
    assert terms["N x checkpoint"].documented_bytes / _GIB == pytest.approx(FSDP_7B.local_checkpoints, rel=0.02)
    assert terms["consolidation peak"].documented_bytes / _GIB == pytest.approx(FSDP_7B.consolidation_peak, rel=0.02)
    # The final model of bf16 weights is 14 GiB; the documents have 21 GB, as large as a half of a checkpoint.
    assert plan.final_bytes / _GIB == pytest.approx(14.2, rel=0.01)


def test_zero3_70b_lora() -> None:
    """An adapter of rank 16 on all linear layers, on two pods; each gathers half of the model in the documents."""
    plan = _plan(LLAMA_70B, Strategy.ZERO3, keep=ZERO3_70B_LORA.kept, rank=16)
    assert plan.first_pod.checkpoint_bytes / 1e9 == pytest.approx(ZERO3_70B_LORA.checkpoint, rel=0.05)
    assert plan.bytes_of("optimizer") / 1e9 == pytest.approx(ZERO3_70B_LORA.checkpoint_download, rel=0.05)
    assert plan.weights_bytes / 2 / _GIB == pytest.approx(ZERO3_70B_LORA.final_model, rel=0.03)
    assert plan.weights_bytes / 2 / _GIB == pytest.approx(ZERO3_70B_LORA.consolidation_peak, rel=0.04)
    # Safepoint consolidates nothing: its peak is one more checkpoint.
    terms = {term.name.partition(" (")[0]: term for term in plan.first_pod.terms}
    assert terms["consolidation peak"].ours_bytes == plan.first_pod.checkpoint_bytes
    assert terms["final model"].ours_bytes == plan.final_bytes < 0.02 * plan.weights_bytes


def test_the_two_layouts_of_the_documents() -> None:
    """Two pods download the model twice in place of six times, and need less storage in all."""
    plan = _plan(LLAMA_8B, Strategy.DDP, keep=2, nodes=6)
    six, two = compare_layouts(plan.run, (6, 1), (2, 3))
    assert six.model_bytes == 3 * two.model_bytes
    assert six.documented_fetch_bytes == 3 * two.documented_fetch_bytes
    assert six.fetch_bytes == two.fetch_bytes  # with Safepoint the store is read once
    assert six.storage_bytes > two.storage_bytes
    assert six.step_bytes > two.step_bytes
