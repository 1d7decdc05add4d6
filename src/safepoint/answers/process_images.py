"""Puts the process image of a job into words."""

from collections.abc import Mapping
from typing import Any, cast

from safepoint.foundation import clock
from safepoint.foundation.units import format_age, format_bytes
from safepoint.jobs.model.job_place import Job


def image_of(job: Job) -> str | None:
    """The newest process image of a job, for a person; None if no image is known.

    For a job of a cluster, the text also states the age and the size of the image, and whether a checkpoint is newer.
    """
    path = job.particulars.get("image")
    facts = _facts(job)
    if facts is None:
        return path
    newest = "newer than every known checkpoint" if facts["is_newest"] else f"older than step {job.safe_step}"
    return f"{path}, {_age(facts)} old, {format_bytes(facts['size_bytes'])}, {newest}"


def continues_from(job: Job) -> str:
    """What a job of a cluster continues from if it is resumed, as a part of a sentence; empty if it has no image that
    is newer than its newest checkpoint."""
    facts = _facts(job)
    if facts is None or not facts["is_newest"]:
        return ""
    return f"from {facts['path']}, {_age(facts)} old, if its next pod can restore it and finds no newer checkpoint"


def _facts(job: Job) -> Mapping[str, Any] | None:
    return cast("Mapping[str, Any] | None", job.particulars.get("process_image"))


def _age(facts: Mapping[str, Any]) -> str:
    return format_age(max(0.0, clock.wall_s() - clock.parse_utc(facts["created"])))
