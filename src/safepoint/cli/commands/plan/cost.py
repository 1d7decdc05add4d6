"""`safepoint plan cost`: what interruptions cost, under different policies or in the history of a job."""

import math
from dataclasses import asdict
from typing import Annotated, Any

import typer

from safepoint.answers.costs import MOST_SHOWN, cost_document, history_of
from safepoint.cli.cluster_options import Namespace, OnOfJob, open_jobs
from safepoint.cli.commands.jobs import complete_job
from safepoint.cli.commands.plan.formats import aligned, hours_text, money_text, percent_text, remarks, time_text
from safepoint.cli.commands.plan.options import (
    Announced,
    Json,
    RanksOnly,
    Restart,
    amount,
    check_shares,
    duration,
    inputs_line,
    per_second,
    refuse_ignored,
    time,
)
from safepoint.cli.commands.plan.ranges import cost_warnings, endless_note
from safepoint.cli.output import print_answer, table
from safepoint.errors import NotFoundError, UsageError
from safepoint.estimates.interval import SHORTEST_STEP_S, Interruptions
from safepoint.foundation import clock
from safepoint.foundation.units import plural
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.planning.costs import JobHistory, Loss, Situation, example_of_article, losses

_OF_A_MONTH = {
    "interruptions": "--interruptions",
    "announced": "--announced",
    "ranks_only": "--ranks-only",
    "job": "--job",
    "blocking": "--blocking",
    "stall": "--stall",
    "durable": "--durable",
    "notice_save": "--notice-save",
    "restart": "--restart",
}
_BESIDE_THE_EXAMPLE = {
    "for_": "--for",
    "on": "--on",
    "namespace": "--namespace",
    "price": "--price",
    "interval": "--interval",
    **_OF_A_MONTH,
}


