"""Makes a process image of a job's pod. After that, the job either runs on or is suspended.

The pod makes, commits and checks the image, see `safepoint.jobs.local.images.image_request`. The job is suspended
only after that. Until the pod gets SIGTERM, its processes stay stopped. If no SIGTERM arrives in time, the processes
run on.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from safepoint.errors import AccessDeniedError, ConflictError, FreezeError, SafepointError, UnsupportedError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import at, name_of, uid_of
from safepoint.jobs.cluster.records.pod_image import IMAGE, PodImage, image_of
from safepoint.jobs.cluster.records.submitted_record import read_submitted
from safepoint.jobs.cluster.state import ClusterJob, Observed, describe
from safepoint.jobs.cluster.suspension.pod_requests import MOST_S, ask_first_pod
from safepoint.jobs.cluster.suspension.stop import OtherSave, stop_job
from safepoint.jobs.model.states import JobState

_MODULE = "safepoint.jobs.local.images.image_request"
_log = logging.getLogger("safepoint")


def freeze_job(
    api: ClusterApi,
    look: Callable[[], Observed],
    *,
    is_running_after: bool,
    timeout_s: float | None,
) -> tuple[ClusterJob, PodImage]:
    """Make an image of the job's pod.

    Args:
        api: the API of the cluster, in the namespace of the jobs.
        look: returns the objects of the job as they are now.
        is_running_after: whether the job runs on; otherwise it is suspended when the image is complete.
        timeout_s: the time limit for the image and the suspension together; None for no limit. The image alone may
            never take longer than 15 minutes.

    Raises:
        UnsupportedError: the pods of the job cannot make images.
        ConflictError: the job does not run, another person stops it, or it ended before it was suspended.
        AccessDeniedError: you may not stop the job, or run programs in its pod.
        SafepointError: there is no image, and the job runs on.
        WaitTimeoutError: there is an image, but the pod has not ended yet. The request to suspend the job stays in
            effect.
    """
    seen = look()
    place = api.connection.name
    job = describe(seen, place=place)
    _check(job, seen)
    if is_running_after:
        image = _request(api, job, seen, is_running_after=True, timeout_s=timeout_s)
        _record(api, seen, image)
        return replace(job, image=image), image
    images: list[PodImage] = []

    def save(seen: Observed, job: ClusterJob) -> OtherSave:
        _check(job, seen)
        images.append(_request(api, job, seen, is_running_after=False, timeout_s=timeout_s))
        annotations = {IMAGE: images[0].to_annotation()}
        return OtherSave(annotations=annotations, step=images[0].safe_step, what="its process image was made")

    stopped = stop_job(api, look, place=place, timeout_s=timeout_s, save=save)
    if not images:
        raise ConflictError(f"job {job.name} was not frozen: another person suspends it; it is {stopped.state}")
    if stopped.state.is_over:
        raise ConflictError(
            f"job {job.name} is {stopped.state}: it ended before it was suspended; the image {images[0].path} stays",
            hint=f"`safepoint status {job.name}` shows how it ended",
        )
    message = f"its process image is {images[0].path}, which was read and checked before the job was suspended"
    return replace(stopped, message=message, receipt=None, image=images[0]), images[0]


def _check(job: ClusterJob, seen: Observed) -> None:
    """Check that an image of a job can be made.

    Raises:
        UnsupportedError: its pods cannot make images.
        ConflictError: it does not run.
    """
    submitted = read_submitted(seen.trainjob)
    if submitted is None or not submitted.makes_images:
        raise UnsupportedError(
            f"job {job.name} was submitted without --freeze-as-last-resort, so its pods cannot make process images; "
            "nothing was done",
            hint="`safepoint suspend` saves a checkpoint; submit the next job with this option",
        )
    if job.state is not JobState.RUNNING:
        raise ConflictError(
            f"job {job.name} cannot be frozen: it is {job.state}; nothing was done", hint="freeze it when it trains"
        )


def _record(api: ClusterApi, seen: Observed, image: PodImage) -> None:
    """Record an image of a job that runs on."""
    change = {"metadata": {"uid": uid_of(seen.trainjob), "annotations": {IMAGE: image.to_annotation()}}}
    try:
        api.patch("trainjobs", name_of(seen.trainjob), change)
    except SafepointError as error:
        _log.warning("the image is complete, but `safepoint status` does not show it: %s", error.message)


def _request(
    api: ClusterApi, job: ClusterJob, seen: Observed, *, is_running_after: bool, timeout_s: float | None
) -> PodImage:
    limit_s = MOST_S if timeout_s is None else min(MOST_S, timeout_s)
    what = "run-on" if is_running_after else "hold"
    try:
        pod, answer = ask_first_pod(api, seen, _MODULE, what, limit_s=limit_s)
    except SafepointError as error:
        kind = AccessDeniedError if isinstance(error, AccessDeniedError) else FreezeError
        raise kind(
            f"job {job.name} was not frozen, and continues to run: {error.message}", hint=error.hint
        ) from error
    image = image_of(at(answer, "image"), job.output)
    if image is None:
        raise FreezeError(f"job {job.name} was not frozen, and continues to run: pod {pod} named no image")
    return image
