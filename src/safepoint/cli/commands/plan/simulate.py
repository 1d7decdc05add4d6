"""`safepoint plan simulate`: simulates the interruptions of a job on a cluster, under different policies."""

import math
from dataclasses import replace
from typing import Annotated, Any

import typer

from safepoint.cli.commands.plan.options import (
    Json,
    Svg,
    amount,
    duration,
    per_second,
    rate_of_model,
    refuse_ignored,
    share,
    share_of_model,
    size,
    size_of,
    time,
    time_of_model,
    write_picture,
)
from safepoint.cli.commands.plan.ranges import check_step, simulation_notes, simulation_warnings
from safepoint.cli.commands.plan.simulate_answer import Simulation, document_of, lines_of, picture_of
from safepoint.cli.output import print_answer
from safepoint.errors import UsageError
from safepoint.foundation.units import nearest
from safepoint.planning.commit_costs import Platform, commit_cost
from safepoint.planning.failures import DAY_S, MODELS, FailureModel, between_s
from safepoint.planning.policies import POLICIES, Policy, expected_ettr, plan_of
from safepoint.planning.simulation import Simulated
from safepoint.planning.simulation import simulate as simulate_plan

_RANKS = "8,64,512,4096,16384,65536,131072"
_MOST_RANKS = 10_000_000
_MOST_COUNTS = 64
_MOST_INTERRUPTIONS = 30_000_000
"""The maximum number of interruptions to simulate. They take about two minutes on one core."""


