"""`safepoint plan interval`: the best time between checkpoints, and what other times cost."""

import math
from dataclasses import asdict
from typing import Annotated, Any

import typer

from safepoint.cli.commands.plan.formats import aligned, percent_text, remarks, time_text
from safepoint.cli.commands.plan.options import (
    Announced,
    Json,
    RanksOnly,
    Restart,
    Svg,
    check_shares,
    duration,
    inputs_line,
    refuse_ignored,
    time,
    write_picture,
)
from safepoint.cli.commands.plan.ranges import interval_warnings
from safepoint.cli.output import print_answer, table
from safepoint.errors import UsageError
from safepoint.estimates.interval import (
    SHORTEST_STEP_S,
    Interruptions,
    SaveTimes,
    best_interval_s,
    daly_s,
    productive_share,
    young_s,
)
from safepoint.planning.pictures import Axis, Curve, Mark, curves, rising_ticks

_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1 / math.sqrt(2), 1.0, math.sqrt(2), 2.0, 4.0, 8.0)
_POINTS = 60


def interval(
    context: typer.Context,
    mtbf: Annotated[
        str,
        time("Mean time between two interruptions of the job, such as 4h. Interruptions of all kinds count."),
    ],
    stall: Annotated[str, time("Time for which a save delays the training, such as 0.01s or 2m.")],
    durable: Annotated[
        str | None,
        time(
            "Time from the beginning of a save until the checkpoint is complete on the disk or in the store.",
            otherwise="the same as --stall",
        ),
    ] = None,
    copied: Annotated[
        str | None,
        time(
            "Time from the beginning of a save until its snapshot in memory is complete.",
            otherwise="the same as --stall",
        ),
    ] = None,
    restart: Restart = "0s",
    notice_restart: Annotated[
        str | None,
        time(
            "Time from an announced interruption until the ranks train again. It includes the save on SIGTERM.",
            otherwise="as --restart",
        ),
    ] = None,
    ranks_restart: Annotated[
        str | None,
        time("Like --restart, for interruptions that end training processes only.", otherwise="as --restart"),
    ] = None,
    snapshot_every: Annotated[
        str | None,
        time(
            "Training time between two snapshots that stay in memory, and become checkpoints only after an "
            "interruption.",
            otherwise="no such snapshots",
        ),
    ] = None,
    snapshot_stall: Annotated[str, time("Time for which such a snapshot delays the training.")] = "0s",
    announced: Announced = 0.0,
    ranks_only: RanksOnly = 0.0,
    svg: Svg = None,
    as_json: Json = False,
) -> None:
    """Compute the best time between two checkpoints.

    For several intervals, the table shows the share of the time that is lost, and how much larger this share is than
    with the best interval. Times have a unit: s, m, h or d. The best interval is exact if interruptions come at
    random with a constant rate. An announced interruption loses no work. An interruption that ends training processes
    only (--ranks-only) loses the work since the newest snapshot in memory. Any other interruption loses the work
    since the newest complete checkpoint.

    Exit codes: 0 the plan is printed; 2 an option is invalid, or the interruptions leave no time for productive work;
    13 the picture cannot be written.
    """
    stall_s = duration("--stall", stall)
    texts = {"durable": durable, "copied": copied}
    after_stall = {name: None if text is None else duration(f"--{name}", text) for name, text in texts.items()}
    for name, value in after_stall.items():
        if value is not None and value < stall_s:
            raise UsageError(
                f"--{name} {texts[name]} is shorter than --stall {stall}, but a save cannot be complete before the "
                "training goes on; both times begin with the save",
                hint=f"give at least {stall}, or leave --{name} out",
            )
    durable_s, copied_s = after_stall["durable"], after_stall["copied"]
    if durable_s is not None and copied_s is not None and copied_s > durable_s:
        raise UsageError(
            f"--copied {copied} is longer than --durable {durable}, but a save cannot be durable before its "
            "snapshot is complete",
            hint=f"give at most {durable} for --copied",
        )
    check_shares(announced, ranks_only)
    if snapshot_every is None:
        refuse_ignored(
            context,
            {"snapshot_stall": "--snapshot-stall"},
            "can be used only with --snapshot-every",
            "add --snapshot-every, such as --snapshot-every 30s",
        )
    if not ranks_only:
        refuse_ignored(
            context,
            {"ranks_restart": "--ranks-restart", "copied": "--copied"},
            "is for interruptions that end only ranks, and --ranks-only is 0",
            "add --ranks-only, such as --ranks-only 0.5",
        )
    if not announced:
        refuse_ignored(
            context,
            {"notice_restart": "--notice-restart"},
            "is for announced interruptions, and --announced is 0",
            "add --announced, such as --announced 0.5",
        )
    times = SaveTimes(
        stall_s=stall_s,
        durable_s=after_stall["durable"],
        copied_s=after_stall["copied"],
        restart_s=duration("--restart", restart),
        announced_restart_s=None if notice_restart is None else duration("--notice-restart", notice_restart),
        ranks_restart_s=None if ranks_restart is None else duration("--ranks-restart", ranks_restart),
        snapshot_every_s=None
        if snapshot_every is None
        else duration("--snapshot-every", snapshot_every, least_s=0.001),
        snapshot_stall_s=duration("--snapshot-stall", snapshot_stall),
    )
    interruptions = Interruptions(
        between_s=duration("--mtbf", mtbf, least_s=1.0), announced=announced, ranks_only=ranks_only
    )
    best_s = best_interval_s(times, interruptions)
    at_best = productive_share(best_s, times, interruptions)
    # If there is no best interval, or if a save after each step is best, the table has intervals around the mean time
    # between interruptions. No interval in the table is shorter than the time that the store needs for a save.
    is_regular = SHORTEST_STEP_S < best_s < math.inf
    middle_s = best_s if is_regular else max(interruptions.between_s, times.durable_lag_s)
    rows = [_row(middle_s * factor, times, interruptions, at_best) for factor in _FACTORS]
    rows = [row for row in rows if row["interval_s"] >= times.durable_lag_s * (1 - 1e-9)]
    warnings = interval_warnings(times, interruptions, best_s, at_best)
    notes: list[str] = []
    if len(rows) < len(_FACTORS):
        notes.append(
            f"no interval is shorter than {time_text(times.durable_lag_s)}: each save waits until the previous save "
            "is durable"
        )
    document: dict[str, Any] = {
        "inputs": {**asdict(interruptions), **asdict(times)},
        "best_interval_s": best_s if is_regular else None if math.isinf(best_s) else 0.0,
        "productive": at_best,
        "young_s": young_s(stall_s, interruptions.between_s),
        "daly_s": daly_s(stall_s, interruptions.between_s),
        "intervals": rows,
        "warnings": warnings,
        "notes": notes,
    }
    unused = {"snapshot_stall"} if snapshot_every is None else ()
    lines = _lines(document, rows, inputs_line(context, leave_out=unused))
    if warnings or notes:
        lines += ["", *remarks(warnings, notes)]
    if svg is not None:
        document["picture"] = svg
        lines += ["", write_picture(svg, _picture(best_s, middle_s, times, interruptions))]
    print_answer(as_json, document, lines)


