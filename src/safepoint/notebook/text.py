"""Jobs and checkpoints as short texts, for terminals and for notebooks without HTML."""

from collections.abc import Sequence

from safepoint.answers.job_documents import event_rows
from safepoint.errors import printable
from safepoint.estimates.job_needs import JobNeeds
from safepoint.foundation import clock
from safepoint.foundation.units import format_bytes, format_duration, plural
from safepoint.jobs.model.records import JobEvent
from safepoint.notebook.views import CheckpointView, JobView

_MOST_ROWS = 20


def job_line(view: JobView) -> str:
    """A job in a line: its name, its state, its step and what is saved."""
    progress = view.progress
    parts = [f"{view.name}: {view.state}"]
    if progress is not None and (progress.step or progress.max_steps):
        at = f"step {progress.step:,}" + (f" of {progress.max_steps:,}" if progress.max_steps else "")
        loss = "" if progress.loss is None else f", loss {progress.loss:.4g}"
        parts.append(at + loss)
    parts.append("nothing is saved yet" if view.safe_step is None else f"step {view.safe_step:,} is saved")
    return printable(", ".join(parts))


def job_text(view: JobView, *, note: str = "") -> str:
    """A job in a few lines: what it is doing, what needs attention, and its receipt.

    Args:
        view: the job.
        note: a sentence to add; may be empty.
    """
    lines = [f"{view.name}: {view.state}", f"  {view.sentence}"]
    lines += [f"  {_sentence(reason)}" for reason in view.reasons]
    lines += [f"  If it had to stop now: {view.risk}."] if view.risk else []
    lines += [f"  {name}: {text}" for name, text in view.receipt]
    lines += [f"  {note}"] if note else []
    return "\n".join(printable(line) for line in lines)


def jobs_text(views: Sequence[JobView]) -> str:
    """A list of jobs: a line for each of the newest jobs."""
    left_out = max(0, len(views) - _MOST_ROWS)
    lines = [f"{plural(len(views), 'job')}, oldest first"] + [f"  … {left_out} older"] * bool(left_out)
    return "\n".join([*lines, *(f"  {job_line(view)}" for view in views[left_out:])])


def checkpoints_text(rows: Sequence[CheckpointView]) -> str:
    """A list of checkpoints: a line for each of the first checkpoints."""
    lines = [
        f"  {row.name}: {row.state}, {row.trigger or 'without a manifest'}, {format_bytes(row.size_bytes)}, "
        f"saved {clock.as_utc(row.created_s)[:19]}Z"
        for row in rows[:_MOST_ROWS]
    ]
    more = [f"  … {len(rows) - _MOST_ROWS} more"] if len(rows) > _MOST_ROWS else []
    return "\n".join(printable(line) for line in [plural(len(rows), "checkpoint"), *lines, *more])


def plan_facts(needs: JobNeeds) -> list[tuple[str, str]]:
    """What a job will need, as names and values; empty if it is not known."""
    if needs.problem:
        return []
    memory = format_bytes(needs.snapshot_bytes) if needs.snapshot_bytes else "none"
    facts = [
        ("Model", needs.model),
        ("Assumed training", needs.training),
        ("A checkpoint", f"about {format_bytes(needs.checkpoint_bytes)}"),
        ("With any strategy, in 32 bits", f"at most {format_bytes(needs.most_bytes)}"),
        ("Host memory for snapshots", f"{memory} on the first node"),
        ("A save on SIGTERM", f"about {format_duration(needs.save_s)}"),
        ("Grace period that it needs", f"{needs.least_grace_s} s"),
    ]
    if needs.local_bytes is not None:
        limit = f"; no limit is set: {needs.unlimited}" if needs.unlimited else ""
        facts.append(("Local folder of a pod", f"at most {format_bytes(needs.local_bytes)}{limit}"))
    return facts


def plan_warning(needs: JobNeeds, grace_s: float | None) -> str:
    """A warning if a save does not fit into the grace period, or if the needs are not known; otherwise empty.

    Args:
        needs: the needs of the job.
        grace_s: the grace period in seconds; None if it is not set.
    """
    if needs.problem:
        return f"The needs of the job are not known: {needs.problem}."
    if grace_s is None or needs.least_grace_s <= grace_s:
        return ""
    return (
        f"A save does not fit into the grace period of {grace_s:g} s: set "
        f"grace_period_seconds={needs.least_grace_s}, or save to a faster place."
    )


def plan_text(needs: JobNeeds, grace_s: float | None) -> str:
    """What a job will need, in a few lines; see `plan_warning`."""
    lines = [f"{name}: {value}" for name, value in plan_facts(needs)]
    return "\n".join(printable(line) for line in (*lines, *filter(None, [plan_warning(needs, grace_s)])))


def event_lines(events: Sequence[JobEvent]) -> list[str]:
    """Events as lines, oldest first."""
    return [
        printable(f"{row['time'][11:19]} {row['what']} by {row['actor']}" + (f": {row['why']}" if row["why"] else ""))
        for row in reversed(event_rows(events))
    ]


def _sentence(reason: str) -> str:
    return f"{reason[:1].upper()}{reason[1:]}."
