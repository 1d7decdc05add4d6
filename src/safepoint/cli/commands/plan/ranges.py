"""Checks whether the formulas of the plans have an answer for the inputs, and whether the answer is meaningful.

If nothing can be computed, a function raises UsageError. If a figure is outside of the range of its formula, or the
inputs contradict what the formula assumes, a function returns warnings. The answer contains these warnings.
"""

import math
from collections.abc import Collection, Iterable, Mapping

from safepoint.cli.commands.plan.formats import count_text, percent_text, time_text
from safepoint.errors import UsageError
from safepoint.estimates.interval import Interruptions, SaveTimes
from safepoint.planning.commit_costs import CommitCost, Platform
from safepoint.planning.costs import Loss, Situation
from safepoint.planning.failures import Hazard, between_s
from safepoint.planning.policies import OnNotice, Policy

LEAST_SHARE = 5e-6
"""A smaller productive share counts as none: it is less than 26 seconds of work in two months."""
_HALF = 0.5
_YOUNG_RANGE = 0.1
"""If the stall is below this share of the mean time between interruptions, Young's interval is at most a fifth too
long."""
_FEW_INTERRUPTIONS = 10
_RESTART = "most restarts are interrupted before the ranks train again"
_SAVE = "most saves are interrupted before they are durable"
_STALL = "most saves are interrupted before the training continues"
_CONSEQUENCES = {
    "--restart": _RESTART,
    "--notice-restart": _RESTART,
    "--ranks-restart": _RESTART,
    "--replace": _RESTART,
    "--stall": _STALL,
    "--blocking": _STALL,
    "--durable": _SAVE,
    "--notice-save": "most saves on SIGTERM take longer than the training between two interruptions",
    "--copied": "most interruptions come before the snapshot is complete",
    "--snapshot-every": "most interruptions come before the first snapshot",
    "--snapshot-stall": "most interruptions come before the training continues after a snapshot",
    "--step": "most steps are interrupted before they end, and Safepoint saves only at the end of a step",
}


def longer(values: Mapping[str, float | None], between: str, mean_s: float) -> list[str]:
    """A warning for each option whose time is longer than the mean time between interruptions.

    Args:
        values: the seconds of each option; None if the option is not set.
        between: the name of the mean time in the warning, such as `--mtbf`.
        mean_s: the mean time between interruptions, in seconds.
    """
    return [
        f"{option} ({time_text(value)}) is longer than {between} ({time_text(mean_s)}): {_CONSEQUENCES[option]}"
        for option, value in values.items()
        if value is not None and value > mean_s
    ]


# ---- plan interval -------------------------------------------------------------------------------------------------


def interval_warnings(times: SaveTimes, interruptions: Interruptions, best_s: float, at_best: float) -> list[str]:
    """Warnings about the inputs and the figures of `plan interval`.

    Args:
        times: the times of saves and restarts.
        interruptions: how often the training is interrupted.
        best_s: the best interval, in seconds.
        at_best: the productive share with the best interval.

    Raises:
        UsageError: even with the best interval, the interruptions leave no time for productive work.
    """
    mean_s = interruptions.between_s
    values = {
        "--stall": times.stall_s,
        "--durable": times.durable_s,
        "--copied": times.copied_s,
        "--restart": times.restart_s,
        "--notice-restart": times.announced_restart_s,
        "--ranks-restart": times.ranks_restart_s,
        "--snapshot-every": times.snapshot_every_s,
        "--snapshot-stall": times.snapshot_stall_s,
    }
    found = longer(values, "--mtbf", mean_s)
    if at_best < LEAST_SHARE:
        raise _nothing_survives(found, "with any interval", "--mtbf")
    if times.stall_s > _YOUNG_RANGE * mean_s:
        share = percent_text(times.stall_s / mean_s)
        found.append(
            f"Young's formula is for a --stall of less than a tenth of --mtbf, but this --stall is {share} of "
            "--mtbf: the interval of this formula is too long"
        )
    if times.stall_s >= 2 * mean_s:
        found.append(
            "Daly's formula is for a --stall of less than twice --mtbf: with a longer --stall, it gives --mtbf itself"
        )
    every_s = times.snapshot_every_s
    if every_s is not None and times.snapshot_stall_s > every_s:
        found.append(
            f"--snapshot-stall ({time_text(times.snapshot_stall_s)}) is longer than --snapshot-every "
            f"({time_text(every_s)}): most of the time, the training waits for snapshots"
        )
    if every_s is not None and math.isfinite(best_s) and every_s >= best_s:
        found.append(
            f"--snapshot-every ({time_text(every_s)}) is not shorter than the best interval ({time_text(best_s)}): "
            "these snapshots protect no more work than the saves do"
        )
    return [*found, *_low(at_best, "even with the best interval")]


