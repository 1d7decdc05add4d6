"""Shows a simulation as tables, as a JSON document, or as a picture."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from safepoint.cli.commands.plan.formats import (
    aligned,
    count_text,
    hours_text,
    percent_range_text,
    percent_text,
    range_text,
    remarks,
    size_text,
    speed_text,
    time_text,
)
from safepoint.cli.output import table
from safepoint.foundation.units import plural
from safepoint.planning.commit_costs import CommitCost, Platform
from safepoint.planning.failures import DAY_S, FailureModel, Hazard, between_s
from safepoint.planning.pictures import Axis, Curve, curves, rising_ticks
from safepoint.planning.policies import MEASURED, POLICIES
from safepoint.planning.simulation import Simulated

_NAMES = {"name", "source"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulation: its inputs and its results.

    Args:
        model: the failure model: how often each kind of interruption happens.
        platform: the machines.
        seed: the seed of the random numbers.
        trials: the number of simulated jobs for each number of ranks and each policy.
        days: how long a job runs, in days.
        hazards: the interruptions, by the number of ranks.
        results: the result of the trials, and the ETTR that the formula gives; for each number of ranks, by the name
            of the policy.
        costs: the cost of a commit, by the number of ranks.
        warnings: a warning for each input or figure that is outside of the range of the model.
        notes: other facts that a reader has to know.
    """

    model: FailureModel
    platform: Platform
    seed: int
    trials: int
    days: float
    hazards: dict[int, tuple[Hazard, ...]]
    results: dict[int, dict[str, tuple[Simulated, float]]]
    costs: dict[int, CommitCost]
    warnings: Sequence[str]
    notes: Sequence[str]


def document_of(simulation: Simulation) -> dict[str, Any]:
    """The simulation for a program."""
    rows: list[dict[str, Any]] = []
    for count, by_policy in simulation.results.items():
        between = between_s(simulation.hazards[count])
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
    model = simulation.model
    return {
        "failures": model.name,
        "source": model.source,
        "inputs": {
            **asdict(simulation.platform),
            **{name: value for name, value in asdict(model).items() if name not in _NAMES},
        },
        "measured": MEASURED,
        "seed": simulation.seed,
        "trials": simulation.trials,
        "days": simulation.days,
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
            for count, cost in simulation.costs.items()
        ],
        "warnings": [*simulation.warnings],
        "notes": [*simulation.notes],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---- for people ----------------------------------------------------------------------------------------------------


def lines_of(simulation: Simulation) -> list[str]:
    """The simulation as lines for people."""
    model = simulation.model
    lines = aligned(
        [
            ["failures", model.name + (f" ({model.source})" if model.source else "")],
            ["interruptions", _interruptions(model)],
            ["platform", _platform(simulation.platform)],
            ["job", _job(simulation.platform)],
            ["save costs", f"measured: {MEASURED}"],
            [
                "simulated",
                f"{plural(simulation.trials, 'job')} of {simulation.days:g} days for each row; seed "
                f"{simulation.seed}",
            ],
            ["ETTR", "effective training time ratio: the share of the time that is productive work"],
        ]
    )
    for count, by_policy in simulation.results.items():
        between = between_s(simulation.hazards[count])
        every = f"interrupted every {time_text(between)}" if math.isfinite(between) else "never interrupted"
        ranks = "1 rank" if count == 1 else f"{count_text(count)} ranks"
        waits = any(simulated.hours("waiting_s").mean for simulated, _ in by_policy.values())
        rows = [_row(name, simulated, expected, waits=waits) for name, (simulated, expected) in by_policy.items()]
        head = ["POLICY", "ETTR", "BY FORMULA", "HOURS LOST", "DONE AGAIN", "STALLED", "DOWN"]
        head += [*(["IN QUEUE"] if waits else []), "INTERRUPTIONS"]
        lines += ["", f"{ranks}, {every}", *table(head, rows)]
    return [*lines, "", "a commit of Safepoint", *_commits(simulation), *_remarks(simulation)]


def _remarks(simulation: Simulation) -> list[str]:
    found = remarks(simulation.warnings, simulation.notes)
    return ["", *found] if found else []


def _row(name: str, simulated: Simulated, expected: float, *, waits: bool) -> list[str]:
    lost = simulated.lost_hours
    return [
        _shown(name),
        percent_range_text(simulated.ettr.mean, simulated.ettr.half_width),
        percent_text(expected),
        f"{hours_text(lost.mean)}{range_text(lost.half_width, 1)}",
        *(hours_text(simulated.hours(kind).mean) for kind in ("repeated_s", "stalled_s", "down_s")),
        *([hours_text(simulated.hours("waiting_s").mean)] if waits else []),
        count_text(simulated.num_interruptions),
    ]


