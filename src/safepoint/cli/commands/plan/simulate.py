"""`safepoint plan simulate`: a cluster that does not exist, with its interruptions, under different policies."""

import math
from dataclasses import asdict, replace
from time import perf_counter
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
from safepoint.cli.output import print_answer, table
from safepoint.errors import UsageError
from safepoint.foundation.units import format_bytes, format_duration, nearest, plural
from safepoint.planning.commit_costs import CommitCost, Platform, commit_cost
from safepoint.planning.failures import DAY_S, MODELS, FailureModel, between_s
from safepoint.planning.pictures import Axis, Curve, curves
from safepoint.planning.policies import MEASURED, POLICIES, Policy, expected_ettr, plan_of
from safepoint.planning.simulation import Simulated
from safepoint.planning.simulation import simulate as simulate_plan

_RANKS = "8,64,512,4096,16384,65536,131072"
_NAMES = {"name", "source"}
_MOST_RANKS = 10_000_000
_MOST_COUNTS = 64
_MOST_INTERRUPTIONS = 30_000_000
"""About two minutes on one core."""


def simulate(
    context: typer.Context,
    ranks: Annotated[str, typer.Option(metavar="N[,N…]", help="Numbers of ranks to compare.")] = _RANKS,
    days: Annotated[float, typer.Option(metavar="DAYS", help="How long the job runs.")] = 30.0,
    trials: Annotated[int, typer.Option(metavar="N", help="Simulated jobs for each number and policy.")] = 20,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random numbers.")] = 0,
    failures: Annotated[
        str, typer.Option(metavar="MODEL", help=f"Published failure model: {', '.join(MODELS)}, or none.")
    ] = "llama3",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Compare only this policy; may be given several times: {', '.join(POLICIES)}.",
            show_default="all of them",
        ),
    ] = None,
    state: Annotated[str, size_of("What each rank writes in a save.")] = "4G",
    ranks_per_machine: Annotated[int, typer.Option(metavar="N", help="Ranks on each machine.")] = 8,
    machine_rate: Annotated[str, size_of("Bytes that a machine writes to the store in a second.")] = "2G",
    store_rate: Annotated[str, size_of("Bytes that the store takes from all machines in a second.")] = "2T",
    store_requests: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Writing requests that the store answers in a second; 3500 is a prefix of S3.",
            show_default="no limit",
        ),
    ] = None,
    step: Annotated[str, time("How long a step takes.")] = "5s",
    restart: Annotated[str, time("Restart of the ranks on the same machines, without loading.")] = "1m",
    replace_machine: Annotated[
        str, typer.Option("--replace", metavar="TIME", help="The same after a machine was lost.")
    ] = "5m",
    machine_failures: Annotated[str | None, rate_of_model("Failures of each machine, such as 2/year.")] = None,
    ranks_only: Annotated[float | None, share_of_model("Share of these that end ranks only, 0 to 1.")] = None,
    rack_failures: Annotated[str | None, rate_of_model("Failures of each rack as a whole.")] = None,
    machines_per_rack: Annotated[int, typer.Option(metavar="N", help="Machines in each rack.")] = 16,
    preemptions: Annotated[str | None, rate_of_model("Preemptions of the job by a queue.")] = None,
    notice: Annotated[str | None, time_of_model("Grace period of a preemption or maintenance.")] = None,
    waiting: Annotated[str, time("Time in the queue after a preemption.")] = "0s",
    reclaims: Annotated[str | None, rate_of_model("Reclaims of each machine by a cloud (spot).")] = None,
    reclaim_notice: Annotated[str | None, time_of_model("How long before a reclaim it is announced.")] = None,
    svg: Svg = None,
    as_json: Json = False,
) -> None:
    """Simulate interruptions of a job on many machines, under different policies.

    Prints the effective training time ratio (ETTR: productive time, of the time in which the job had its machines)
    and the lost hours, each with its 95 % confidence interval, and what a commit costs as the ranks grow. Times have
    a unit (s, m, h, d), rates a period (4/week), and sizes are those of Kubernetes (4G). The costs that differ
    between programs are measured: docs/planning.md has their sources. The same seed gives the same result.
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
        raise UsageError(f"--days {days:g} is not a number of days from 0 to 36525", hint="for example --days 30")
    _count("--trials", trials, 100_000)
    duration_s = days * DAY_S
    # A trial takes as long as some interruptions, even if it has none.
    expected = sum(
        trials * len(chosen) * (50 + duration_s / between_s(model.hazards(platform.machines(count))))
        for count in counts
    )
    if expected > _MOST_INTERRUPTIONS:
        raise UsageError(
            f"this would be about {expected:,.0f} interruptions to simulate; nothing was done",
            hint="reduce --trials, --days or --ranks",
        )
    began_s = perf_counter()
    results: dict[int, dict[str, tuple[Simulated, float]]] = {}
    for count in counts:
        hazards = model.hazards(platform.machines(count))
        results[count] = {}
        for one in chosen:
            plan = plan_of(one, platform, count, hazards)
            simulated = simulate_plan(plan, hazards, duration_s=duration_s, num_trials=trials, seed=seed)
            results[count][one.name] = simulated, expected_ettr(plan, hazards)
    took_s = perf_counter() - began_s
    costs = {count: commit_cost(platform, count) for count in counts}
    document = _document(model, platform, seed, trials, days, results, costs)
    lines = _lines(model, platform, seed, trials, days, results, costs, took_s)
    if svg is not None:
        document["picture"] = str(svg)
        lines += ["", write_picture(svg, picture(model, results))]
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
    """Refuse options about interruptions that the model does not have."""
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
            reason = f"for {what}, and there are none in --failures {model.name} with the other options"
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


def _document(
    model: FailureModel,
    platform: Platform,
    seed: int,
    trials: int,
    days: float,
    results: dict[int, dict[str, tuple[Simulated, float]]],
    costs: dict[int, CommitCost],
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for count, by_policy in results.items():
        between = between_s(model.hazards(platform.machines(count)))
        for name, (simulated, expected) in by_policy.items():
            rows.append(
                {
                    "ranks": count,
                    "policy": name,
                    "exists": POLICIES[name].exists,
                    "between_s": between if math.isfinite(between) else None,
                    "ettr": simulated.ettr.mean,
                    "ettr_half_width": _finite(simulated.ettr.half_width),
                    "expected_ettr": expected,
                    "lost_hours": simulated.lost_hours.mean,
                    "lost_hours_half_width": _finite(simulated.lost_hours.half_width),
                    "repeated_hours": simulated.hours("repeated_s").mean,
                    "stalled_hours": simulated.hours("stalled_s").mean,
                    "down_hours": simulated.hours("down_s").mean,
                    "waiting_hours": simulated.hours("waiting_s").mean,
                    "interruptions": simulated.num_interruptions,
                }
            )
    return {
        "failures": model.name,
        "source": model.source,
        "inputs": {
            **asdict(platform),
            **{name: value for name, value in asdict(model).items() if name not in _NAMES},
        },
        "measured": MEASURED,
        "seed": seed,
        "trials": trials,
        "days": days,
        "results": rows,
        "commits": [
            {
                "ranks": count,
                "vote_s": cost.vote_s,
                "transfer_s": cost.transfer_s,
                "requests": cost.num_requests,
                "requests_s": cost.requests_s,
                "manifest_bytes": cost.manifest_bytes,
                "marks_bytes": cost.marks_bytes,
                "durable_s": cost.durable_s,
            }
            for count, cost in costs.items()
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _lines(
    model: FailureModel,
    platform: Platform,
    seed: int,
    trials: int,
    days: float,
    results: dict[int, dict[str, tuple[Simulated, float]]],
    costs: dict[int, CommitCost],
    took_s: float,
) -> list[str]:
    lines = [
        f"failures   {model.name}" + (f" ({model.source})" if model.source else ""),
        f"costs      {MEASURED}",
        *_platform(platform),
        f"simulated  {plural(trials, 'job')} of {days:g} days each, seed {seed}, in {format_duration(took_s)}",
    ]
    for count, by_policy in results.items():
        between = between_s(model.hazards(platform.machines(count)))
        every = f"interrupted every {format_duration(between)}" if math.isfinite(between) else "never interrupted"
        lines += ["", f"{plural(count, 'rank')}, {every}"]
        rows = [
            [
                name if POLICIES[name].exists else f"{name} (not available)",
                f"{100 * simulated.ettr.mean:.2f} {_range(100 * simulated.ettr.half_width, 2)}",
                f"{simulated.lost_hours.mean:.1f} {_range(simulated.lost_hours.half_width, 1)}",
                f"{simulated.hours('repeated_s').mean:.1f}",
                f"{simulated.hours('stalled_s').mean:.1f}",
                f"{simulated.hours('down_s').mean:.1f}",
            ]
            for name, (simulated, _) in by_policy.items()
        ]
        lines += table(("POLICY", "ETTR %", "LOST HOURS", "DONE AGAIN", "STALLED", "DOWN"), rows)
    head = ("RANKS", "VOTE", "BYTES SENT IN", "REQUESTS", "ANSWERED IN", "MANIFEST", "ALL MARKS", "DURABLE IN")
    rows = [
        [
            str(count),
            f"{1000 * cost.vote_s:.1f} ms",
            format_duration(cost.transfer_s),
            f"{cost.num_requests:,}",
            format_duration(cost.requests_s) if platform.store_requests_per_s else "-",
            format_bytes(cost.manifest_bytes),
            format_bytes(cost.marks_bytes),
            format_duration(cost.durable_s),
        ]
        for count, cost in costs.items()
    ]
    return [*lines, "", "a commit of Safepoint", *table(head, rows)]


def _platform(platform: Platform) -> list[str]:
    requests = platform.store_requests_per_s
    rates = (
        f"{_rate(platform.machine_bytes_per_s)} from a machine, {_rate(platform.store_bytes_per_s)} into the store"
    )
    ranks = plural(platform.ranks_per_machine, "rank")
    again, after = (format_duration(value) for value in (platform.ranks_restart_s, platform.machine_restart_s))
    return [
        f"platform   {ranks} on a machine, each with {format_bytes(round(platform.state_bytes))}; {rates}"
        + ("" if requests is None else f", and {requests:,.0f} requests/s"),
        f"job        steps of {format_duration(platform.step_s)}; restarts of {again}, and of {after} after a lost "
        "machine",
    ]


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(round(bytes_per_s))}/s"


def _range(half_width: float, digits: int) -> str:
    return f"± {half_width:.{digits}f}" if math.isfinite(half_width) else ""


def picture(model: FailureModel, results: dict[int, dict[str, tuple[Simulated, float]]]) -> str:
    """The ETTR over the number of ranks, a curve for each policy."""
    names = next(iter(results.values()))
    series = [
        Curve(
            name=name if POLICIES[name].exists else f"{name} *",
            points=[(count, 100 * by_policy[name][0].ettr.mean) for count, by_policy in results.items()],
            half_widths=[100 * by_policy[name][0].ettr.half_width for by_policy in results.values()],
        )
        for name in names
    ]
    counts = list(results)
    first, last = results[counts[0]], results[counts[-1]]
    at_ends = "; ".join(
        f"{name} {100 * first[name][0].ettr.mean:.0f} to {100 * last[name][0].ettr.mean:.0f} %" for name in names
    )
    ticks = counts if len(counts) > 1 else [counts[0], counts[0] * 2]
    note = " (* not available yet)" if not all(POLICIES[name].exists for name in names) else ""
    return curves(
        f"Effective training time, failures as in {model.name}",
        f"The effective training time ratio of each policy for {counts[0]:,} to {counts[-1]:,} ranks: {at_ends}.",
        Axis(label=f"ranks{note}", ticks=ticks, texts=[_short(tick) for tick in ticks], is_log=True),
        Axis(label="% of the time that is productive", ticks=[0, 20, 40, 60, 80, 100]),
        series,
    )


def _short(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else f"{count:,}"