def simulate(
    context: typer.Context,
    ranks: Annotated[
        str, typer.Option(metavar="N[,N…]", help="Numbers of ranks (training processes) to compare.")
    ] = _RANKS,
    days: Annotated[float, typer.Option(metavar="DAYS", help="Days for which the job runs.")] = 30.0,
    trials: Annotated[
        int, typer.Option(metavar="N", help="Simulated jobs for each number of ranks and each policy.")
    ] = 20,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random numbers.")] = 0,
    failures: Annotated[
        str, typer.Option(metavar="MODEL", help=f"Published failure model: {', '.join(MODELS)}; or none.")
    ] = "llama3",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Simulate only this policy; repeat the option for several. Policies: {', '.join(POLICIES)}.",
            show_default="all of them",
        ),
    ] = None,
    state: Annotated[str, size_of("Bytes that each rank writes in a save.")] = "4G",
    ranks_per_machine: Annotated[
        int, typer.Option(metavar="N", help="Ranks on each machine, usually one for each GPU.")
    ] = 8,
    machine_rate: Annotated[str, size_of("Bytes that a machine can write to the store in a second.")] = "2G",
    store_rate: Annotated[
        str, size_of("Bytes that the store can receive from all machines together in a second.")
    ] = "2T",
    store_requests: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Write requests that the store answers in a second. S3 answers 3500 for each prefix.",
            show_default="no limit",
        ),
    ] = None,
    step: Annotated[str, time("Time that a training step takes.")] = "5s",
    restart: Annotated[
        str, time("Time that a restart on the same machines takes, without the time to load the state.")
    ] = "1m",
    replace_machine: Annotated[
        str,
        typer.Option(
            "--replace",
            metavar="TIME",
            help="Time that a restart takes if a machine was lost, without the time to load the state.",
        ),
    ] = "5m",
    machine_failures: Annotated[str | None, rate_of_model("How often each machine fails, such as 2/year.")] = None,
    ranks_only: Annotated[
        float | None,
        share_of_model("Share of the machines' failures that end only training processes: a number from 0 to 1."),
    ] = None,
    rack_failures: Annotated[str | None, rate_of_model("How often each rack fails as a whole.")] = None,
    machines_per_rack: Annotated[int, typer.Option(metavar="N", help="Machines in each rack.")] = 16,
    preemptions: Annotated[str | None, rate_of_model("How often a queue preempts the job.")] = None,
    notice: Annotated[
        str | None, time_of_model("Time from SIGTERM to SIGKILL at a preemption or maintenance.")
    ] = None,
    waiting: Annotated[str, time("Mean time that the job waits in the queue after a preemption.")] = "0s",
    reclaims: Annotated[
        str | None, rate_of_model("How often a cloud takes each machine back (spot instances).")
    ] = None,
    reclaim_notice: Annotated[
        str | None,
        time_of_model("Time between the cloud's announcement of a reclaim and the loss of the machine."),
    ] = None,
    svg: Svg = None,
    as_json: Json = False,
) -> None:
    """Simulate a job on many machines, with interruptions.

    A policy says when a program saves, such as hf-hourly: Hugging Face's Trainer, with a save every hour.
    For each policy, the answer has the effective training time ratio (ETTR) and the hours lost, each with its 95 %
    confidence interval (±). The ETTR is the share of productive work in the time for which the job had its machines.
    The answer also has the cost of a commit of Safepoint for each number of ranks.

    A time has a unit: s, m, h or d. A rate has a period, such as 4/week. Sizes are written as in Kubernetes, such as
    4G. The cost of a save with each program comes from benchmarks. The same seed gives the same result.
    docs/planning.md explains policies, models and columns.

    Exit codes: 0 the simulation is printed; 2 an option is invalid; 13 the picture cannot be written.
    """
    model = _model(
        failures,
        machine_failures,
        ranks_only,
        rack_failures,
        machines_per_rack,
        preemptions,
        notice,
        waiting,
        reclaims,
        reclaim_notice,
    )
    _refuse_ignored(context, model)
    platform = Platform(
        ranks_per_machine=_count("--ranks-per-machine", ranks_per_machine, 1024),
        state_bytes=size("--state", state),
        machine_bytes_per_s=size("--machine-rate", machine_rate),
        store_bytes_per_s=size("--store-rate", store_rate),
        store_requests_per_s=None if store_requests is None else _requests(store_requests),
        step_s=duration("--step", step, least_s=0.001),
        ranks_restart_s=duration("--restart", restart),
        machine_restart_s=duration("--replace", replace_machine),
    )
    chosen = [_policy(name) for name in policy] if policy else list(POLICIES.values())
    counts = _counts(ranks)
    if not (math.isfinite(days) and 0 < days <= 36_525):
        raise UsageError(f"--days {days:g} is not a number above 0, up to 36525", hint="for example --days 30")
    _count("--trials", trials, 100_000)
    duration_s = days * DAY_S
    check_step(platform.step_s, duration_s)
    # The simulation of a trial without interruptions takes as long as the simulation of 50 interruptions.
    expected = sum(
        trials * len(chosen) * (50 + duration_s / between_s(model.hazards(platform.machines(count))))
        for count in counts
    )
    if expected > _MOST_INTERRUPTIONS:
        raise UsageError(
            f"this would be about {expected:,.0f} interruptions to simulate, which takes too long; nothing was "
            "computed",
            hint="reduce --trials, --days or --ranks",
        )
    hazards = {count: model.hazards(platform.machines(count)) for count in counts}
    costs = {count: commit_cost(platform, count) for count in counts}
    needed_s: dict[tuple[int, str], float] = {}
    results: dict[int, dict[str, tuple[Simulated, float]]] = {}
    for count in counts:
        of_count = hazards[count]
        results[count] = {}
        for one in chosen:
            plan = plan_of(one, platform, count, of_count)
            simulated = simulate_plan(plan, of_count, duration_s=duration_s, num_trials=trials, seed=seed)
            results[count][one.name] = simulated, expected_ettr(plan, of_count)
            needed_s[count, one.name] = plan.notice_needed_s
    notes = simulation_notes(hazards, needed_s, chosen, duration_s=duration_s, num_trials=trials)
    simulation = Simulation(
        model=model,
        platform=platform,
        seed=seed,
        trials=trials,
        days=days,
        hazards=hazards,
        results=results,
        costs=costs,
        warnings=simulation_warnings(
            platform, costs, hazards, chosen, duration_s=duration_s, waiting_s=model.waiting_s
        ),
        notes=notes + [f"* {one.name} is not available yet" for one in chosen if not one.exists],
    )
    document, lines = document_of(simulation), lines_of(simulation)
    if svg is not None:
        document["picture"] = svg
        lines += ["", write_picture(svg, picture_of(simulation))]
    print_answer(as_json, document, lines)