def _shown(name: str) -> str:
    """The name of a policy. A star marks a policy that no program offers yet; a note explains the star."""
    return name if POLICIES[name].exists else f"{name} *"


def _commits(simulation: Simulation) -> list[str]:
    is_limited = simulation.platform.store_requests_per_s is not None
    head = ("RANKS", "VOTE", "BYTES SENT IN", "REQUESTS", "ANSWERED IN", "MANIFEST", "ALL MARKS", "DURABLE IN")
    rows = [
        [
            count_text(count),
            time_text(cost.vote_s),
            time_text(cost.transfer_s),
            count_text(cost.num_requests),
            time_text(cost.requests_s) if is_limited else "-",
            size_text(cost.manifest_bytes),
            size_text(cost.marks_bytes),
            time_text(cost.durable_s),
        ]
        for count, cost in simulation.costs.items()
    ]
    return table(head, rows)


def _interruptions(model: FailureModel) -> str:
    """The interruptions of the model as text. Rates are written as mean times."""
    found: list[str] = []
    if model.machine_per_day:
        parts = [f"each machine fails every {_every(model.machine_per_day)}"]
        if model.ranks_share:
            parts.append(f"{percent_text(model.ranks_share)} of the failures end ranks only")
        if model.maintenance_share:
            parts.append(
                f"{percent_text(model.maintenance_share)} are maintenance, {_announced(model.preemption_notice_s)}"
            )
        found.append(", ".join(parts))
    if model.rack_per_day:
        machines = plural(model.machines_per_rack, "machine")
        found.append(f"each rack of {machines} fails every {_every(model.rack_per_day)}")
    if model.preemptions_per_day:
        found.append(
            f"a queue preempts the job every {_every(model.preemptions_per_day)}, "
            f"{_announced(model.preemption_notice_s)}, and the job then waits for {time_text(model.waiting_s)} on "
            "average"
        )
    if model.reclaims_per_day:
        found.append(
            f"each machine is reclaimed every {_every(model.reclaims_per_day)}, {_announced(model.reclaim_notice_s)}"
        )
    return "; ".join(found) or "none"


def _every(per_day: float) -> str:
    return time_text(DAY_S / per_day)


def _announced(notice_s: float) -> str:
    return f"announced {time_text(notice_s)} before" if notice_s else "not announced"


def _platform(platform: Platform) -> str:
    requests = platform.store_requests_per_s
    return (
        f"{plural(platform.ranks_per_machine, 'rank')} on a machine, each with {size_text(platform.state_bytes)}; "
        f"{speed_text(platform.machine_bytes_per_s)} from a machine, {speed_text(platform.store_bytes_per_s)} into "
        "the store" + ("" if requests is None else f", and {count_text(requests)} requests a second")
    )


def _job(platform: Platform) -> str:
    return (
        f"a step takes {time_text(platform.step_s)}; a restart takes {time_text(platform.ranks_restart_s)}, or "
        f"{time_text(platform.machine_restart_s)} if a machine was lost, and then the state is loaded"
    )


# ---- the picture ---------------------------------------------------------------------------------------------------


def picture_of(simulation: Simulation) -> str:
    """A picture of the ETTR by the number of ranks, with a curve for each policy."""
    results = simulation.results
    names = next(iter(results.values()))
    series = [
        Curve(
            name=_shown(name),
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
    ticks, texts = [*map(float, counts)], [*map(count_text, counts)]
    if len(counts) == 1:
        ticks, texts = [counts[0] / 2, *ticks, counts[0] * 2.0], ["", *texts, ""]
    star = "" if all(POLICIES[name].exists for name in names) else "; * not available yet"
    least = min(
        value - (half if math.isfinite(half) else 0.0)
        for curve in series
        for (_, value), half in zip(curve.points, curve.half_widths, strict=True)
    )
    y_ticks = rising_ticks(max(0.0, least), 100.0)
    start = "" if y_ticks[0] == 0 else f"; the axis begins at {y_ticks[0]:g} %"
    failures = "no failures" if simulation.model.name == "none" else f"failures as in {simulation.model.name}"
    return curves(
        f"Effective training time ratio (ETTR), {failures}",
        f"The effective training time ratio of each policy for {counts[0]:,} to {counts[-1]:,} ranks: {at_ends}.",
        Axis(label=f"ranks (logarithmic{star})", ticks=ticks, texts=texts, is_log=True),
        Axis(label=f"ETTR in %{start}", ticks=y_ticks),
        series,
    )
