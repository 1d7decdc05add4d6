"""What a job is doing and why, in a sentence, and why it needs a person's attention."""

import enum
from dataclasses import dataclass

from safepoint.foundation import clock
from safepoint.foundation.units import format_age, format_duration, plural
from safepoint.jobs.model.job_place import Summary
from safepoint.jobs.model.job_progress import newest_save
from safepoint.jobs.model.states import JobState
from safepoint.progress.record import Progress, State

SILENT_S = 300.0
"""In seconds. A job needs attention if its last report is older than this time, and older than the time of ten
steps."""
_LONG_PREEMPTED_S = 3600.0
_STEPS_OF_SILENCE = 10
_LATE = 2.0
"""A save is late if the newest save is older than this multiple of the time between saves."""


class Urgency(enum.IntEnum):
    """How much a job needs attention."""

    NONE = 0
    NOTICE = 1
    WARNING = 2
    PROBLEM = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Why a job needs attention.

    Args:
        urgency: the urgency of the most urgent reason.
        reasons: each a phrase, the most urgent first; empty if nothing needs attention.
    """

    urgency: Urgency = Urgency.NONE
    reasons: tuple[str, ...] = ()

    def with_problem(self, reason: str) -> "Attention":
        """A copy with one more reason, whose urgency is `PROBLEM`."""
        return Attention(urgency=Urgency.PROBLEM, reasons=(reason, *self.reasons))


def attention_of(job: Summary, progress: Progress | None, *, changed: str | None = None) -> Attention:
    """Whether a job needs attention, and why: for example, because it failed, or because its storage is nearly full.

    Args:
        job: the job.
        progress: its last report; None if there is no report.
        changed: when its state last changed, RFC 3339 UTC; None if this is unknown.
    """
    found: list[tuple[Urgency, str]] = []
    if job.state is JobState.FAILED:
        found.append((Urgency.PROBLEM, job.message or "it has failed"))
    if job.state is JobState.INADMISSIBLE:
        found.append((Urgency.PROBLEM, job.message or "it cannot start until something is corrected"))
    if job.state is JobState.PREEMPTED and changed is not None and age_s(changed) > _LONG_PREEMPTED_S:
        found.append((Urgency.WARNING, f"preempted for {format_age(age_s(changed))}"))
    if job.state is JobState.RUNNING and progress is not None and not progress.state.is_end:
        found += _of_running(progress)
    found.sort(key=lambda one: -one[0])
    return Attention(urgency=found[0][0], reasons=tuple(reason for _, reason in found)) if found else Attention()


def _of_running(progress: Progress) -> list[tuple[Urgency, str]]:
    found: list[tuple[Urgency, str]] = []
    silent_s = age_s(progress.time)
    if silent_s > max(SILENT_S, _STEPS_OF_SILENCE * (progress.step_s or 0.0)) and progress.state is State.TRAINING:
        found.append((Urgency.PROBLEM, f"no progress for {format_age(silent_s)}"))
    for one in progress.space:
        if one.saves_left == 0:
            found.append((Urgency.PROBLEM, f"the {one.place} has no room for the next save"))
        elif one.is_low:
            found.append((Urgency.WARNING, f"the {one.place} is nearly full"))
    if progress.saves.unsaved and not progress.saves.count:
        found.append((Urgency.WARNING, f"{plural(progress.saves.unsaved, 'save')} did not become durable"))
    interval_s = save_interval_s(progress)
    if interval_s is not None and progress.safe_time is not None and age_s(progress.safe_time) > _LATE * interval_s:
        found.append((Urgency.WARNING, f"the newest save is {format_age(age_s(progress.safe_time))} old"))
    return found


def save_interval_s(progress: Progress) -> float | None:
    """The mean time between saves since the newest start of the ranks, in seconds; None before the second save, or if
    a time is missing or invalid."""
    if progress.saves.count < 2 or progress.safe_time is None or not progress.started:
        return None
    try:
        return (
            max(0.0, clock.parse_utc(progress.safe_time) - clock.parse_utc(progress.started)) / progress.saves.count
        )
    except ValueError:
        return None


def sentence_of(
    job: Summary, progress: Progress | None, *, queue_place: int | None = None, verified_s: float | None = None
) -> str:
    """What the job is doing and why, for a person.

    Args:
        job: the job.
        progress: its last report; None if there is no report.
        queue_place: its position among the jobs that wait, from 1; None if it does not wait, or if the position is
            unknown.
        verified_s: how long its last resume took to verify the checkpoint, in seconds; None if this is not known.
    """
    why = job.message.rstrip(".")
    if queue_place is not None:
        why = f"{why}; number {queue_place} in the queue" if why else f"number {queue_place} in the queue"
    newest = None if progress is None else newest_save(progress)
    if job.state.is_over or job.state is JobState.DELETING:
        return _ended(job, progress, why)
    if job.state is JobState.SUSPENDED:
        step = job.safe_step if job.safe_step is not None else (progress.safe_step if progress else None)
        at = "nothing is saved" if step is None else f"step {step:,} is saved"
        more = "" if not why or why == at.replace(",", "") else f" {_upper(why)}."
        return f"Suspended: {at}. It continues with “resume”.{more}"
    if job.state is JobState.RUNNING and progress is not None and not progress.state.is_end:
        return _running(progress, newest or "", verified_s)
    beginnings = {
        JobState.CREATED: "Is about to start",
        JobState.QUEUED: "Waits",
        JobState.INADMISSIBLE: "Cannot start",
        JobState.STARTING: "Starts; its ranks do not train yet",
        JobState.RESUMING: "Loads its newest checkpoint",
        JobState.SUSPENDING: "Saves, then stops",
        JobState.PREEMPTED: "Stopped in favour of another job; it resumes by itself",
        JobState.RESTARTING: "Was interrupted; it starts again by itself",
        JobState.RUNNING: "Runs; its ranks have not reported progress yet",
    }
    beginning = beginnings.get(job.state, str(job.state))
    if job.state is JobState.RESUMING and progress is not None and progress.resumed_step is not None:
        beginning += f" (step {progress.resumed_step:,}{_verified(verified_s)})"
    return f"{beginning}: {why}." if why else f"{beginning}."


def _verified(seconds: float | None) -> str:
    return "" if seconds is None else f", which was verified in {format_duration(seconds)}"


def _running(progress: Progress, newest: str, verified_s: float | None) -> str:
    doing = {
        State.STARTING: "Starts to train",
        State.EVALUATING: "Evaluates",
        State.SAVING: "Saves",
    }.get(progress.state, "Trains")
    at = f"step {progress.step:,}" + (f" of {progress.max_steps:,}" if progress.max_steps else "")
    left = f", {format_duration(progress.remaining_s)} left" if progress.remaining_s else ""
    step, verified = progress.resumed_step, _verified(verified_s)
    resumed = f" Resumed from step {step:,}{verified}." if step is not None else ""
    saved = newest if progress.safe_step is None else f"the newest save is {newest}"
    return f"{doing}: {at}{left}; {saved}.{resumed}"


def _ended(job: Summary, progress: Progress | None, why: str) -> str:
    if job.state is JobState.DELETING:
        return "Is being deleted."
    step = f" at step {progress.step:,}" if progress is not None and progress.step else ""
    verb = "Finished" if job.state is JobState.COMPLETE else "Failed"
    return f"{verb}{step}: {why}." if why else f"{verb}{step}."


def age_s(time: str) -> float:
    """Seconds since a time (RFC 3339 UTC); 0 for a time in the future, and for an invalid text."""
    try:
        return max(0.0, clock.wall_s() - clock.parse_utc(time))
    except ValueError:
        return 0.0


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
