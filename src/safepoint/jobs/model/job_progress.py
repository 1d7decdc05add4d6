"""Derives facts from a job's reported progress: its output location, its newest save, and the risk of stopping it."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace

from safepoint.foundation import clock
from safepoint.foundation.units import format_age, format_duration
from safepoint.jobs.model.job_place import Job
from safepoint.jobs.model.spec import JobSpec
from safepoint.progress.record import Progress
from safepoint.storage.location import CLAIMS, parse_location, resolve_claim

_DAY_S = 86400


def output_of(spec: JobSpec, progress: Progress | None) -> str | None:
    """The full output location of a job; None if it is unknown.

    The location comes from the specification of the job. If the specification names no location, it comes from the
    reports of the ranks.
    """
    if spec.settings.output_dir is not None:
        return absolute_location(spec.settings.output_dir, spec.working_dir)
    reported = (progress.location or progress.output_dir) if progress is not None else ""
    with contextlib.suppress(ValueError):  # the location in the record is invalid: the record was altered
        return absolute_location(reported, spec.working_dir) if reported else None
    return None


def place_of(spec: JobSpec, output: str) -> str:
    """An output location as an absolute path or a URI.

    If this value is the same for two jobs, they write to the same location.
    """
    location = parse_location(output)
    with contextlib.suppress(ValueError):  # the claim has no folder on this machine
        location = resolve_claim(location, spec.env.get(CLAIMS, ""))
    return str(location.resolved(spec.working_dir))


def with_claims(spec: JobSpec) -> JobSpec:
    """Add this environment's folders for claims (volumes) to the `env` of a job, unless `env` sets them already.

    Later commands then use the same folders for this job, even if their environment has other folders.
    """
    claims = os.environ.get(CLAIMS, "")
    return replace(spec, env={CLAIMS: claims, **spec.env}) if claims else spec


def absolute_location(output: str, working_dir: str) -> str:
    """The output location, independent of the current folder."""
    return str(parse_location(output).resolved(working_dir))


def risk_of_suspending(job: Job, progress: Progress | None) -> str | None:
    """A warning when a save may not fit into the grace period.

    None if a save fits, if the duration of a save is unknown, or if the job does not run. The time limit of a
    save is the grace period minus `margin_s`, because the save must end before the platform's SIGKILL.
    """
    settings = job.settings
    if not job.state.holds_slots or progress is None or progress.state.is_end:
        return None
    needed_s = progress.save_needed_s
    if needed_s is None or needed_s <= settings.grace_s - settings.margin_s:
        return None
    newest = newest_save(progress)
    saved = newest if progress.safe_step is None else f"newest save: {newest}"
    return (
        f"{saved}; a save takes about {format_duration(needed_s)}, "
        f"and only {settings.grace_s - settings.margin_s:g} s of the {settings.grace_s:g} s grace period can be used"
    )


def newest_save(progress: Progress) -> str:
    """The newest committed step and its age."""
    if progress.safe_step is None:
        return "nothing is saved yet"
    step = f"step {progress.safe_step:,}"
    if progress.safe_time is None:
        return step
    age_s = max(0.0, clock.wall_s() - clock.parse_utc(progress.safe_time))
    if age_s < 60:
        return f"{step}, {age_s:.0f} s ago"
    return f"{step}, {format_duration(age_s) if age_s < _DAY_S else format_age(age_s)} ago"


def in_use_message(names: Sequence[str], output: str) -> str:
    """The message for checkpoints that are not deleted, because the jobs `names` use them, too."""
    who = f"job {names[0]} also uses" if len(names) == 1 else f"the jobs {', '.join(names)} also use"
    return f"{who} the checkpoints in {output}; nothing was deleted"
