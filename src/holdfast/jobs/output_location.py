"""Where a job's checkpoints are, seen from any process and any folder."""

import os

from holdfast.jobs.spec import JobSpec
from holdfast.storage.location import Scheme, parse_location
from holdfast.training.progress import Progress


def output_of(spec: JobSpec, progress: Progress | None) -> str | None:
    """The location of a job's checkpoints, in full: as its owner said, or as its ranks told; None when nobody has."""
    said = spec.settings.output_dir
    if said is None and progress is not None:
        said = progress.location or progress.output_dir
    return in_full(said, spec.working_dir) if said else None


def in_full(output: str, working_dir: str) -> str:
    """An output location that means the same wherever it is read; two that are equal are one place."""
    location = parse_location(output)
    if location.scheme is not Scheme.FILE:
        return str(location)
    return os.path.realpath(os.path.join(working_dir, location.path))


__all__ = ["in_full", "output_of"]
