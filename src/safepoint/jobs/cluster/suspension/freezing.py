"""Makes a process image of a job's pod. After that, the job either runs on or is suspended.

The pod makes, commits and checks the image, see `safepoint.jobs.local.images.image_request`. The job is suspended
only after that. Until the pod gets SIGTERM, its processes stay stopped. If no SIGTERM arrives in time, the processes
run on.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from safepoint.errors import AccessDeniedError, ConflictError, FreezeError, SafepointError, UnsupportedError
from safepoint.jobs.cluster.api import ClusterApi
from safepoint.jobs.cluster.objects import at, items
from safepoint.jobs.cluster.records.submitted_record import read_submitted
from safepoint.jobs.cluster.state import ClusterJob, Observed, describe
from safepoint.jobs.cluster.suspension.pod_requests import MOST_S, ask_first_pod
from safepoint.jobs.cluster.suspension.stop import stop_job
from safepoint.jobs.model.states import JobState

_MODULE = "safepoint.jobs.local.images.image_request"
_FOLDER = "images"
_KINDS = {
    **dict.fromkeys(("name", "created", "program"), str),
    **dict.fromkeys(("num_processes", "size_bytes", "memory_bytes", "num_pages", "num_stored"), int),
}
"""The values that a pod reports about an image, and their types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodImage:
    """A process image, as a pod describes it. The pod has made and checked the image.

    Args:
        name: its name.
        path: its location.
        created: when it was made (RFC 3339 UTC).
        program: the name of the root process.
        num_processes: how many processes it has.
        size_bytes: the size of its files.
        memory_bytes: the memory of its processes.
        num_pages: how many pages of memory it has.
        num_stored: how many of these it stores itself.
        needs: the older images whose pages it uses.
    """

    name: str
    path: str
    created: str
    program: str
    num_processes: int
    size_bytes: int
    memory_bytes: int
    num_pages: int
    num_stored: int
    needs: tuple[str, ...]


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
        return job, _request(api, job, seen, is_running_after=True, timeout_s=timeout_s)
    images: list[PodImage] = []

    def save(seen: Observed, job: ClusterJob) -> None:
        _check(job, seen)
        images.append(_request(api, job, seen, is_running_after=False, timeout_s=timeout_s))

    stopped = stop_job(api, look, place=place, timeout_s=timeout_s, save=save)
    if not images:
        raise ConflictError(f"job {job.name} was not frozen: another person suspends it; it is {stopped.state}")
    if stopped.state.is_over:
        raise ConflictError(
            f"job {job.name} is {stopped.state}: it ended before it was suspended; the image {images[0].path} stays",
            hint=f"`safepoint status {job.name}` shows how it ended",
        )
    message = f"it is frozen in {images[0].path}, which was read and checked before the job was suspended"
    return replace(stopped, message=message, receipt=None), images[0]


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


def _request(
    api: ClusterApi, job: ClusterJob, seen: Observed, *, is_running_after: bool, timeout_s: float | None
) -> PodImage:
    limit_s = MOST_S if timeout_s is None else min(MOST_S, timeout_s)
    what = "run-on" if is_running_after else "hold"
    try:
        pod, answer = ask_first_pod(api, seen, _MODULE, what, limit_s=limit_s)
    except SafepointError as error:
        kind = AccessDeniedError if isinstance(error, AccessDeniedError) else FreezeError
        raise kind(f"job {job.name} was not frozen, and runs on: {error.message}", hint=error.hint) from error
    image = _image_of(at(answer, "image"), job.output)
    if image is None:
        raise FreezeError(f"job {job.name} was not frozen, and runs on: pod {pod} named no image")
    return image


def _image_of(document: Any, output: str | None) -> PodImage | None:
    """The image in the answer of a pod; None if the answer describes none."""
    values: dict[str, Any] = {name: at(document, name) for name in _KINDS}
    if any(type(value) is not _KINDS[name] for name, value in values.items()):
        return None
    path = f"{(output or '').rstrip('/')}/{_FOLDER}/{values['name']}"
    return PodImage(path=path, needs=tuple(map(str, items(document, "needs"))), **values)