def _row(interval_s: float, times: SaveTimes, interruptions: Interruptions, at_best: float) -> dict[str, float]:
    productive = productive_share(interval_s, times, interruptions)
    return {
        "interval_s": interval_s,
        "lost_percent": 100 * (1 - productive),
        "more_than_best_percent": 100 * max(0.0, at_best - productive),
    }


def _lines(document: dict[str, Any], rows: list[dict[str, float]], inputs: str) -> list[str]:
    best_s = document["best_interval_s"]
    found = {None: "none: periodic saves gain nothing", 0.0: "after each step"}.get(best_s) or time_text(best_s)
    pages = [
        ("best interval", f"{found}; {percent_text(document['productive'])} of the time is productive work (ETTR)"),
        ("Young 1974", f"{time_text(document['young_s'])}: an approximation from --mtbf and --stall alone"),
        ("Daly 2006", f"{time_text(document['daly_s'])}: a closer approximation from the same two options"),
        ("inputs", inputs),
    ]
    cells = [
        [
            time_text(row["interval_s"]),
            percent_text(row["lost_percent"] / 100),
            percent_text(row["more_than_best_percent"] / 100),
        ]
        for row in rows
    ]
    return [*aligned(pages), "", *table(("INTERVAL", "TIME LOST", "EXTRA TIME LOST"), cells)]


def _picture(best_s: float, middle_s: float, times: SaveTimes, interruptions: Interruptions) -> str:
    """A picture of the lost time, as a share of all time, for each interval between checkpoints.

    The longest interval is ten times the middle interval. The shortest interval is a tenth of the middle interval, or
    the shortest possible interval if that is longer.
    """
    low_s, high_s = max(middle_s / 10, times.durable_lag_s), middle_s * 10
    points_s = [low_s * (high_s / low_s) ** (number / _POINTS) for number in range(_POINTS + 1)]
    kinds = [
        ("with these inputs", interruptions),
        ("if each interruption loses a machine", Interruptions(between_s=interruptions.between_s)),
    ]
    series = [
        Curve(
            name=name,
            points=[(at_s, 100 * (1 - productive_share(at_s, times, kind))) for at_s in points_s],
        )
        for name, kind in kinds[: 2 if interruptions.announced or interruptions.ranks_only else 1]
    ]
    most = max(value for curve in series for _, value in curve.points)
    ticks = [low_s * (high_s / low_s) ** (number / 4) for number in range(5)]
    if best_s <= SHORTEST_STEP_S:
        least = "The least time is lost with a save after each step"
    else:
        is_finite = math.isfinite(best_s)
        least = f"The least time is lost at {time_text(best_s)}" if is_finite else "Periodic saves gain nothing"
    marks: list[Mark] = []
    if SHORTEST_STEP_S < best_s < math.inf:
        lost = 1 - productive_share(best_s, times, interruptions)
        marks.append(Mark(best_s, 100 * lost, f"best: {time_text(best_s)}, {percent_text(lost)} lost"))
    return curves(
        "Time lost, by the interval between checkpoints",
        f"{least}; the scale of the intervals is logarithmic.",
        Axis(
            label="interval between checkpoints (logarithmic)",
            ticks=ticks,
            texts=[time_text(tick) for tick in ticks],
            is_log=True,
        ),
        Axis(label="time lost, in %", ticks=rising_ticks(0.0, most or 1.0)),
        series,
        marks,
    )
