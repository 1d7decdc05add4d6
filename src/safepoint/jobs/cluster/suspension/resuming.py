"""Continues a suspended job from its newest checkpoint, or from its process image if the image is newer.

The next pod decides between the two when it starts, see `safepoint.jobs.local.newest_state`.
"""

from safepoint.errors import ConflictError, NotFoundError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import Object, at, name_of
from safepoint.jobs.cluster.records.pod_image import IMAGE, PodImage
from safepoint.jobs.cluster.records.receipts import RECEIPT
from safepoint.jobs.cluster.state import SUSPENDED_BY, ClusterJob, Observed
from safepoint.jobs.model.states import JobState


def check_can_resume(job: ClusterJob) -> None:
    """Check that a job is suspended, or being suspended.

    Raises:
        ConflictError: it is in another state.
    """
    if job.state not in {JobState.SUSPENDED, JobState.SUSPENDING}:
        hint = "submit it again" if job.state.is_over else f"`safepoint logs -f {job.name}` shows its output"
        raise ConflictError(f"job {job.name} is {job.state}, not suspended", hint=hint)


def image_to_thaw(job: ClusterJob) -> PodImage:
    """The image that the next pod of a suspended job restores.

    Raises:
        NotFoundError: no image is recorded.
        ConflictError: a checkpoint is newer, or the job is not suspended.
    """
    check_can_resume(job)
    instead = f"`safepoint resume {job.name}` continues the job from its newest checkpoint"
    if job.image is None:
        raise NotFoundError(
            f"no process image of job {job.name} is known; nothing was done",
            hint=f"{instead}; if the last pod made an image at its deadline, the next pod finds it, and may use it",
        )
    if not job.image.is_newer_than(job.safe_step):
        raise ConflictError(
            f"the next pod of job {job.name} would not restore {job.image.path}, because the checkpoint of step "
            f"{job.safe_step} is newer; nothing was done",
            hint=instead,
        )
    return job.image


def release(api: ClusterApi, seen: Observed) -> None:
    """Let the cluster start the pods of a suspended job again."""
    released: Object = {"metadata": {"annotations": {SUSPENDED_BY: None, RECEIPT: None, IMAGE: None}}}
    if seen.workload is not None:
        if at(seen.workload, "spec", "active") is False:
            api.patch("workloads", name_of(seen.workload), {"spec": {"active": True}})
    else:
        released["spec"] = {"suspend": False}
    api.patch("trainjobs", name_of(seen.trainjob), released)