def _model(
    name: str,
    machine_failures: str | None,
    ranks_only: float | None,
    rack_failures: str | None,
    machines_per_rack: int,
    preemptions: str | None,
    notice: str | None,
    waiting: str,
    reclaims: str | None,
    reclaim_notice: str | None,
) -> FailureModel:
    if name != "none" and name not in MODELS:
        raise UsageError(f"--failures {name!r} is not a failure model", hint=nearest(name, [*MODELS, "none"]))
    model = MODELS.get(name) or FailureModel(name="none")
    changes: dict[str, Any] = {
        "machines_per_rack": _count("--machines-per-rack", machines_per_rack, 100_000),
        "waiting_s": duration("--waiting", waiting),
    }
    for option, field, rate in (
        ("--machine-failures", "machine_per_day", machine_failures),
        ("--rack-failures", "rack_per_day", rack_failures),
        ("--preemptions", "preemptions_per_day", preemptions),
        ("--reclaims", "reclaims_per_day", reclaims),
    ):
        if rate is not None:
            changes[field] = per_second(option, rate) * DAY_S
    if ranks_only is not None:
        changes["ranks_share"] = share("--ranks-only", ranks_only)
        if ranks_only + model.maintenance_share > 1:
            raise UsageError(
                f"--ranks-only {ranks_only:g} is too large: {model.maintenance_share:.2f} of the failures of {name} "
                "are maintenance",
                hint=f"give at most {1 - model.maintenance_share:.2f}",
            )
    if notice is not None:
        changes["preemption_notice_s"] = duration("--notice", notice)
    if reclaim_notice is not None:
        changes["reclaim_notice_s"] = duration("--reclaim-notice", reclaim_notice)
    return replace(model, **changes)


def _refuse_ignored(context: typer.Context, model: FailureModel) -> None:
    """Refuse options for kinds of interruptions that the model does not have."""
    of_machines, racks = model.machine_per_day, model.rack_per_day
    preemptions, reclaims = model.preemptions_per_day, model.reclaims_per_day
    announced = preemptions + of_machines * model.maintenance_share
    others = of_machines * (1 - model.ranks_share) + racks + preemptions + reclaims
    for rate, parameter, option, what, hint in (
        (of_machines, "ranks_only", "--ranks-only", "failures of machines", "--machine-failures 6/year"),
        (racks, "machines_per_rack", "--machines-per-rack", "failures of racks", "--rack-failures 1/year"),
        (preemptions, "waiting", "--waiting", "preemptions", "--preemptions 4/week"),
        (announced, "notice", "--notice", "preemptions and maintenance", "--preemptions 4/week"),
        (reclaims, "reclaim_notice", "--reclaim-notice", "reclaims", "--reclaims 2/month"),
        (
            of_machines * model.ranks_share,
            "restart",
            "--restart",
            "failures of ranks only",
            "--machine-failures 6/year --ranks-only 0.5",
        ),
        (others, "replace_machine", "--replace", "other failures", "--machine-failures 6/year"),
    ):
        if not rate:
            reason = f"is for {what}, and there are none in --failures {model.name} with the other options"
            refuse_ignored(context, {parameter: option}, reason, f"leave it out, or add {hint}")


def _policy(name: str) -> Policy:
    if name not in POLICIES:
        raise UsageError(f"--policy {name!r} is not a policy", hint=nearest(name, POLICIES))
    return POLICIES[name]


def _counts(text: str) -> list[int]:
    counts: list[int] = []
    for part in text.split(","):
        word = part.strip()
        if not (word.isascii() and word.isdigit() and len(word) <= 8 and 0 < int(word) <= _MOST_RANKS):
            raise UsageError(
                f"--ranks {text!r}: {word!r} is not a number of ranks from 1 to {_MOST_RANKS:,}",
                hint="for example --ranks 8,1024,16384",
            )
        counts.append(int(word))
    if len(set(counts)) > _MOST_COUNTS:
        raise UsageError(
            f"--ranks has {len(set(counts))} numbers, and at most {_MOST_COUNTS} are compared",
            hint="for example --ranks 8,1024,16384",
        )
    return sorted(set(counts))


def _count(option: str, value: int, most: int) -> int:
    if not 1 <= value <= most:
        raise UsageError(f"{option} {value} is not a number from 1 to {most:,}", hint=f"for example {option} 8")
    return value


def _requests(value: float) -> float:
    if amount("--store-requests", value) < 1:
        raise UsageError(
            f"--store-requests {value:g} is less than one request in a second",
            hint="for example --store-requests 3500",
        )
    return value
