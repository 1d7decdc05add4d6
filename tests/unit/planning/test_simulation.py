"""The simulation: against closed forms, against published figures, and in properties."""

import dataclasses
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.planning.commit_costs import Platform, commit_cost
from safepoint.planning.failures import DAY_S, MODELS, Cause, FailureModel, Hazard, between_s
from safepoint.planning.policies import POLICIES, OnNotice, Plan, expected_ettr, plan_of
from safepoint.planning.simulation import Estimate, replay, simulate, t_975

HOUR_S = 3600.0
MINUTE_S = 60.0


def machine(between: float) -> tuple[Hazard, ...]:
    return (Hazard(cause=Cause.MACHINE, per_s=1 / between),)


def blocking(interval_s: float, stall_s: float, restart_s: float) -> Plan:
    """A program that saves at a fixed interval, waits for each save, and loses the work since the last one."""
    return Plan(
        interval_s=interval_s, stall_s=stall_s, durable_s=stall_s, copied_s=stall_s, machine_restart_s=restart_s
    )


@pytest.mark.parametrize(
    ("interval_s", "stall_s", "restart_s", "between"),
    [(600, 30, 300, 4 * HOUR_S), (60, 1, 60, 900), (3600, 600, 600, 2 * HOUR_S), (10, 0, 0, 60)],
)
def test_daly_s_expression_of_the_expected_time(
    interval_s: float, stall_s: float, restart_s: float, between: float
) -> None:
    """Daly 2006, equation 20: M·e^(R/M)·(e^((τ+δ)/M) - 1)·T/τ for T seconds of work. Within 0.5 %."""
    simulated = simulate(
        blocking(interval_s, stall_s, restart_s), machine(between), duration_s=4000 * between, num_trials=40, seed=1
    ).ettr
    expected = interval_s / (between * math.exp(restart_s / between) * math.expm1((interval_s + stall_s) / between))
    assert abs(simulated.mean - expected) < 1.5 * simulated.half_width
    assert simulated.mean == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "safepoint-replicas"])
@pytest.mark.parametrize("model", ["llama3", "meta-rsc1", "queue", "spot"])
def test_every_policy_is_as_its_closed_form(name: str, model: str) -> None:
    """On 4,096 ranks, where a snapshot from which ranks resume is durable long before the next interruption."""
    platform = Platform()
    hazards = MODELS[model].hazards(platform.machines(4096))
    plan = plan_of(POLICIES[name], platform, 4096, hazards)
    simulated = simulate(plan, hazards, duration_s=2000 * between_s(hazards), num_trials=10, seed=2).ettr
    assert simulated.mean == pytest.approx(expected_ettr(plan, hazards), rel=0.003)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("model", ["llama3", "queue", "spot"])
def test_saves_are_at_the_ends_of_steps(name: str, model: str) -> None:
    """Between them there is no state to save: an interruption without a save loses half a step on average."""
    for step_s in (0.3, 7.0, 1200.0, 7200.0):
        platform = Platform(step_s=step_s)
        hazards = MODELS[model].hazards(platform.machines(512))
        plan = plan_of(POLICIES[name], platform, 512, hazards)
        for every_s in (plan.interval_s, plan.snapshot_every_s):
            if every_s is not None and math.isfinite(every_s):
                assert every_s >= step_s
                assert every_s / step_s == pytest.approx(round(every_s / step_s))
        assert plan.interval_s >= plan.durable_s - plan.stall_s


@pytest.mark.parametrize("name", POLICIES)
def test_long_steps_lose_half_of_one_in_each_interruption(name: str) -> None:
    """A grace period of 10 minutes is too short for the rest of a step of 20 minutes."""
    platform = Platform(step_s=1200.0)
    hazards = MODELS["queue"].hazards(1)
    plan = plan_of(POLICIES[name], platform, 8, hazards)
    simulated = simulate(plan, hazards, duration_s=30 * DAY_S, num_trials=200, seed=8)
    lost_s = 3600 * simulated.hours("repeated_s").mean * len(simulated.trials) / simulated.num_interruptions
    assert lost_s > 0.95 * 600


def _meta(num_machines: int, failures: float, u0_s: float, interval_s: float, write_s: float) -> float:
    """E[ETTR] ≈ (1 - N·r·(u0 + Δt/2)) / (1 + w/Δt): Kokolis et al., HPCA 2025, equation 1 without a queue."""
    per_s = num_machines * failures / DAY_S
    return (1 - per_s * (u0_s + interval_s / 2)) / (1 + write_s / interval_s)


