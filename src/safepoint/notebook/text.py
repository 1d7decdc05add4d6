"""Jobs and checkpoints as short texts, for terminals and for notebooks without HTML."""

from collections.abc import Sequence

from safepoint.answers.job_documents import event_rows
from safepoint.errors import printable
from safepoint.foundation import clock
from safepoint.foundation.units import format_bytes, plural
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
    """A list of jobs: a line for each of the newest."""
    left_out = max(0, len(views) - _MOST_ROWS)
    lines = [f"{plural(len(views), 'job')}, oldest first"] + [f"  … {left_out} older"] * bool(left_out)
    return "\n".join([*lines, *(f"  {job_line(view)}" for view in views[left_out:])])


def checkpoints_text(rows: Sequence[CheckpointView]) -> str:
    """A list of checkpoints: a line for each of the first."""
    lines = [
        f"  {row.name}: {row.state}, {row.trigger or 'without a manifest'}, {format_bytes(row.size_bytes)}, "
        f"saved {clock.as_utc(row.created_s)[:19]}Z"
        for row in rows[:_MOST_ROWS]
    ]
    more = [f"  … {len(rows) - _MOST_ROWS} more"] if len(rows) > _MOST_ROWS else []
    return "\n".join(printable(line) for line in [plural(len(rows), "checkpoint"), *lines, *more])


def event_lines(events: Sequence[JobEvent]) -> list[str]:
    """Events as lines, oldest first."""
    return [
        printable(f"{row['time'][11:19]} {row['what']} by {row['actor']}" + (f": {row['why']}" if row["why"] else ""))
        for row in reversed(event_rows(events))
    ]


def _sentence(reason: str) -> str:
    return f"{reason[:1].upper()}{reason[1:]}."