def _nothing_survives(found: Collection[str], what: str, between: str) -> UsageError:
    why = "; ".join(found) or f"the inputs leave no time between two interruptions ({between})"
    return UsageError(
        f"{why}. So less than {percent_text(LEAST_SHARE)} of the time is productive work {what}; nothing was "
        "computed",
        hint="check the units of these times: s, m, h or d",
    )


def _low(productive: float, when: str) -> list[str]:
    if productive >= _HALF:
        return []
    return [f"only {percent_text(productive)} of the time is productive work, {when}"]


# ---- plan cost -----------------------------------------------------------------------------------------------------


def cost_warnings(situation: Situation, found: Collection[Loss]) -> list[str]:
    """Warnings about the inputs and the figures of a month.

    Raises:
        UsageError: under every policy with saves, the interruptions leave no time for productive work.
    """
    mean_s = situation.interruptions.between_s
    with_saves = [loss for loss in found if loss.policy != "no checkpoints"]
    values = {
        "--restart": situation.restart_s,
        "--blocking": situation.blocking_s,
        "--stall": situation.stall_s,
        "--durable": situation.durable_s,
        "--notice-save": situation.notice_save_s if situation.interruptions.announced else None,
    }
    warnings = longer(values, "the mean time between --interruptions", mean_s)
    if all(loss.productive < LEAST_SHARE for loss in with_saves):
        raise _nothing_survives(warnings, "under any policy", "--interruptions")
    if situation.interval_s is not None and situation.interval_s >= situation.job_s:
        warnings.append(
            f"--interval ({time_text(situation.interval_s)}) is not shorter than --job "
            f"({time_text(situation.job_s)}): the job ends before its first periodic save. The figures are for a "
            "longer job"
        )
    return warnings


def endless_note(found: Iterable[Loss], situation: Situation) -> list[str]:
    """A note if a job without checkpoints never ends in practice."""
    return [
        f"no checkpoints: a job of {time_text(situation.job_s)} practically never ends, with an interruption every "
        f"{time_text(situation.interruptions.between_s)} on average"
        for loss in found
        if loss.policy == "no checkpoints" and loss.productive < LEAST_SHARE
    ]


# ---- plan simulate -------------------------------------------------------------------------------------------------


def check_step(step_s: float, duration_s: float) -> None:
    """Refuse a step that does not end within the job.

    Raises:
        UsageError: the step is longer than the job.
    """
    if step_s > duration_s:
        raise UsageError(
            f"--step ({time_text(step_s)}) is longer than --days ({time_text(duration_s)}): no step would end, and "
            "Safepoint saves only at the end of a step; nothing was computed",
            hint="check the unit of --step: s, m, h or d",
        )