def test_the_times_to_failure_of_meta() -> None:
    """1.8 h at 16,384 GPUs and 0.23 h at 131,072, projected from 6.50 failures in 1,000 node-days."""
    for ranks, hours in ((16_384, 1.8), (131_072, 0.23)):
        found = between_s(MODELS["meta-rsc1"].hazards(ranks // 8)) / HOUR_S
        assert found == pytest.approx(hours, rel=0.025)
    # The 7.9 h that they measured at 1,024 GPUs are not from this rate, which is 28.8 h: smaller jobs were also
    # interrupted by what is not a failure of a node.
    assert between_s(MODELS["meta-rsc1"].hazards(128)) / HOUR_S == pytest.approx(28.8, rel=0.01)


@pytest.mark.parametrize("ranks", [2048, 4096, 8192, 16_384])
def test_the_ettr_of_meta(ranks: int) -> None:
    """Against their approximation, restarts of 5 minutes, saves every hour that do not block. It is linear in the
    failures, so that it is too low by half of the square of what is lost; the simulation is exact."""
    plan = dataclasses.replace(blocking(HOUR_S, 0, 5 * MINUTE_S), durable_s=0.0)
    hazards = MODELS["meta-rsc1"].hazards(ranks // 8)
    simulated = simulate(plan, hazards, duration_s=2000 * between_s(hazards), num_trials=10, seed=3).ettr.mean
    stated = _meta(ranks // 8, 6.5e-3, 5 * MINUTE_S, HOUR_S, 0)
    lost = 1 - stated
    assert 0 <= simulated - stated < 0.6 * lost**2 + 0.002
    if ranks <= 4096:
        assert simulated > 0.9, "2048 to 4096 GPUs on RSC-1 show an average ETTR of over 0.9 at a one-hour interval"


def test_what_meta_needs_for_0_9() -> None:
    """On 12,000 GPUs of RSC-1: writing in 10 s, or one failure in 1,000 node-days. On 100,000 at the rate of RSC-2:
    intervals and restarts of about 2 minutes."""
    for write_s, per_1000 in ((10, 6.5), (300, 1.0)):
        hazards = FailureModel(name="rsc1", machine_per_day=per_1000 / 1000).hazards(1500)
        between = between_s(hazards)
        plan = blocking(math.sqrt(2 * write_s * between), write_s, 5 * MINUTE_S)
        simulated = simulate(plan, hazards, duration_s=2000 * between, num_trials=10, seed=4).ettr.mean
        assert simulated == pytest.approx(0.9, abs=0.025)
    # As it was: blocking writes of 5 minutes.
    hazards = MODELS["meta-rsc1"].hazards(1500)
    plan = blocking(math.sqrt(2 * 300 * between_s(hazards)), 300, 5 * MINUTE_S)
    assert simulate(plan, hazards, duration_s=100 * DAY_S, num_trials=10, seed=4).ettr.mean < 0.8
    hazards = MODELS["meta-rsc2"].hazards(12_500)
    plan = blocking(2 * MINUTE_S, 0, 2 * MINUTE_S)
    simulated = simulate(plan, hazards, duration_s=30 * DAY_S, num_trials=10, seed=4).ettr.mean
    # Above 0.9: the two minutes are a round figure. Exactly 0.9 are 3.3 minutes each.
    assert simulated == pytest.approx(0.94, abs=0.005)
    plan = blocking(198, 0, 198)
    assert simulate(plan, hazards, duration_s=30 * DAY_S, num_trials=10, seed=4).ettr.mean == pytest.approx(
        0.905, abs=0.005
    )


def test_the_ettr_of_llama_3() -> None:
    """Over 90 % at 466 interruptions in 54 days. The interval and the restart are not stated: 10 minutes each fit."""
    model = MODELS["llama3"]
    hazards = model.hazards(2048)
    assert 54 * DAY_S / between_s(hazards) == pytest.approx(466)
    plan = dataclasses.replace(blocking(10 * MINUTE_S, 1, 10 * MINUTE_S), ranks_restart_s=10 * MINUTE_S)
    ettr = simulate(plan, hazards, duration_s=54 * DAY_S, num_trials=20, seed=5).ettr
    assert 0.9 < ettr.mean < 0.93


def test_the_ettr_of_byterobust() -> None:
    """Up to 97 % for 175 incidents of the dense job in three months. With the stated times until incidents are
    resolved (table 6, detection in table 3) and a snapshot in each step, the simulation has 99 %: the paper's times
    begin when a fault is localized, and its plateau also contains what comes before that, and slow phases."""
    resolved = {
        Cause.RANKS: (12 * 4289 + 15 * (600 + 93)) / 27,  # rollbacks, and hangs after PyTorch's timeout of 10 minutes
        Cause.MACHINE: 93 + 30.0,
        Cause.MAINTENANCE: 57.0,
    }
    hazards = MODELS["byterobust"].hazards(1200)
    assert 90 * DAY_S / between_s(hazards) == pytest.approx(175)
    plan = Plan(
        interval_s=20,
        stall_s=0.02,
        durable_s=0.02,
        copied_s=0.02,
        on_notice=OnNotice.SAVE,
        ranks_restart_s=resolved[Cause.RANKS],
        machine_restart_s=resolved[Cause.MACHINE],
    )
    ettr = simulate(plan, hazards, duration_s=90 * DAY_S, num_trials=40, seed=6).ettr
    assert ettr.mean == pytest.approx(0.988, abs=0.003)
    # What is left to 97 % is 14 minutes for each incident, within their "maximum of 50 minutes".
    slower = dataclasses.replace(plan, machine_restart_s=123 + 14 * 60, ranks_restart_s=2285 + 14 * 60)
    ettr = simulate(slower, hazards, duration_s=90 * DAY_S, num_trials=40, seed=6).ettr
    assert ettr.mean == pytest.approx(0.97, abs=0.004)


def test_a_replay_by_hand() -> None:
    """Intervals of 10 s and stalls of 2 s; durable 5 s after the stall, complete in memory 1 s after it."""
    plan = Plan(
        interval_s=10,
        stall_s=2,
        durable_s=7,
        copied_s=3,
        on_notice=OnNotice.SAVE,
        notice_needed_s=4,
        keeps_memory=True,
        ranks_restart_s=6,
        machine_restart_s=20,
    )
    hazards = (
        Hazard(cause=Cause.RANKS, per_s=1),
        Hazard(cause=Cause.MACHINE, per_s=1),
        Hazard(cause=Cause.PREEMPTION, per_s=1, notice_s=30),
    )
    # At 26 s: 2 saves, 2 s of work after them; the second is complete in memory and not durable.
    trial = replay(plan, hazards, [(26, 0)], duration_s=32)
    assert (trial.productive_s, trial.repeated_s, trial.stalled_s, trial.down_s) == (20, 2, 4, 6)
    # The machine is lost 3 s later, during the restart, before the keeper has written the second snapshot.
    trial = replay(plan, hazards, [(26, 0), (3, 1)], duration_s=49)
    assert (trial.productive_s, trial.repeated_s, trial.stalled_s, trial.down_s) == (10, 12, 4, 23)
    # And 8 s later, after it has.
    trial = replay(plan, hazards, [(26, 0), (8, 1)], duration_s=54)
    assert (trial.productive_s, trial.repeated_s, trial.down_s) == (20, 2 + 2, 26)
    # Announced: nothing is lost, and the save takes 4 s of the time.
    trial = replay(plan, hazards, [(26, 2)], duration_s=50)
    assert (trial.productive_s, trial.repeated_s, trial.down_s) == (22, 0, 24)
    # Announced at 11 s, in the stall of the first save: there is no work of the eleventh second.
    trial = replay(plan, hazards, [(11, 2)], duration_s=35)
    assert (trial.productive_s, trial.stalled_s, trial.down_s) == (10, 1, 24)
    # Announced too late for the save: as the loss of a machine.
    late = (hazards[0], hazards[1], dataclasses.replace(hazards[2], notice_s=3))
    assert replay(plan, late, [(26, 2)], duration_s=46).productive_s == 10
    # In a queue for a minute: that is no part of the ETTR.
    queued = (hazards[0], hazards[1], dataclasses.replace(hazards[2], waiting_s=60))
    trial = replay(plan, queued, [(26, 2)], duration_s=50)
    assert (trial.productive_s, trial.waiting_s, trial.ettr) == (22, 60, 22 / 50)
    assert trial.num_interruptions == 1


def test_snapshots_between_saves_by_hand() -> None:
    plan = Plan(
        interval_s=100,
        stall_s=0,
        durable_s=0,
        copied_s=0,
        keeps_memory=True,
        snapshot_every_s=9,
        snapshot_stall_s=1,
    )
    hazards = (Hazard(cause=Cause.RANKS, per_s=1),)
    # 35 s: 3 snapshots with 9 s of work each, and the rest of the work at the mean pace of 0.9.
    trial = replay(plan, hazards, [(35, 0)], duration_s=35.0001)
    assert trial.productive_s == pytest.approx(27, abs=0.001)
    assert trial.repeated_s == pytest.approx(4.5, abs=0.001)


plans = st.builds(
    Plan,
    interval_s=st.floats(1, 1e4) | st.just(math.inf),
    stall_s=st.floats(0, 10),
    durable_s=st.floats(10, 100),
    copied_s=st.floats(10, 20),
    on_notice=st.sampled_from(OnNotice),
    notice_needed_s=st.floats(0, 200),
    keeps_memory=st.booleans(),
    replicates=st.booleans(),
    snapshot_every_s=st.none() | st.floats(1, 100),
    snapshot_stall_s=st.floats(0, 1),
    ranks_restart_s=st.floats(0, 100),
    machine_restart_s=st.floats(0, 1000),
    pace=st.floats(0.5, 1),
)
causes = st.sampled_from(list(Cause))
hazard_lists = st.lists(
    st.builds(
        Hazard,
        cause=causes,
        per_s=st.floats(1e-6, 1e-2),
        notice_s=st.sampled_from([0.0, 30.0, 600.0]),
        waiting_s=st.sampled_from([0.0, 100.0]),
    ),
    min_size=1,
    max_size=4,
)


@given(plans, hazard_lists, st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_no_time_is_lost_or_invented(plan: Plan, hazards: list[Hazard], seed: int) -> None:
    """What a trial says of its time adds up to its duration, and no part is negative."""
    duration_s = 1e4
    (trial,) = simulate(plan, tuple(hazards), duration_s=duration_s, num_trials=1, seed=seed).trials
    parts = (trial.productive_s, trial.repeated_s, trial.stalled_s, trial.down_s)
    assert min(*parts, trial.waiting_s) >= -1e-6
    assert sum(parts) == pytest.approx(duration_s, rel=1e-9)
    assert 0 <= trial.ettr <= 1


@given(plans, hazard_lists, st.floats(2, 10))
@settings(max_examples=50, deadline=None)
def test_more_failures_never_raise_the_ettr(plan: Plan, hazards: list[Hazard], factor: float) -> None:
    """Within the confidence intervals of both, if a restart takes at least as long as the stall of a save. Otherwise
    an interruption may cost less than the next periodic save, which it postpones."""
    plan = dataclasses.replace(
        plan,
        interval_s=min(plan.interval_s, 1e4),
        ranks_restart_s=plan.stall_s + plan.ranks_restart_s,
        machine_restart_s=plan.stall_s + plan.machine_restart_s,
    )
    more = tuple(dataclasses.replace(hazard, per_s=hazard.per_s * factor) for hazard in hazards)
    few, many = (simulate(plan, each, duration_s=1e5, num_trials=5, seed=1).ettr for each in (tuple(hazards), more))
    assert many.mean <= few.mean + few.half_width + many.half_width + 5e-3


@given(plans, hazard_lists, st.floats(0, 1000))
@settings(max_examples=50, deadline=None)
def test_longer_restarts_never_lower_the_loss(plan: Plan, hazards: list[Hazard], more_s: float) -> None:
    slower = dataclasses.replace(
        plan,
        ranks_restart_s=plan.ranks_restart_s + more_s,
        machine_restart_s=plan.machine_restart_s + more_s,
    )
    fast, slow = (
        simulate(each, tuple(hazards), duration_s=1e5, num_trials=5, seed=1).ettr for each in (plan, slower)
    )
    assert slow.mean <= fast.mean + fast.half_width + slow.half_width + 5e-3


def test_a_seed_gives_the_same_result() -> None:
    hazards = MODELS["llama3"].hazards(64)
    plan = plan_of(POLICIES["safepoint"], Platform(), 512, hazards)
    first, again, other = (simulate(plan, hazards, duration_s=1e7, num_trials=3, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len({trial.num_interruptions for trial in first.trials}) > 1


def test_without_failures_only_saves_cost() -> None:
    hazards = FailureModel(name="none").hazards(8)
    assert hazards == ()
    trial = simulate(blocking(90, 10, 5), hazards, duration_s=1e5, num_trials=1, seed=0).trials[0]
    assert trial.ettr == pytest.approx(0.9)
    assert expected_ettr(blocking(90, 10, 5), hazards) == pytest.approx(0.9)
    assert Estimate.of([0.5]).half_width == math.inf


def test_student_s_distribution() -> None:
    """From tables."""
    for degrees, value in ((1, 12.706), (10, 2.228), (11, 2.201), (19, 2.093), (30, 2.042), (120, 1.980)):
        assert t_975(degrees) == pytest.approx(value, rel=1e-3)


def test_a_year_of_16384_ranks_takes_seconds() -> None:
    """Less than 10 s of processor time on one core, with an interval of less than a tenth of a per cent."""
    hazards = MODELS["meta-rsc1"].hazards(2048)
    plan = plan_of(POLICIES["safepoint-snapshots"], Platform(), 16_384, hazards)
    began_s = time.process_time()
    simulated = simulate(plan, hazards, duration_s=365 * DAY_S, num_trials=20, seed=7)
    assert time.process_time() - began_s < 10
    assert simulated.ettr.half_width < 0.001
    assert simulated.num_interruptions > 80_000


@given(st.integers(1, 200_000), st.floats(1, 1e10), st.none() | st.floats(1, 1e5))
def test_a_commit_never_costs_less_on_more_ranks(ranks: int, state_bytes: float, requests: float | None) -> None:
    platform = Platform(state_bytes=state_bytes, store_requests_per_s=requests)
    few, many = commit_cost(platform, ranks), commit_cost(platform, 2 * ranks)
    assert many.vote_s >= few.vote_s
    assert many.durable_s >= few.durable_s
    assert many.num_requests > few.num_requests
    assert many.marks_bytes >= 2 * few.marks_bytes
    limited = dataclasses.replace(platform, store_requests_per_s=(requests or 1e5) / 2)
    assert commit_cost(limited, ranks).durable_s >= few.durable_s


def test_a_commit_by_hand() -> None:
    """16 ranks on 2 machines, 128 MiB each: 4 requests for a file; 2 marks, a read and a list for a machine."""
    platform = Platform(
        state_bytes=128 << 20,
        machine_bytes_per_s=64 << 20,
        store_bytes_per_s=128 << 20,
        store_requests_per_s=10,
    )
    cost = commit_cost(platform, 16)
    assert cost.transfer_s == 16
    assert (cost.file_requests, cost.num_requests) == (64, 64 + 2 * 4 + 2)
    assert cost.requests_s == 7.4
    assert cost.manifest_bytes == 16 * (220 + 2 * 37)
    assert cost.marks_bytes == 2 * cost.manifest_bytes
    assert commit_cost(platform, 1).vote_s < commit_cost(platform, 3).vote_s


def test_a_vote_needs_two_ranks() -> None:
    """One rank has no vote, and a job has at least one rank."""
    platform = Platform()
    assert [commit_cost(platform, count).vote_s for count in (1, 2, 3, 4, 5)] == pytest.approx(
        [0.0, 201e-6, 428e-6, 428e-6, 655e-6]
    )
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"num_ranks is {count}, and must be at least 1"):
            commit_cost(platform, count)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_values_out_of_range_are_refused(value: float) -> None:
    for name in ("state_bytes", "machine_bytes_per_s", "store_requests_per_s", "step_s", "machine_restart_s"):
        with pytest.raises(ValueError, match=name):
            Platform(**{name: value})
    with pytest.raises(ValueError, match="store_bytes_per_s"):
        Platform(store_bytes_per_s=0)
    for name in ("machine_per_day", "ranks_share", "waiting_s", "reclaims_per_day"):
        with pytest.raises(ValueError, match=name):
            FailureModel(name="bad", **{name: value})
    with pytest.raises(ValueError, match="add up"):
        FailureModel(name="bad", ranks_share=0.6, maintenance_share=0.6)
    with pytest.raises(ValueError, match="machines_per_rack"):
        FailureModel(name="bad", machines_per_rack=0)
    with pytest.raises(ValueError, match="num_machines"):
        MODELS["llama3"].hazards(0)
    with pytest.raises(ValueError, match="duration_s"):
        simulate(blocking(1, 1, 1), (), duration_s=-abs(value), num_trials=1, seed=0)
    with pytest.raises(ValueError, match="num_trials"):
        simulate(blocking(1, 1, 1), (), duration_s=1, num_trials=0, seed=0)
    with pytest.raises(ValueError, match="interval_s"):
        blocking(-abs(value), 1, 1)
    with pytest.raises(ValueError, match="stall_s"):
        blocking(1, -abs(value), 1)