def cost(
    context: typer.Context,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="JOB",
            help="Read the history of this job. Compute what the job lost, and what it would have lost without "
            "checkpoints, or with periodic saves only.",
            autocompletion=complete_job,
            show_default="a month under each policy",
        ),
    ] = None,
    price: Annotated[
        float, typer.Option(metavar="NUMBER", help="Price of an hour of all machines together, in any currency.")
    ] = 0.0,
    interruptions: Annotated[
        str, typer.Option(metavar="RATE", help="How often the job is interrupted, such as 4/week. All causes count.")
    ] = "4/week",
    announced: Announced = 1.0,
    ranks_only: RanksOnly = 0.0,
    job: Annotated[str, time("Time that the training would take without interruptions.")] = "72h",
    interval: Annotated[
        str | None,
        time(
            "Training time between two periodic saves.", otherwise="the best interval of each policy; with --for: 1h"
        ),
    ] = None,
    blocking: Annotated[
        str,
        time('Time for which the training waits for a save, with the policies "periodic" and "periodic and JIT".'),
    ] = "10m",
    stall: Annotated[str, time("Time for which a save of Safepoint delays the training.")] = "0.01s",
    durable: Annotated[
        str, time("Time from the beginning of a save of Safepoint until the checkpoint is complete.")
    ] = "10m",
    notice_save: Annotated[str, time("Time from SIGTERM until the checkpoint is complete.")] = "10m",
    restart: Restart = "0s",
    example: Annotated[
        bool,
        typer.Option(
            "--example",
            help="Print the example of Red Hat's article: the figures in the article, and the figures that the "
            "formulas give.",
        ),
    ] = False,
    on: OnOfJob = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Compute what interruptions cost, in hours and money.

    Without --for, the command compares what is lost in a month under four policies: no checkpoints; periodic
    checkpoints; periodic checkpoints and a save on SIGTERM (JIT, just in time); and Safepoint's snapshots in memory
    with JIT. The defaults of --interruptions, --job, --blocking and --notice-save come from Red Hat's article on
    just-in-time checkpoints. Money has the currency of --price.

    Exit codes: 0 the costs are printed; 2 an option is invalid, or the interruptions leave no time for productive
    work; 10 there is no such job, or it has not trained.
    """
    amount("--price", price)
    interval_s = None if interval is None else duration("--interval", interval, least_s=0.001)
    if example:
        refuse_ignored(
            context,
            _BESIDE_THE_EXAMPLE,
            "cannot be used with --example, which has the inputs of the article",
            "leave out one of the two",
        )
        _print_example(as_json)
        return
    if for_ is not None:
        refuse_ignored(
            context,
            _OF_A_MONTH,
            "cannot be used with --for: the history of the job has its interruptions and their costs",
            "leave out one of the two",
        )
        with open_jobs(on, namespace, for_) as jobs:
            name = jobs.job(for_).name
            happened = jobs.events(name)
            is_here = isinstance(jobs, LocalJobs)
        history = history_of(happened)
        if not history.trained_s and not history.interruptions:
            why = (
                "its history has no training"
                if is_here
                else "none of the events that are still on the cluster names a step"
            )
            raise NotFoundError(
                f"the losses of job {name} cannot be computed: {why}",
                hint="without --for, the command computes a month under each policy",
            )
        _print_history(name, history, price, interval_s or 3600.0, as_json=as_json)
        return
    if on is not None or namespace is not None:
        raise UsageError(
            "--on and --namespace have no effect without --for: they say where the job of --for is",
            hint="add --for JOB",
        )
    check_shares(announced, ranks_only)
    if not announced:
        refuse_ignored(
            context,
            {"notice_save": "--notice-save"},
            "is for announced interruptions, and --announced is 0",
            "leave it out, or give another --announced",
        )
    per_s = per_second("--interruptions", interruptions)
    if per_s == 0:
        raise UsageError(
            "--interruptions is 0: nothing is lost; nothing was computed", hint="for example --interruptions 4/week"
        )
    stall_s = duration("--stall", stall)
    durable_s = duration("--durable", durable)
    if durable_s < stall_s:
        raise UsageError(
            f"--durable {durable} is shorter than --stall {stall}, but a save cannot be complete before the "
            "training goes on; both times begin with the save",
            hint=f"give at least {stall}",
        )
    situation = Situation(
        price_per_hour=price,
        interruptions=Interruptions(between_s=1 / per_s, announced=announced, ranks_only=ranks_only),
        job_s=duration("--job", job, least_s=1.0),
        restart_s=duration("--restart", restart),
        interval_s=interval_s,
        blocking_s=duration("--blocking", blocking),
        notice_save_s=duration("--notice-save", notice_save),
        stall_s=stall_s,
        durable_s=durable_s,
    )
    found = losses(situation)
    warnings = cost_warnings(situation, found)
    notes = endless_note(found, situation)
    notes += [
        f"{loss.policy}: the interval is {time_text(loss.interval_s)} in place of {interval}, because each save "
        "waits until the previous save is durable (--durable)"
        for loss in found
        if interval_s is not None and interval_s < loss.interval_s < math.inf
    ]
    document = {
        "price_per_hour": price,
        "inputs": asdict(situation),
        "policies": [_document(loss) for loss in found],
        "warnings": warnings,
        "notes": notes,
    }
    head = ("POLICY", "SAVES EVERY", "ETTR", "HOURS LOST IN A MONTH", "MONEY LOST IN A MONTH")
    rows = [
        [
            loss.policy,
            _interval(loss.interval_s),
            percent_text(loss.productive),
            hours_text(loss.hours),
            money_text(loss.money) if price else "-",
        ]
        for loss in found
    ]
    unused = () if announced else {"notice_save"}
    notes += [] if price else ["without --price, no money is computed"]
    lines = [
        *table(head, rows),
        "",
        *aligned(
            [
                ["ETTR", "effective training time ratio: the share of the time that is productive work"],
                ["inputs", inputs_line(context, leave_out=unused)],
            ]
        ),
        *remarks(warnings, notes),
    ]
    print_answer(as_json, document, lines)


def _interval(seconds: float) -> str:
    if math.isinf(seconds):
        return "-"
    return "each step" if seconds <= SHORTEST_STEP_S else time_text(seconds)


def _document(loss: Loss) -> dict[str, Any]:
    return {
        "policy": loss.policy,
        "interval_s": None
        if math.isinf(loss.interval_s)
        else loss.interval_s
        if loss.interval_s > SHORTEST_STEP_S
        else 0.0,
        "productive": loss.productive,
        "hours": loss.hours,
        "money": loss.money,
    }


def _print_example(as_json: bool) -> None:
    figures = example_of_article()
    rows = [[one.what, f"${one.stated:,.0f}", f"${money_text(one.computed)}", one.difference] for one in figures]
    document = {
        "figures": [
            {"what": one.what, "stated": one.stated, "computed": one.computed, "difference": one.difference}
            for one in figures
        ]
    }
    print_answer(as_json, document, table(("AT $55 AN HOUR", "STATED", "COMPUTED", "DIFFERENCE"), rows))


def _print_history(name: str, history: JobHistory, price: float, interval_s: float, *, as_json: bool) -> None:
    hourly = price / 3600
    notes: list[str] = []
    if interval_s >= history.trained_s:
        notes.append(
            f"--interval ({time_text(interval_s)}) is not shorter than the training "
            f"({time_text(history.trained_s)}): with this interval, the training would have made no periodic save"
        )
    if len(history.interruptions) > MOST_SHOWN:
        notes.append(
            f"of {plural(len(history.interruptions), 'interruption')}, only the newest {MOST_SHOWN} are listed; the "
            "sums count all"
        )
    document: dict[str, Any] = {
        **cost_document(name, history, price=price, interval_s=interval_s),
        "warnings": [],
        "notes": notes,
    }
    kinds: dict[str, float] = document["seconds"]
    every = time_text(interval_s)
    texts = (
        ("work that was lost", "lost"),
        ("time until the ranks trained again", "down"),
        ("work lost without checkpoints, at least", "without_checkpoints"),
        ("  how much less was lost in fact", "saved"),
        (f"work lost with a save every {every} and no JIT", "with_interval"),
        ("  how much less was lost in fact", "saved_against_interval"),
    )
    rows = [[text, _signed(kinds[kind]), money_text(kinds[kind] * hourly) if price else "-"] for text, kind in texts]
    count = plural(len(history.interruptions), "interruption")
    lines = [
        f"{name} trained for {time_text(history.trained_s)}, with {count}:",
        *table(("", "TIME", "MONEY"), rows),
    ]
    if history.interruptions:
        past_rows = [
            [
                clock.as_utc(past.time_s),
                str(past.cause),
                time_text(past.trained_s),
                time_text(past.lost_s),
                time_text(past.down_s),
                time_text(past.waiting_s),
            ]
            for past in history.interruptions[-MOST_SHOWN:]
        ]
        lines += ["", *table(("INTERRUPTED", "CAUSE", "HAD TRAINED", "LOST", "DOWN", "WAITED"), past_rows)]
    if notes:
        lines += ["", *remarks([], notes)]
    print_answer(as_json, document, lines)


def _signed(seconds: float) -> str:
    """The duration as text. A negative duration begins with a minus sign: another policy would have lost less."""
    return f"-{time_text(-seconds)}" if seconds < 0 else time_text(seconds)
