"""Where a job's checkpoints are, seen from any process and any folder."""

import contextlib
import os
from dataclasses import replace

from safepoint.jobs.model.spec import JobSpec
from safepoint.progress.record import Progress
from safepoint.storage.location import CLAIMS, parse_location, resolve_claim


def output_of(spec: JobSpec, progress: Progress | None) -> str | None:
    """The location of a job's checkpoints, in full: as its owner said, or as its ranks told; None when nobody has."""
    said = spec.settings.output_dir
    if said is not None:
        return in_full(said, spec.working_dir)
    told = (progress.location or progress.output_dir) if progress is not None else ""
    with contextlib.suppress(ValueError):  # a record that somebody has altered
        return in_full(told, spec.working_dir) if told else None
    return None


def place_of(spec: JobSpec, output: str) -> str:
    """The folder or object store that a job's output location means; two that are equal are one place."""
    location = parse_location(output)
    with contextlib.suppress(ValueError):  # no folder is known for the claim here
        location = resolve_claim(location, spec.env.get(CLAIMS, ""))
    return str(location.resolved(spec.working_dir))


def with_claims(spec: JobSpec) -> JobSpec:
    """The job with the folders that stand for claims now: a later command may run where others do."""
    claims = os.environ.get(CLAIMS, "")
    return replace(spec, env={CLAIMS: claims, **spec.env}) if claims else spec


def in_full(output: str, working_dir: str) -> str:
    """An output location that means the same wherever it is read."""
    return str(parse_location(output).resolved(working_dir))