def simulation_warnings(
    platform: Platform,
    costs: Mapping[int, CommitCost],
    hazards: Mapping[int, tuple[Hazard, ...]],
    policies: Collection[Policy],
    *,
    duration_s: float,
    waiting_s: float,
) -> list[str]:
    """Warnings about the inputs of a simulation.

    Args:
        platform: the machines.
        costs: the cost of a commit, by the number of ranks.
        hazards: the interruptions, by the number of ranks.
        policies: the policies to compare.
        duration_s: how long the job runs, in seconds.
        waiting_s: the mean time in the queue after a preemption, in seconds.
    """
    found: list[str] = []
    for option, seconds in (
        ("--restart", platform.ranks_restart_s),
        ("--replace", platform.machine_restart_s),
        ("--waiting", waiting_s),
    ):
        if seconds >= duration_s and any(hazards.values()):
            found.append(
                f"{option} ({time_text(seconds)}) is not shorter than --days ({time_text(duration_s)}): after an "
                "interruption with this delay, the job does not train again"
            )
    values = {
        "--step": platform.step_s,
        "--restart": platform.ranks_restart_s,
        "--replace": platform.machine_restart_s,
    }
    seen: set[str] = set()
    for count, of_count in hazards.items():  # the numbers of ranks rise, and so do the rates of interruptions
        mean_s = between_s(of_count)
        for option, seconds in values.items():
            if seconds > mean_s and option not in seen:
                (text,) = longer({option: seconds}, "the mean time between interruptions", mean_s)
                found.append(f"{_from(count)}, {text}")
                seen.add(option)
        durable_s = costs[count].durable_s
        if durable_s > mean_s and "save" not in seen:
            found.append(
                f"{_from(count)}, a save is durable after {time_text(durable_s)}, which is longer "
                f"than the mean time between interruptions ({time_text(mean_s)}): {_SAVE}"
            )
            seen.add("save")
    found += [
        f"{policy.name} saves every {time_text(policy.fixed_interval_s)}, and the job runs for "
        f"{time_text(duration_s)} (--days): this policy makes no periodic save"
        for policy in policies
        if policy.fixed_interval_s is not None and policy.fixed_interval_s >= duration_s
    ]
    return found


def simulation_notes(
    hazards: Mapping[int, tuple[Hazard, ...]],
    needed_s: Mapping[tuple[int, str], float],
    policies: Collection[Policy],
    *,
    duration_s: float,
    num_trials: int,
) -> list[str]:
    """The notes for a reader of a simulation.

    Args:
        hazards: the interruptions, by the number of ranks.
        needed_s: the seconds from an announcement until everything is durable, by the number of ranks and the
            policy's name.
        policies: the policies to compare.
        duration_s: how long the job runs, in seconds.
        num_trials: the number of simulated jobs.
    """
    notes: list[str] = []
    if num_trials == 1:
        notes.append("one trial has no confidence interval: give --trials 2 or more to get an interval")
    rare = [
        count
        for count, of_count in hazards.items()
        if of_count and num_trials * duration_s / between_s(of_count) < _FEW_INTERRUPTIONS
    ]
    if rare and num_trials > 1:
        notes.append(
            f"up to --ranks {max(rare)}, fewer than {_FEW_INTERRUPTIONS} interruptions are expected in all trials "
            "together: the uncertainty is larger than the printed ±. Increase --trials or --days"
        )
    late_by_text: dict[str, list[str]] = {}
    for policy in policies:
        if policy.on_notice is not OnNotice.SAVE:
            continue
        late = [
            (count, hazard.notice_s, needed_s[count, policy.name])
            for count, of_count in hazards.items()
            for hazard in of_count
            if 0 < hazard.notice_s < needed_s[count, policy.name]
        ]
        if late:
            count, notice_s, after_s = late[0]
            text = (
                f"{_from(count)}, a save on SIGTERM takes {time_text(after_s)}, and is lost if the processes are "
                f"killed {time_text(notice_s)} after SIGTERM"
            )
            late_by_text.setdefault(text, []).append(policy.name)
    return notes + [f"{', '.join(names)}: {text}" for text, names in late_by_text.items()]


def _from(count: int) -> str:
    return "from 1 rank on" if count == 1 else f"from {count_text(count)} ranks on"
