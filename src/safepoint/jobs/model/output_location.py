"""The output location of a job, independent of the process and the folder that asks."""

import contextlib
import os
from dataclasses import replace

from safepoint.jobs.model.spec import JobSpec
from safepoint.progress.record import Progress
from safepoint.storage.location import CLAIMS, parse_location, resolve_claim


def output_of(spec: JobSpec, progress: Progress | None) -> str | None:
    """The output location in full: the specification's, or the one that its ranks reported; None before that."""
    if spec.settings.output_dir is not None:
        return in_full(spec.settings.output_dir, spec.working_dir)
    reported = (progress.location or progress.output_dir) if progress is not None else ""
    with contextlib.suppress(ValueError):  # the record was altered
        return in_full(reported, spec.working_dir) if reported else None
    return None


def place_of(spec: JobSpec, output: str) -> str:
    """The folder or object store of an output location; equal texts are the same place."""
    location = parse_location(output)
    with contextlib.suppress(ValueError):  # no folder is known for the claim here
        location = resolve_claim(location, spec.env.get(CLAIMS, ""))
    return str(location.resolved(spec.working_dir))


def with_claims(spec: JobSpec) -> JobSpec:
    """The job with the folders that claims have now: a later command may run where they have others."""
    claims = os.environ.get(CLAIMS, "")
    return replace(spec, env={CLAIMS: claims, **spec.env}) if claims else spec


def in_full(output: str, working_dir: str) -> str:
    """An output location that is the same from every working folder."""
    return str(parse_location(output).resolved(working_dir))
