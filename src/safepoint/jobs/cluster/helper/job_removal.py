"""Deletes the checkpoints of a job on a cluster, before the job itself is deleted.

First, the job is stopped, and gets the annotation `REMOVAL`. The annotation says that some checkpoints of the job may
be gone. If the command is killed before all checkpoints are deleted, the job and its annotation still exist. If the
user runs the command again, it deletes the remaining checkpoints.
"""

import contextlib
from collections.abc import Collection, Mapping
from typing import Protocol

from safepoint.errors import ConflictError, NotFoundError, WaitTimeoutError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.helper.job_storage import location_of, remove_checkpoints, storage_of
from safepoint.jobs.cluster.objects import Object, name_of
from safepoint.jobs.cluster.records.storage_record import named_output
from safepoint.jobs.cluster.spec import removal_note
from safepoint.jobs.cluster.state import ClusterJob, Observed
from safepoint.jobs.model.job_progress import in_use_message
from safepoint.jobs.model.states import JobState
from safepoint.storage.location import parse_location


class _Jobs(Protocol):
    """The methods of `ClusterJobs` that this module needs."""

    def job(self, name: str) -> ClusterJob: ...

    def jobs(self) -> Collection[ClusterJob]: ...

    def observe(self, name: str) -> Observed: ...

    def suspend(self, name: str, *, timeout_s: float | None = None) -> ClusterJob: ...


def delete_checkpoints(jobs: _Jobs, api: ClusterApi, name: str, timeout_s: float | None) -> int:
    """Stop a job, and delete its checkpoints; returns their number.

    Raises:
        ConflictError: the job is being deleted, its output location is unknown or not certain, or another job uses
            that location.
        WaitTimeoutError: the job has not stopped in time; nothing was deleted.
        SafepointError: its checkpoints cannot be deleted; the job is stopped, and still exists.
    """
    job = jobs.job(name)
    others = {one.name: one.output for one in jobs.jobs() if one.name != name and not one.state.is_over}
    check_alone(name, job.output, others)
    if job.state is JobState.DELETING:
        raise ConflictError(f"job {name} is being deleted already; its checkpoints stay")
    with contextlib.suppress(NotFoundError):  # `scale` is replacing its TrainJob
        # Check this first: if it raises an error, the job was not stopped.
        storage_of(api, jobs.observe(name).trainjob)
    if not job.state.is_over:
        try:
            jobs.suspend(name, timeout_s=timeout_s)
        except WaitTimeoutError as error:
            raise WaitTimeoutError(
                f"{error.message}; nothing was deleted",
                hint="the job is being stopped but still exists; when it has stopped, delete it once more",
            ) from error
    trainjob = jobs.observe(name).trainjob
    if named_output(trainjob) != job.output:
        raise ConflictError(
            f"the output location of job {name} has changed from {job.output} to {named_output(trainjob)} meanwhile; "
            "nothing was deleted",
            hint="find out who changed it, and delete the job once more",
        )
    return remove_checkpoints(api, trainjob)


def check_alone(name: str, output: str | None, others: Mapping[str, str | None]) -> None:
    """Check that the checkpoints of a job may be deleted.

    Args:
        name: the name of the job.
        output: its output location; None if it is unknown.
        others: the output locations of all other jobs that have not ended, by the name of the job.

    Raises:
        ConflictError: the output location is unknown, or another job uses it.
    """
    alone = f"delete {name} and keep its checkpoints: `safepoint delete {name}`"
    if output is None:
        raise ConflictError(
            f"the output location of job {name} is unknown: it was submitted without --output-dir, or not by "
            "Safepoint; nothing was deleted",
            hint=alone,
        )
    location = location_of(output, name)
    using: list[str] = []
    for other, its in others.items():
        with contextlib.suppress(ValueError):
            if its is not None and parse_location(its) == location:
                using.append(other)
    if using:
        raise ConflictError(
            in_use_message(sorted(using), str(output)),
            hint=f"first delete {', '.join(sorted(using))}; or {alone}",
        )


def check_keeps_checkpoints(trainjob: Object) -> None:
    """Raise ConflictError for a job whose checkpoints are being deleted, or were deleted only in part."""
    if note := removal_note(trainjob):
        raise ConflictError(f"job {name_of(trainjob)} cannot be resumed: {note}")
