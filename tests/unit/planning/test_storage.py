"""The plan's arithmetic: more of anything never needs less; invalid values are messages."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from safepoint.errors import UsageError
from safepoint.estimates.sizes import OPTIMIZERS, Strategy
from safepoint.planning.checkpoint_files import Training, bytes_of_ranks, checkpoint_bytes, files_of
from safepoint.planning.layouts import compare_layouts
from safepoint.planning.model import adapter_of, of_count
from safepoint.planning.storage import Run, Speeds, StoragePlan, peak_bytes, plan_storage

_STRATEGIES = [strategy for strategy in Strategy if strategy is not Strategy.SINGLE]


def _run(
    count: int, strategy: Strategy, optimizer: str, nodes: int, gpus: int, keep: int, rank: int = 0, **more: Any
) -> Run:
    model = of_count(count, layers=2)
    training = Training(
        tensors=model.tensors,
        dtype="bfloat16",
        adapter=adapter_of(model, rank=rank, targets=()) if rank else (),
        strategy=strategy,
        optimizer=OPTIMIZERS[optimizer],
        num_ranks=nodes * gpus,
    )
    return Run(model=model, training=training, nodes=nodes, gpus=gpus, keep=keep, **more)


def _needs(plan: StoragePlan) -> dict[str, float]:
    """Everything that a person would ask for."""
    return {
        "checkpoint": plan.checkpoint_bytes,
        "first pod": plan.first_pod.ours_bytes,
        "first pod, documented": plan.first_pod.documented_bytes,
        "claim": plan.claim_bytes,
        "weights": plan.weights_bytes,
        "final": plan.final_bytes,
        "snapshots": plan.snapshot_bytes,
        "upload": plan.times.upload_s,
        "peak": peak_bytes(plan),
    }


def _assert_not_less(more: StoragePlan, less: StoragePlan, *, leave_out: tuple[str, ...] = ()) -> None:
    after, before = _needs(more), _needs(less)
    assert {name: (before[name], after[name]) for name in before if after[name] < before[name]}.keys() <= {*leave_out}


_RUNS = {
    "strategy": st.sampled_from(_STRATEGIES),
    "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
    "nodes": st.integers(1, 5),
    "gpus": st.integers(1, 5),
    "keep": st.integers(1, 4),
}


@settings(max_examples=60, deadline=None)
@given(count=st.integers(2_000_000, 20_000_000), more=st.integers(0, 20_000_000), **_RUNS)
def test_more_parameters_never_need_less(count: int, more: int, **values: Any) -> None:
    # The width is rounded, so that the tensors differ: up to 0.5 % of the small files and paddings.
    small, large = (plan_storage(_run(one, **values)) for one in (count, count + more))
    for name, value in _needs(large).items():
        # From 85 MiB on memory has room for one snapshot in place of three.
        if name != "snapshots":
            assert value >= 0.98 * _needs(small)[name], name


@settings(max_examples=60, deadline=None)
@given(more=st.integers(1, 4), **_RUNS)
def test_more_kept_checkpoints_never_need_less(more: int, keep: int, **values: Any) -> None:
    _assert_not_less(
        plan_storage(_run(8_000_000, keep=keep + more, **values)), plan_storage(_run(8_000_000, keep=keep, **values))
    )


@settings(max_examples=60, deadline=None)
@given(more=st.integers(1, 4), **_RUNS)
def test_more_nodes_never_need_less_in_all(more: int, nodes: int, gpus: int, **values: Any) -> None:
    """A pod may need less, because ranks share the checkpoint; all pods together never do."""

    def storage_of_all(count: int) -> tuple[int, int]:
        plan = plan_storage(_run(8_000_000, nodes=count, gpus=gpus, **values))
        others = 0 if plan.other_pod is None else (count - 1) * plan.other_pod.ours_bytes
        return plan.checkpoint_bytes, plan.first_pod.ours_bytes + others

    fewer, all_of_them = storage_of_all(nodes), storage_of_all(nodes + more)
    assert all_of_them[0] >= fewer[0]
    assert all_of_them[1] >= fewer[1]


@settings(max_examples=40, deadline=None)
@given(rank=st.integers(1, 16), more=st.integers(0, 16), **_RUNS)
def test_a_larger_adapter_never_needs_less(rank: int, more: int, **values: Any) -> None:
    """There are two exceptions. From 4,096 elements on, bitsandbytes keeps 8 bits in place of 32. And FSDP2 divides 4
    rows among 3 ranks as 2 shards, but 3 rows as 3, and each shard has a header."""
    assume(not values["optimizer"].endswith("8bit"))
    assume(values["strategy"] is not Strategy.FSDP or values["nodes"] * values["gpus"] == 1)
    large, small = (plan_storage(_run(8_000_000, rank=one, **values)) for one in (rank + more, rank))
    _assert_not_less(large, small, leave_out=("snapshots",))


@settings(max_examples=60, deadline=None)
@given(**_RUNS)
def test_the_parts_of_the_nodes_hold_the_checkpoint(**values: Any) -> None:
    """No byte of a checkpoint belongs to no node, and no node has more than all of it."""
    run = _run(8_000_000, **values)
    groups = files_of(run.training)
    first = bytes_of_ranks(groups, ranks=run.gpus, has_first=True)
    other = bytes_of_ranks(groups, ranks=run.gpus, has_first=False)
    assert checkpoint_bytes(groups) <= first + (run.nodes - 1) * other
    assert other <= first <= checkpoint_bytes(groups)


def test_strategies_share_what_they_share() -> None:
    """ZeRO-3 and FSDP hold a part of everything on each rank; ZeRO-2 has whole weights, DDP has all of it."""
    memory = {
        strategy: plan_storage(_run(8_000_000, strategy, "adamw", 2, 4, 2)).memory.total_bytes
        for strategy in _STRATEGIES
    }
    assert memory[Strategy.FSDP] == memory[Strategy.FSDP_FULL] < memory[Strategy.ZERO3]  # moments in 32 bits
    assert memory[Strategy.ZERO3] < memory[Strategy.ZERO2] < memory[Strategy.ZERO1] < memory[Strategy.DDP]


def test_an_adapter_trains_little_and_its_base_may_be_in_4_bits() -> None:
    run = _run(80_000_000, Strategy.DDP, "adamw", 1, 2, 2, rank=8)
    plain, quantized = (plan_storage(replace(run, is_quantized=flag)) for flag in (False, True))
    assert plain.checkpoint_bytes == quantized.checkpoint_bytes < plain.weights_bytes / 10
    assert quantized.memory.weights_bytes < plain.memory.weights_bytes


def test_a_measured_checkpoint_replaces_the_computed_one() -> None:
    run = _run(8_000_000, Strategy.FSDP, "adamw", 2, 1, 2)
    plan = plan_storage(run)
    measured = plan_storage(replace(run, measured_bytes=2 * plan.checkpoint_bytes))
    assert measured.checkpoint_bytes == 2 * plan.checkpoint_bytes
    assert measured.first_pod.checkpoint_bytes == pytest.approx(2 * plan.first_pod.checkpoint_bytes, rel=0.01)
    assert measured.times.upload_s == pytest.approx(2 * plan.times.upload_s, rel=0.01)


@pytest.mark.parametrize("grace_s", [1.0, 5.0, 15.0, 60.0, 5000.0])
def test_the_grace_period_that_it_names_is_enough(grace_s: float) -> None:
    plan = plan_storage(_run(20_000_000, Strategy.DDP, "adamw", 1, 1, 2, grace_s=grace_s, step_s=2.0))
    for name in ("in_folder", "in_store"):
        fit = getattr(plan, name)
        again = getattr(plan_storage(replace(plan.run, grace_s=float(fit.grace_s))), name)
        assert again.fits
        assert fit.fits == (fit.needed_s <= fit.usable_s)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "--nodes 0"),
        ({"nodes": -3}, "--nodes -3"),
        ({"gpus": 10**9}, "--gpus 1000000000"),
        ({"keep": 0}, "--save-total-limit 0"),
        ({"grace_s": float("nan")}, "--grace nan"),
        ({"grace_s": -1.0}, "--grace -1"),
        ({"step_s": float("inf")}, "--step-time inf"),
    ],
)
def test_invalid_values_name_the_option(changes: dict[str, Any], message: str) -> None:
    run = _run(8_000_000, Strategy.DDP, "adamw", 1, 2, 2)
    with pytest.raises(UsageError, match=message):
        replace(run, **changes)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_is_positive(speed: float) -> None:
    with pytest.raises(UsageError, match="--upload-speed"):
        Speeds(upload=speed)


def test_one_process_is_one_rank() -> None:
    with pytest.raises(UsageError, match="--strategy single is for one process"):
        _run(8_000_000, Strategy.SINGLE, "adamw", 1, 2, 2)


def test_layouts_have_the_same_number_of_gpus() -> None:
    run = _run(8_000_000, Strategy.DDP, "adamw", 6, 1, 2)
    with pytest.raises(UsageError, match="6 and 8 GPUs"):
        compare_layouts(run, (6, 1), (2, 4))


def test_a_huge_cluster_is_quick() -> None:
    """Nothing is enumerated by rank: a hundred thousand of them are a plan in a moment."""
    plan = plan_storage(_run(400_000_000_000, Strategy.FSDP, "adamw", 12_500, 8, 2))
    assert plan.checkpoint_bytes > 6 * 400_000_000_000
