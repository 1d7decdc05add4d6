"""Details of a job that need further requests, or the list of all jobs. Only `status` and the page of the job show
them."""

from typing import Any

from safepoint.jobs.local.slots import place_in_queue
from safepoint.jobs.model.job_place import HasDetails, JobPlace
from safepoint.jobs.model.records import JobRecord
from safepoint.jobs.model.states import JobState


def details_of(jobs: JobPlace[Any], job: Any) -> dict[str, Any]:
    """The details of a job, as JSON values.

    Returns:
        `queue_place`: its position among the jobs that wait, from 1; None if it does not wait, or if the position is
            unknown.
        `last_lines`, only for a job on a cluster: the last lines of the pod that failed first; empty unless the job
            has failed.
        `memory`, only for a job on a cluster: in `pods`, how many bytes of memory each pod uses; in `missing`, why
            the memory is not known.
    """
    if isinstance(jobs, HasDetails):
        return jobs.details_of(job)
    is_in_queue = isinstance(job, JobRecord) and job.state in {JobState.QUEUED, JobState.PREEMPTED}
    return {"queue_place": place_in_queue(job.name, jobs.jobs()) if is_in_queue else None}
