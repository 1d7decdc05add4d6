"""Reads the details of a job of this machine for a notebook: curves, attempts, events and checkpoints."""

from safepoint.checkpoint.tools.documents import OURS, state_of
from safepoint.errors import NotFoundError, SafepointError
from safepoint.foundation.bounded import Work
from safepoint.jobs.local.local_jobs import LocalJobs
from safepoint.jobs.local.outputs import open_output
from safepoint.jobs.model.records import JobRecord
from safepoint.notebook.views import CheckpointView, JobDetails
from safepoint.progress.metric_history import current_points, read_points
from safepoint.storage.location import parse_location

_READ_WITHIN_S = 1.0
"""The time limit for reading the checkpoints, in seconds: a file server that does not answer must not block."""


def read_details(name: str, created: str) -> JobDetails:
    """The curves, events, attempts and checkpoints of a job. Checkpoints in an object store are not read.

    Args:
        name: the full name of the job.
        created: when the job was created. A later job may have the same name.

    Raises:
        NotFoundError: the job does not exist any more.
    """
    with LocalJobs() as jobs:
        job = jobs.job(name)
        if job.created != created:
            raise NotFoundError(f"the job {name!r} that was created at {created} does not exist any more")
        output = jobs.output_of(job)
        return JobDetails(
            points=current_points(read_points(jobs.metrics_file(name))),
            attempts=jobs.attempts(name),
            events=jobs.events(name),
            checkpoints=None if output is None else Work(lambda: _checkpoints(job, output)).result(_READ_WITHIN_S),
        )


def _checkpoints(job: JobRecord, output: str) -> list[CheckpointView] | None:
    if not parse_location(output).is_folder:
        return None
    try:
        inventory = open_output(job.spec, output)
        if inventory.folder is None or not inventory.folder.is_dir():
            return []
        return [
            CheckpointView(
                name=item.name,
                state=state_of(item, item.faults, deep=False),
                trigger=None if item.stated is None else str(item.stated.trigger),
                size_bytes=item.size_bytes,
                num_files=item.num_files,
                created_s=item.created_s,
                path=item.where,
            )
            for item in inventory.items()
            if item.kind in OURS
        ]
    except SafepointError:
        return None
