"""The steps that stopping a job now may lose."""

from safepoint.foundation import clock
from safepoint.foundation.units import format_age, format_duration
from safepoint.jobs.model.records import JobRecord
from safepoint.progress.record import Progress

_DAY_S = 86400


def risk_of_suspending(job: JobRecord, progress: Progress | None) -> str | None:
    """A sentence on what may be lost when the job stops now; None when a save fits its grace period.

    Ranks exit a margin before the platform's SIGKILL: a save has the grace period minus that margin.
    """
    settings = job.spec.settings
    if not job.state.holds_slots or progress is None or progress.state.is_end:
        return None
    needed_s = progress.save_needed_s
    if needed_s is None or needed_s <= settings.grace_s - settings.margin_s:
        return None
    safe = safe_point(progress)
    last = safe if progress.safe_step is None else f"last safe point {safe}"
    return (
        f"{last}; a save needs about {format_duration(needed_s)}, grace is {settings.grace_s:g} s, "
        f"of which {settings.grace_s - settings.margin_s:g} s can be used"
    )


def safe_point(progress: Progress) -> str:
    """The newest safe step and its age."""
    if progress.safe_step is None:
        return "nothing is saved yet"
    step = f"step {progress.safe_step:,}"
    if progress.safe_time is None:
        return step
    age_s = max(0.0, clock.wall_s() - clock.parse_utc(progress.safe_time))
    if age_s < 60:
        return f"{step}, {age_s:.0f} s ago"
    return f"{step}, {format_duration(age_s) if age_s < _DAY_S else format_age(age_s)} ago"
